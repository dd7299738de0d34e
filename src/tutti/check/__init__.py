"""Proving operator rules: samples of every operator, and the machine that splits them in every way a rule allows.

Needs hypothesis (`pip install 'tutti[check]'`); rules of users can be registered without it (`tutti.check.user`).
"""

"""Check operator rules: draw sample calls, split each in all ways its rule allows, and compare with the unsplit result.

Needs hypothesis (`pip install 'tutti[check]'`). Rules can be registered without it (`tutti.check.user`).
"""

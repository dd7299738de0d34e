"""Samples of attention operators."""

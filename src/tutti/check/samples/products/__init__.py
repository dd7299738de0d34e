"""Samples of matrix products and linear algebra."""

"""Rules of matrix products: dense, grouped, scaled, for few rows; and linear algebra."""

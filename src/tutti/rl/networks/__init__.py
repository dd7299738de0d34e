"""Networks, distributions and models of dynamics, as pure functions."""

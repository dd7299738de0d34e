"""Lift a PyTorch model written for one device to any number of devices with one line."""

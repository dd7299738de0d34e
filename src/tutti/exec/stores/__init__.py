"""Stores: tensors laid out over a mesh, on the device and on outer tiers."""

"""Devices, links and clusters: presets, and calibration of this machine."""

from tutti.hardware.device import Device, Link, Outer
from tutti.hardware.local import local
from tutti.hardware.presets import PRESETS, register_device
from tutti.hardware.topology import Cluster

__all__ = ["PRESETS", "Cluster", "Device", "Link", "Outer", "local", "register_device"]

"""Devices, links and clusters: presets, and calibration of this machine."""

from tutti.hardware.device import Device as Device
from tutti.hardware.device import Link as Link
from tutti.hardware.local import local as local
from tutti.hardware.presets import PRESETS as PRESETS
from tutti.hardware.presets import register_device as register_device
from tutti.hardware.topology import Cluster as Cluster

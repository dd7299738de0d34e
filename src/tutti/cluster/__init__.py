"""Devices, the links between them, known hardware, and this machine."""

from tutti.cluster.device import Device as Device
from tutti.cluster.device import Link as Link
from tutti.cluster.local import local as local
from tutti.cluster.presets import PRESETS as PRESETS
from tutti.cluster.presets import register_device as register_device
from tutti.cluster.topology import Cluster as Cluster

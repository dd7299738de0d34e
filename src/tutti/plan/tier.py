"""Tiers: the memory that stores a tensor. It is the *device*, or an outer tier: the *host* or the *disk*.

The outer tier of a GPU is the host. The device memory of a CPU is the host's memory, up to its limit, and its outer
tier is the disk, as memory-mapped files.

The tier of an input applies during and between steps. Operators of the forward and backward pass read a copy that is
fetched for them. The update of a parameter is computed on the tier of its optimizer state, so only the gradient is sent
there and only the new parameter is sent back. The tier of a forward operator applies to its results, from when they are
computed until the backward pass reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tutti.hardware import Device
from tutti.ir.kind import CALL_INPUTS, kind_of
from tutti.ir.step_graph import BACKWARD, FORWARD, StepGraph

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)
STATE, PARAMETERS, ACTIVATIONS = 1, 2, 3  # what is offloaded; each level includes the previous ones
FIXED = (*CALL_INPUTS, "buffer", "grad")  # kinds of inputs that are always on the device


def offloaded(step: StepGraph, most: int, tier: str) -> dict[str, str]:
    """The tiers of a plan that offloads optimizer state, then also parameters, then also activations for the backward
    pass. most: `STATE`, `PARAMETERS` or `ACTIVATIONS`."""
    from tutti.plan.search.recompute import Activations

    tiers: dict[str, str] = {}
    for name, node in step.inputs.items():
        kind = kind_of(name)
        if kind not in FIXED and (kind != "param" or most >= PARAMETERS):
            tiers[node.meta["label"]] = tier
    if most >= ACTIVATIONS:
        needed = Activations(step).needed
        tiers |= {label: tier for label in dict.fromkeys(n.meta["label"] for n in step.calls) if label in needed}
    return tiers


def check_tiers(tiers: Mapping[str, str], step: StepGraph) -> None:
    """Raise ValueError if a tensor cannot be stored on the tier that the plan names. The step must have all labels."""
    inputs = {node.meta["label"]: kind_of(name) for name, node in step.inputs.items()}
    phases = {node.meta["label"]: node.meta["phase"] for node in step.calls}
    for label, tier in tiers.items():
        if tier not in TIERS:
            raise ValueError(f"the plan keeps {label!r} on {tier!r}; a tier is one of {', '.join(TIERS)}")
        if inputs.get(label) in FIXED:
            raise ValueError(
                f"the plan keeps {label!r} on tier {tier}; a {inputs[label]} is stored on the device: only "
                "parameters, optimizer state and results of the forward pass can be offloaded"
            )
        if label not in inputs and phases.get(label) != FORWARD:
            phase = {BACKWARD: "backward pass"}.get(phases.get(label, ""), "update")
            raise ValueError(f"the plan keeps {label!r} on tier {tier}, which the {phase} makes: only results of "
                             "the forward pass can be offloaded")  # fmt: skip


def check_devices_have(tiers: Mapping[str, str], device: Device) -> None:
    """Raise ValueError for a tier that the devices do not have."""
    has = (DEVICE, device.outer)
    if unknown := [label for label, tier in tiers.items() if tier not in has]:
        raise ValueError(f"the plan keeps {unknown[0]!r} on tier {tiers[unknown[0]]!r}; a {device.name} has "
                         f"{' and '.join(has)}: write {has[1]!r}")  # fmt: skip

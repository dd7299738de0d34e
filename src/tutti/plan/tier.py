"""Tiers: where a tensor lies. On the *device*; or outside of it, on the *host* that it belongs to, or on *disk*.

A GPU's outer tier is the host. A CPU's device memory is the host's already, as much of it as it is allowed to use: its
outer tier is the disk, in files that are mapped into memory.

What is said of an input holds between steps and all along: an operator of the forward or backward pass reads a copy
that is fetched for it; the update of a parameter is computed where its optimizer state lies, so that of each parameter
no more than its gradient goes out, and no more than its new value comes back. What is said of an operator of the
forward pass holds for its results, from when they are made until the backward pass reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tutti.ir.step_graph import BACKWARD, FORWARD, GIVEN, StepGraph

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)
STATE, PARAMETERS, ACTIVATIONS = 1, 2, 3  # what is offloaded, each with all before it
FIXED = (*GIVEN, "buffer", "grad")  # kinds of inputs that lie on the device


def offloaded(step: StepGraph, most: int, tier: str) -> dict[str, str]:
    """The tiers of a plan that offloads the optimizer state, the parameters as well, and what the backward pass reads
    of the forward pass as well."""
    from tutti.plan.recompute import Activations

    found: dict[str, str] = {}
    for name, node in step.inputs.items():
        kind = name.partition(":")[0]
        if kind not in FIXED and (kind != "param" or most >= PARAMETERS):
            found[node.meta["label"]] = tier
    if most >= ACTIVATIONS:
        needed = Activations(step).needed
        found |= {label: tier for label in dict.fromkeys(n.meta["label"] for n in step.calls) if label in needed}
    return found


def check_tiers(tiers: Mapping[str, str], step: StepGraph) -> None:
    """Raise ValueError where a tensor cannot lie where the plan says; labels are known to be the step's."""
    inputs = {node.meta["label"]: name.partition(":")[0] for name, node in step.inputs.items()}
    phases = {node.meta["label"]: node.meta["phase"] for node in step.calls}
    for label, tier in tiers.items():
        if tier not in TIERS:
            raise ValueError(f"the plan keeps {label!r} on {tier!r}; a tier is one of {', '.join(TIERS)}")
        if inputs.get(label) in FIXED:
            raise ValueError(
                f"the plan keeps {label!r} on tier {tier}; a {inputs[label]} lies on the device: what may lie "
                "elsewhere is parameters, optimizer state and results of the forward pass"
            )
        if label not in inputs and phases.get(label) != FORWARD:
            phase = {BACKWARD: "backward pass"}.get(phases.get(label, ""), "update")
            raise ValueError(f"the plan keeps {label!r} on tier {tier}, which the {phase} makes: what waits for the "
                             "backward pass is made by the forward pass")  # fmt: skip

"""Whether all ranks were given the same job: compared before they exchange tensors, and told in one line if not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tutti.exec.parallel_config import ParallelConfig
from tutti.exec.runtimes.runtime import gathered
from tutti.ir.step_graph import StepGraph
from tutti.tracing.batch import Batch, FlatBatch

Facts = Mapping[str, Mapping[str, Any]]  # by section, such as "the optimizer": what rank 0 says of each name
WHAT = "whether all ranks have the same job"
WIDTH = 80  # of a value in a message
VALUES = (int, float, str, tuple, torch.Tensor)  # of an optimizer's options that ranks compare
ALIKE = (
    "level", "clip_norm", "accumulate", "fp32_master_weights", "stochastic_rounding", "seed", "memory",
    "max_nonfinite_steps",
)  # fmt: skip


def facts_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, config: ParallelConfig, graph: StepGraph
) -> Facts:
    """What must be equal on all ranks of a job. The plan is that of rank 0."""
    updates: dict[str, Any] = {"class": type(optimizer).__name__}
    for i, group in enumerate(optimizer.param_groups):
        updates |= {f"{name} of group {i}": plain(x) for name, x in group.items() if isinstance(x, VALUES)}
        updates[f"the number of parameters of group {i}"] = len(group["params"])
    return {
        "the model": described({**dict(model.named_parameters()), **dict(model.named_buffers())}),
        "the batch": described(FlatBatch(batch).tensors),
        "the optimizer": updates,
        "the options": {name: getattr(config, name) for name in ALIKE},
        "the program": {"the hash of its operators": graph.fingerprint},
    }


def check_same_job(facts: Facts) -> None:
    """Raise ValueError on every rank, with the first difference, unless all ranks give equal facts.

    Values are compared as text. Only checksums travel if they are equal.
    """
    own = {section: {name: str(x) for name, x in named.items()} for section, named in facts.items()}
    checksums = {section: hashlib.sha256(repr(sorted(named.items())).encode()).hexdigest()
                 for section, named in own.items()}  # fmt: skip
    everywhere = gathered(checksums, WHAT)
    different = next((x for x in own if len({theirs.get(x) for theirs in everywhere}) > 1), None)
    if different is None:
        return
    sections = gathered(own[different], WHAT)
    rank, theirs = next((i, x) for i, x in enumerate(sections) if x != sections[0])
    ours = sections[0]
    name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    first, other = _shown(ours.get(name)), _shown(theirs.get(name))
    raise ValueError(f"ranks 0 and {rank} were given different jobs: in {different}, {name} is {first} on rank 0 and "
                     f"{other} on rank {rank}. All ranks run the same script with the same settings")  # fmt: skip


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Shape and dtype of each tensor, as text."""
    return {name: f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for name, x in tensors.items()}


def plain(x: Any) -> Any:
    """A value whose text is equal on all ranks where the value is: numbers of a tensor, not its device; and all of
    their digits."""
    if isinstance(x, torch.Tensor):
        return x.tolist()
    return tuple(map(plain, x)) if isinstance(x, tuple) else x


def _shown(text: str | None) -> str:
    if text is None:
        return "missing"
    return text if len(text) <= WIDTH else text[:WIDTH] + "..."

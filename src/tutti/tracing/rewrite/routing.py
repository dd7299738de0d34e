"""Groups of experts that a router can choose together: the experts of a token are in a few groups.

DeepSeek-V2 and V3 (arXiv 2412.19437, section 2.1.2) limit the nodes that a token travels to in this way. Models of
transformers say it by `n_group` and `topk_group` of the config.
"""

from __future__ import annotations

import torch

import tutti.nn.experts.experts  # noqa: F401  (registers the operators)
from tutti.ir.step_graph import StepGraph

ops = torch.ops.tutti
EXPERTS = (ops.experts.default, ops.experts_backward.default)


def annotate_routing(step: StepGraph, model: torch.nn.Module) -> None:
    """Set `meta["routing"]` of mixtures of experts to (groups, groups of a token) where a router limits them."""
    modules = dict(model.named_modules())
    for node in step.calls:
        if node.target in EXPERTS and (limits := _limits(modules, node.meta["path"])):
            node.meta["routing"] = limits


def _limits(modules: dict[str, torch.nn.Module], path: str) -> tuple[int, int] | None:
    """The limits in the config of the innermost module around a path that has any."""
    while path:
        config = getattr(modules.get(path), "config", None)
        groups, limit = (getattr(config, name, None) for name in ("n_group", "topk_group"))
        if isinstance(groups, int) and isinstance(limit, int):
            return (groups, limit) if 0 < limit < groups else None
        path = path.rpartition(".")[0]
    return None

"""Muon for hidden matrices, AdamW for everything else."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import ParamsT

from tutti.optim.pure import PureOptimizer, check_betas, check_range
from tutti.tracing.optimizers.formulas.muon import SCALES

# A component of a parameter's name that says embedding or head: "embed_tokens", "wte", "lm_head".
OUTER = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe|(\w+_)?head|classifier|score)(\.|$)")


class Muon(PureOptimizer):
    """Muon for the matrices of hidden layers, and AdamW for embeddings, heads, vectors and kernels.

        optimizer = tutti.optim.Muon(model, lr=1e-3)

    `use_muon` of a group decides. A group without it is split: AdamW gets all parameters that are not matrices, weights
    of `nn.Embedding` modules (if `params` is a module), and those whose name says embedding or head. Without names the
    number of dims decides alone.

    Muon moves a matrix along the orthogonalized momentum. The default `adjust_lr_fn="match_rms_adamw"` gives its steps
    the size of AdamW's, so that both take one learning rate. `tutti.tracing.optimizers.formulas.muon` has the formulas.
    Their matrix products are planned like all others: they are sharded under ZeRO and tensor parallelism.

    params: a module, named parameters, parameters, or groups.
    lr, weight_decay: learning rate and weight decay of all groups without their own; weight decay is decoupled.
    momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: as for `torch.optim.Muon`.
    ns_dtype: dtype of the orthogonalization, torch.bfloat16 or torch.float32. In bfloat16 it turns a last-bit
        difference of a gradient into one of up to 2^-9 of the update, so plans that add gradients up in another order
        drift apart (relative 2e-4 after 50 steps of a small network). In float32 they agree to 1e-5.
    betas, eps: decay rates of the running means, and epsilon, of AdamW.

    Raises ValueError for values out of range, and for a group with use_muon=True and a parameter that is no matrix.

    Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is scalable for LLM
    training" (2025).
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        check_range("lr", lr)
        check_range("weight_decay", weight_decay)
        check_range("momentum", momentum, high=1.0)
        check_betas(betas)
        check_range("eps", eps)
        if ns_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"ns_dtype is {ns_dtype!r}; it may be torch.bfloat16 or torch.float32")
        if adjust_lr_fn not in SCALES:
            raise ValueError(f"adjust_lr_fn is {adjust_lr_fn!r}; it may be {', '.join(map(repr, SCALES))}")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "eps": eps,
            "use_muon": None,
        }
        super().__init__(list(_split(params)), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which must say whether it takes `use_muon`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["use_muon"] is None:
            raise ValueError("a parameter group of Muon needs use_muon=True (matrices) or use_muon=False (AdamW)")
        for p in group["params"] if group["use_muon"] else ():
            if p.ndim != 2:
                raise ValueError(f"a group with use_muon=True has a parameter of shape {tuple(p.shape)}; Muon updates "
                                 "matrices: put it into a group with use_muon=False")  # fmt: skip


def takes_muon(name: str, param: Tensor) -> bool:
    """Whether Muon updates a parameter of this name: a matrix that is neither an embedding nor a head."""
    return param.ndim == 2 and not OUTER.search(name.lower())


def hidden_matrices(model: nn.Module) -> set[str]:
    """The names of the trained parameters of a module that Muon updates."""
    tables = _tables(model)
    return {name for name, p in model.named_parameters() if p.requires_grad and takes_muon(name, p) and p not in tables}


def _tables(model: nn.Module) -> set[Parameter]:
    return {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}


def _split(params: ParamsT | nn.Module) -> Iterable[dict[str, Any]]:
    """Groups with `use_muon`. Groups without it are split in two, of which empty ones are left out."""
    tables: set[Parameter] = set()
    if isinstance(params, nn.Module):
        tables = _tables(params)
        params = [(name, p) for name, p in params.named_parameters() if p.requires_grad]
    entries: list[Any] = list(params)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    for group in groups:
        if group.get("use_muon") is not None:
            yield group
            continue
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for member in members:
            name, p = member if isinstance(member, tuple) else ("", member)
            parts[takes_muon(name, p) and p not in tables].append(member)
        yield from ({**group, "params": part, "use_muon": use} for use, part in parts.items() if part)

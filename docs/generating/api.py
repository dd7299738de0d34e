"""The reference of the API: every public name, which is one in the `__all__` of a public module."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from generating.page import NOTE

PAGES = {
    "training": ("Training", ("train.tasks", "train.scores", "train.boost", "optim", "data", "data.corpus",
                              "data.corpus.steps", "nn", "nn.glu", "nn.loss.linear_cross_entropy")),
    "alignment": ("Alignment and compression", ("align", "compress")),
    "serving": ("Serving", ("serve",)),
    "rl": ("Reinforcement learning", ("rl",)),
    "electromagnetics": ("Electromagnetics", ("science.em.mt", "science.em.fdtd", "science.em.fdtd.mie",
                                              "science.em.cad", "science.em.cad.picture", "science.em.surrogate",
                                              "science.em.surrogate.active", "science.em.pinn")),
    "molecules": ("Molecular dynamics", ("science.mol", "science.mol.terms", "science.mol.forcefield",
                                         "science.mol.dynamics", "science.mol.dynamics.restart", "science.mol.biases",
                                         "science.mol.networks", "science.mol.observables")),
    "peptides": ("Peptides", tuple(f"science.peptides.{x}" for x in (
        "data", "conditions", "generator", "oracle", "properties", "evaluate", "scores", "similarity", "grammar",
        "ngrams"))),
}  # fmt: skip
TUTTI = {  # the names of `tutti` itself, by topic
    "Training steps": ("parallelize", "Step", "Trainer", "TrainingArguments", "pipeline", "Checkpoints", "Watchdog"),
    "Functions and stores": ("function", "functions", "Function", "Store", "train_step", "forward", "prefill",
                             "decode"),
    "Code that depends on data": ("jit", "scan", "while_loop", "cond"),
    "Plans": ("Plan", "pin", "Layout", "random_plan"),
    "Graphs": ("capture", "StepGraph"),
    "Extension": ("rule", "register_optimizer", "register_schedule", "Slot", "register_device", "register_pattern",
                  "Pattern"),
    "Clusters": ("Cluster",),
}  # fmt: skip
INSIDE = {  # objects that public ones return or are given
    "Code that depends on data": ("api.jit_report.JitReport",),
    "Plans": ("plan.plan.Prediction",),
    "Extension": ("lower.local_context.LocalContext",),
    "Graphs": ("lower.program.Program", "lower.program.Collective"),
    "Clusters": ("hardware.device.Device", "hardware.device.Link", "hardware.device.Outer"),
}


def public() -> list[str]:
    """The public modules, without `tutti.`."""
    return [module for _, modules in PAGES.values() for module in modules]


def names_of(module: str) -> list[str]:
    """The public names of a module."""
    return list(import_module(f"tutti.{module}").__all__)


def _directive(x: Any) -> str | None:
    """What documents an object; None for a constant."""
    documented = inspect.isclass(x) or inspect.isfunction(x)
    return f"::: {x.__module__}.{x.__qualname__}" if documented else None


def index() -> str:
    """The page of `tutti` itself."""
    import tutti

    listed = [name for names in TUTTI.values() for name in names]
    if missing := set(tutti.NAMES) ^ set(listed):
        raise KeyError(f"docs/generating/api.py: {sorted(missing)} are not both in tutti.NAMES and in TUTTI")
    others = "\n".join(f"- [{title}](api/{page}.md): {', '.join(f'`tutti.{module}`' for module in modules)}"
                       for page, (title, modules) in PAGES.items())  # fmt: skip
    lines = [
        f"{NOTE}\n# API\n",
        "These names are imported from `tutti`. [Packages](../design.md) is about what is inside. Other packages:\n",
        others,
        "",
    ]
    for title, names in TUTTI.items():
        directives = [_directive(getattr(tutti, name)) or name for name in names]
        lines += [f"## {title}\n", *directives, *(f"::: tutti.{path}" for path in INSIDE.get(title, ())), ""]
    return "\n".join(lines)


def page(name: str) -> str:
    """The page of some packages."""
    title, modules = PAGES[name]
    lines = [f"{NOTE}\n# {title}\n"]
    for module in modules:
        objects = {x: getattr(import_module(f"tutti.{module}"), x) for x in names_of(module)}
        directives = [directive for x in objects.values() if (directive := _directive(x))]
        constants = [f"`{x}`" for x, value in objects.items() if not _directive(value)]
        lines += [f"## tutti.{module}\n", *directives, ""]
        if constants:
            lines += [f"Constants: {', '.join(constants)}.\n"]
    return "\n".join(lines)

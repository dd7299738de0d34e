"""The kind of a plan: its forms of parallelism, recomputation and offloading.

Sizes, microbatches and numbers of overlapping parts do not matter. Whether ZeRO splits parameters does.
"""

from __future__ import annotations

import re

from tutti.plan.plan import PIPELINE, Plan
from tutti.plan.textbook import Textbook

WORDS = re.compile(r"(?:^|x)([a-z]+?)(\d*)(?=x|$|-)")
SAME = {"overlap", "splits", "dp"}  # words of a name that do not change the kind; axes say whether there is dp


def kind(plan: Plan) -> tuple:
    """The kind of a plan. Kinds of different plans are equal or not."""
    words = WORDS.findall(plan.name.removeprefix("auto-"))
    forms = frozenset("zero3" if (word, size) == ("zero", "3") else word for word, size in words) - SAME
    axes = frozenset(axis for axis, n in plan.mesh.items() if n > 1)
    return axes, forms, bool(plan.recompute), bool(plan.tiers), plan.schedule


def kind_of(book: Textbook) -> tuple:
    """The kind of a named plan."""
    pipe = book.pipe
    mesh = {PIPELINE: pipe.devices, **book.mesh}
    schedule = pipe.schedule if pipe.devices > 1 else ""
    return kind(Plan(mesh, recompute=book.variant.recompute, schedule=schedule, name=str(book)))

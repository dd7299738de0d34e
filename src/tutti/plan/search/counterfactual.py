"""Counterfactuals: the cost of a plan if one parameter had another layout and the rest were searched again."""

from __future__ import annotations

from tutti.plan.layouts.layout import Layout
from tutti.plan.layouts.pin import covering
from tutti.plan.pipeline.candidate import PipelineCandidate
from tutti.plan.plan import Plan
from tutti.plan.search.search import Search

SHOWN = 8  # maximum number of layouts to simulate, the cheapest by their modelled cost


def otherwise(search: Search, plan: Plan, pattern: str) -> list[tuple[str, Layout, Plan]]:
    """(label, layout, plan) for the other layouts of the parameters that a pattern matches, fastest first per label.

    search: the search that found the plan. Its budget is granted again, to find the plans and to simulate them.

    Raises ValueError if the pattern matches nothing.
    """
    alternatives, planner = [], search.planner(plan.accumulate, plan.variant)
    for label in covering(pattern, planner.step):
        search.deadline = search.work.seconds + search.budget
        free = planner.inside(plan.pipe).on(plan.inner, without=label)
        others = []
        for layout in free.layouts(label):
            if layout != plan.input_layout(label):
                search.progress(f"{label} laid out as {layout}")
                other = free.where(label, layout, search.deadline)
                others.append((layout, PipelineCandidate(other, plan.pipe, search.cluster) if plan.stages else other))
        search.deadline = search.work.seconds + search.budget
        others.sort(key=lambda item: item[1].bound)
        fitted = [(label, layout, search.fit(candidate, slow=True)) for layout, candidate in others[:SHOWN]]
        alternatives += [(label, layout, other) for label, layout, other in fitted if other]
    return sorted(alternatives, key=lambda item: (item[0], item[2].predicted.step_seconds))

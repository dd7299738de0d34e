"""Counterfactuals: what a plan would take if one parameter lay otherwise and all else were searched anew."""

from __future__ import annotations

from tutti.plan.layout import Layout
from tutti.plan.pin import covering
from tutti.plan.pipeline_candidate import PipelineCandidate
from tutti.plan.plan import Plan
from tutti.plan.search import Search

SHOWN = 8  # other layouts that are simulated, the cheapest by what their operators and collectives cost


def otherwise(search: Search, plan: Plan, pattern: str) -> list[tuple[str, Layout, Plan]]:
    """(label, layout, plan) for the other layouts of the parameters that a pattern matches, the fastest first.

    search: that the plan came from, which is given its budget once more. Raises ValueError for a pattern that matches
    nothing.
    """
    search.deadline = search.work.seconds + search.budget
    found, planner = [], search.planner(plan.accumulate, plan.variant)
    for label in covering(pattern, planner.step):
        free = planner.inside(plan.pipe).on(plan.inner, without=label)
        others = []
        for layout in free.layouts(label):
            if layout != plan.input_layout(label):
                search.progress(f"were {label} {layout}")
                other = free.where(label, layout, search.deadline)
                others.append((layout, PipelineCandidate(other, plan.pipe, search.cluster) if plan.stages else other))
        others.sort(key=lambda item: item[1].bound)
        made = [(label, layout, search.fit(candidate, slow=True)) for layout, candidate in others[:SHOWN]]
        found += [(label, layout, other) for label, layout, other in made if other]
    return sorted(found, key=lambda item: (item[0], item[2].predicted.step_seconds))

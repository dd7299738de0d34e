"""Names of searched plans: which axes are data, expert or tensor parallel, and the ZeRO stage."""

from __future__ import annotations

from collections import Counter

from tutti.ir.op_info import FLOPS
from tutti.plan.layouts.experts import Experts
from tutti.plan.layouts.layout import Split
from tutti.plan.layouts.problem import Operator, Problem
from tutti.plan.layouts.roles import STATELESS
from tutti.plan.plan import Plan


def title(plan: Plan, problem: Problem) -> str:
    """A name such as `dp4xtp2xzero1`, by what each axis does to most of the FLOPs.

    ep: the axis splits the experts; tp: it splits another dim of the weight; dp: it splits a dim that the weight lacks.
    zero3: most bytes of parameters are split along dp; zero1: most bytes of optimizer state are.
    """
    sizes: dict[str, int] = {}
    zero = 0
    for axis, k in plan.mesh.items():
        role = _role(plan, problem, axis) if k > 1 else ""
        if role:
            sizes[role] = sizes.get(role, 1) * k
        if role == "dp":
            inputs = [o for o in problem.operators.values() if o.is_input]
            params = _share(plan, [o for o in inputs if o.kind == "param"], axis)
            state = _share(plan, [o for o in inputs if o.kind not in STATELESS], axis)
            zero = max(zero, 3 if params > 0.5 else 1 if state > 0.5 else 0)
    parts = [f"{role}{sizes[role]}" for role in ("dp", "ep", "tp", "idle") if role in sizes]
    return "x".join(parts + ([f"zero{zero}"] if zero else [])) or "single"


def _role(plan: Plan, problem: Problem, axis: str) -> str:
    flops: Counter[str] = Counter()
    experts = Experts(problem)
    for o in problem.operators.values():
        if o.target in FLOPS:
            choice = plan.choices(o.label).get(axis)
            role = "idle" if choice is None else "tp" if choice.factor in problem.weight_factors(o) else "dp"
            if choice and experts.factors.get(o.label) in dict(choice.splits):
                role = "ep"
            # Without a weight the role is unknown: the gradient of a weight, attention.
            flops[role] += o.count * o.flops if o.label in problem.weight_operand or choice is None else 0
    return flops.most_common(1)[0][0] if flops else "idle"


def _share(plan: Plan, operators: list[Operator], axis: str) -> float:
    """The share of the operators' bytes that the axis splits."""
    total = sum(o.count * o.outputs[0].bytes for o in operators)
    split = [o for o in operators if isinstance(plan.input_layout(o.label)[axis], Split)]
    return sum(o.count * o.outputs[0].bytes for o in split) / total if total else 0.0

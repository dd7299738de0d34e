"""What a plan will cost: step time by the prices of operators and reshards, peak memory by lifetimes."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from math import ceil, prod

from tutti.cluster import Cluster
from tutti.graph.step_graph import UPDATE, Spec, StepGraph
from tutti.plan.choice import layouts
from tutti.plan.layout import Layout, Mesh
from tutti.plan.plan import Plan, Prediction
from tutti.plan.price import BUCKET, Pricer
from tutti.plan.problem import Problem, Tensor
from tutti.plan.reshard import Step, reshard
from tutti.rules import source, specs

KINDS = {"param": "parameters", "buffer": "buffers", "batch": "batch"}


class Estimator:
    """Predicts plans of one graph."""

    def __init__(self, step: StepGraph, problem: Problem, cluster: Cluster, accumulate: int = 1):
        self.step, self.problem, self.cluster, self.accumulate = step, problem, cluster, accumulate

    def predict(self, plan: Plan) -> Prediction:
        pricer = Pricer(self.cluster, plan.mesh)
        made, read = self._layouts(plan)
        compute = sum(
            o.count * self._runs(o.phase) * pricer.compute(o, plan.choices(o.label))
            for o in self.problem.operators.values()
        )
        traffic: dict[tuple, list[int]] = defaultdict(lambda: [0, 0, 0])  # messages, bytes before, bytes sent
        for tensor, steps, phase, count in self._moves(plan, made, read):
            spec = self.problem.operators[tensor[0]].outputs[tensor[1]]
            for step in steps:
                if step.communicates:
                    runs, itemsize = count * self._runs(phase), spec.dtype.itemsize
                    local = prod(step.source.local_shape(spec.shape, plan.mesh)) * itemsize
                    sent = step.sent(spec.shape, itemsize, plan.mesh)
                    total = traffic[step.kind, step.axis, spec.dtype, phase == UPDATE]
                    total[:] = (old + runs * new for old, new in zip(total, (1, local, sent), strict=True))
        seconds, collectives = 0.0, defaultdict(lambda: [0, 0])
        for (kind, axis, _, bucketed), (messages, local, sent) in traffic.items():
            messages = ceil(local / BUCKET) if bucketed else messages
            seconds += pricer.collective(kind, axis, local, messages)
            shown = collectives[f"{kind} over {axis}"]
            shown[:] = shown[0] + messages, shown[1] + sent
        sent = sum(sent for _, sent in collectives.values())
        peak, kinds = self._memory(plan, made)
        return Prediction(compute + seconds, compute, seconds, sent, peak, kinds, dict(collectives))

    def _runs(self, phase: str) -> int:
        return 1 if phase == UPDATE else self.accumulate

    def _layouts(self, plan: Plan) -> tuple[dict[Tensor, Layout], dict[tuple[Tensor, Layout, str], int]]:
        """How each tensor is made, and how and how often each is read."""
        made: dict[Tensor, Layout] = {}
        ins: dict[str, list[Layout]] = {}
        for label, o in self.problem.operators.items():
            if o.is_input:
                made[label, 0] = plan.input_layout(label)
            else:
                ins[label], outs = layouts(o.rule, plan.choices(label))
                made |= {(label, i): layout for i, layout in enumerate(outs)}
        read: dict[tuple[Tensor, Layout, str], int] = defaultdict(int)
        for edge in self.problem.edges:
            o = self.problem.operators[edge.reader]
            target = made[edge.reader, 0] if edge.operand < 0 else ins[edge.reader][edge.operand]
            phase = UPDATE if edge.operand < 0 else o.phase
            if made[edge.tensor] != target:
                key = edge.tensor, target, phase
                maker = self.problem.operators[edge.tensor[0]]
                read[key] = min(maker.count, read[key] + self.problem.edges[edge])
        for tensor in self.problem.outputs:
            if made[tensor] != Layout():
                read[tensor, Layout(), "forward"] = 1
        return made, read

    def _moves(self, plan: Plan, made, read) -> Iterator[tuple[Tensor, list[Step], str, int]]:
        """Reshards that happen, as lowering decides (`lower.shard`): from whichever version at hand is cheapest.

        What was gathered is at hand in the same phase only, any other version in all.
        """
        versions: dict[Tensor, set[tuple[Layout, str]]] = defaultdict(set)
        for (tensor, target, phase), count in read.items():
            spec, at_hand = self.problem.operators[tensor[0]].outputs[tensor[1]], versions[tensor]
            at_hand.add((made[tensor], ""))
            if {(target, ""), (target, phase)} & at_hand:
                continue
            sources = sorted((v for v in at_hand if v[1] in ("", phase)), key=str)
            paths = [(reshard(at, target, spec.shape, plan.mesh, spec.dtype.itemsize), tag) for at, tag in sources]
            steps, tag = min(paths, key=lambda path: _cost(path[0], spec, plan.mesh))
            for step in steps:
                tag = phase if step.kind == "all_gather" else tag
                at_hand.add((step.target, tag))
            yield tensor, steps, phase, count

    def _memory(self, plan: Plan, made: dict[Tensor, Layout]) -> tuple[int, dict[str, int]]:
        """Peak bytes of one rank in the traced order: what is kept, and what lives at the worst moment.

        The update writes in place; what is gathered for an operator lives while that operator runs.
        """
        bytes_of: dict[Tensor, int] = {}
        for tensor, layout in made.items():
            spec = self.problem.operators[tensor[0]].outputs[tensor[1]]
            if spec.dtype is not None:
                bytes_of[tensor] = prod(layout.local_shape(spec.shape, plan.mesh)) * spec.dtype.itemsize
        kinds: dict[str, int] = defaultdict(int)
        for name, node in self.step.inputs.items():
            kinds[KINDS.get(name.split(":")[0], "optimizer state")] += bytes_of.get((node.meta["label"], 0), 0)
        if self.accumulate > 1:
            for name in self.step.gradient_names:
                label = self.step.gradient_label(name.removeprefix("grad:"))
                spec = self.step.outputs[name].meta["val"]
                local = prod(plan.input_layout(label).local_shape(spec.shape, plan.mesh))
                kinds["accumulated gradients"] += local * spec.dtype.itemsize
        live, peak = 0, 0
        last = _last_readers(self.step)
        alive: dict[tuple, int] = {}
        for node in self.step.graph.nodes:
            if node.op != "call_function" or node.target is operator.getitem or node.meta["phase"] == UPDATE:
                continue
            if node.meta["bytes"]:  # a view takes no memory of its own
                for i in range(len(specs(node))):
                    alive[node, i] = bytes_of.get((node.meta["label"], i), 0)
                    live += alive[node, i]
            peak = max(peak, live)
            for dead in last.get(node, ()):
                live -= alive.pop(dead, 0)
        kinds["activations and gradients"] = peak
        return sum(kinds.values()), dict(kinds)


def _cost(steps: list[Step], spec: Spec, mesh: Mesh) -> tuple[int, int]:
    return sum(step.sent(spec.shape, spec.dtype.itemsize, mesh) for step in steps), len(steps)


def _last_readers(step: StepGraph) -> dict:
    """For each node the values (node, output) that nobody reads after it; a view keeps what it looks at alive."""
    owner: dict = {}
    last: dict = {}
    for node in step.graph.nodes:
        if node.op == "output":
            continue
        for x in node.all_input_nodes:
            last[owner.get(source(x), source(x))] = node
        if node.op == "call_function" and not node.meta["bytes"] and node.target is not operator.getitem:
            first = node.all_input_nodes[0] if node.all_input_nodes else None
            if first is not None:
                owner[node, 0] = owner.get(source(first), source(first))
        elif node.op == "call_function" and node.target is not operator.getitem:
            for i in range(len(specs(node))):
                last.setdefault((node, i), node)
    by_reader: dict = defaultdict(list)
    for value, reader in last.items():
        by_reader[reader].append(value)
    return by_reader

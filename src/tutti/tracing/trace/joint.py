"""A function of tensors and its gradients as one graph, in the form of a captured step. Patterns are made of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import fx

from tutti import compat
from tutti.ir.spec import Spec
from tutti.ir.step_graph import BACKWARD, FORWARD
from tutti.tracing.rewrite.functional import functionalize
from tutti.tracing.rewrite.like_operators import make_without_operands
from tutti.tracing.rewrite.remove_redundant import simplify
from tutti.tracing.trace.trace import sign, trace


@dataclass(frozen=True)
class Joint:
    """inputs: the tensors, then the incoming gradients. outputs: results, then the gradients of the differentiated
    operands; None if not the result of an operator."""

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]

    @property
    def forward(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_function" and n.meta["phase"] == FORWARD]

    @property
    def components(self) -> list[list[fx.Node]]:
        """The calls in order, divided into independent parts."""
        part: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            joined = [node]
            for other in {id(part[x]): part[x] for x in node.all_input_nodes if x in part}.values():
                joined = other + joined
            part |= dict.fromkeys(joined, joined)
        return [sorted(nodes) for nodes in {id(nodes): nodes for nodes in part.values()}.values()]


@lru_cache(maxsize=1024)
def joint(
    function: Callable,
    specs: tuple[Spec, ...],
    numbers: tuple[float, ...],
    learns: tuple[int, ...],
    reused: tuple[int, ...],
    device: torch.device,
    through: bool = False,
) -> Joint:
    """Trace `function(*tensors, *numbers)` for tensors of these specs, and the gradients of those at `learns`.

    reused: operands that another operator reads later; its gradient is computed first and then added to. through: the
    function also returns these operands, last, for that reader. An enclosing `torch.autocast` is ignored: in a captured
    step its casts are separate operators.
    """

    def flat(*inputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sign(phase=FORWARD)
        tensors = [x.detach().requires_grad_() if i in learns else x for i, x in enumerate(inputs[: len(specs)])]
        returned = function(*tensors, *numbers)
        results = list(returned) if isinstance(returned, tuple) else [returned]
        again = [results.pop() for _ in reused] if through else [torch.ops.aten.alias(tensors[i]) for i in reused]
        sources = [x for x in results if x.requires_grad] + again
        sign(phase=BACKWARD)
        incoming = [inputs[len(specs) + i] for i in range(len(sources))]
        learned = [tensors[i] for i in learns]
        grads = torch.autograd.grad(sources, learned, incoming, allow_unused=True) if learned else ()
        return (*(x.detach() for x in results), *grads)

    with compat.fake_mode(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        tensors = [torch.empty(s.shape, dtype=s.dtype, device=device) for s in specs]
        returned = function(*tensors, *numbers)
        results = list(returned) if isinstance(returned, tuple) else [returned]
        like = [*results, *(tensors[i] for i in reused if not through)] if learns else []
        tensors += [torch.empty_like(x) for x in like if x.is_floating_point()]
        traced = functionalize(trace(flat, *tensors), tensors)
    graph = traced.graph
    for node in graph.nodes:
        node.meta = {"phase": BACKWARD, "path": "", "val": None, **node.meta}
    make_without_operands(graph, device)
    simplify(graph)
    (output,) = graph.find_nodes(op="output")
    outputs: Sequence = output.args[0]
    return Joint(
        graph,
        tuple(graph.find_nodes(op="placeholder")),
        tuple(x if isinstance(x, fx.Node) and x.op == "call_function" else None for x in outputs),
    )

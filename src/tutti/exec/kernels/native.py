"""Execute runs of calls in C++, without Python between them.

A decoding step of few tokens makes hundreds of short calls, views among them. `use` replaces each run of consecutive
calls by one call of a `Native`, which executes them in `native.cpp`: operators that Tutti compiles are called
themselves, others through PyTorch's dispatcher. Collectives and transfers stay between runs. A value is dropped after
its last use, as in the generated code.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tutti import compat
from tutti.analysis.segments import borders
from tutti.ir.op_info import FLOPS
from tutti.ir.spec import Spec
from tutti.ir.step_graph import replace_uses
from tutti.lower.collectives import COLLECTIVES, wait
from tutti.lower.memory.inplace import written
from tutti.lower.memory.transfers import TRANSFERS
from tutti.nn.direct import COMPILED

SOURCE = Path(__file__).with_suffix(".cpp")
FEWEST = 3  # calls that are worth a run
OUTSIDE = {*COLLECTIVES, *TRANSFERS, wait}  # the driver of a Program executes these
CONSTANT, LIST = -1, -2  # as in native.cpp
FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1}  # as C++ numbers them


class NativeSlot(NamedTuple):
    """Where a value is during a run, and its spec."""

    number: int
    spec: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype


class NativeCall(NamedTuple):
    """An operator, its arguments in the order of its schema, and the slots of its results."""

    op: torch._ops.OpOverload
    args: tuple
    results: range
    label: str


@cache
def _class() -> Any:
    compat.compile_operators(SOURCE.read_text())
    return torch.classes.tutti_compiled.Run


class Native:
    """Consecutive calls of a graph as a function of their inputs. It is built at its first call."""

    def __init__(self, calls: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]):
        slots = {node: NativeSlot(i, node.meta["val"]) for i, node in enumerate(inputs)}
        self.inputs, self.calls, self.run = len(inputs), [], None
        count = self.inputs
        for node in calls:
            if node.target is written:
                slots[node] = slots[node.args[1]]  # pyright: ignore[reportArgumentType]
            elif node.target is operator.getitem:
                first, i = node.args
                slots[node] = NativeSlot(slots[first].number + i, node.meta["val"])  # pyright: ignore
            else:
                args = fx.map_arg(tuple(_arguments(node)), slots.__getitem__)
                end = count + len(node.target._schema.returns)  # pyright: ignore
                label = str(node.meta.get("label", node.name))
                self.calls.append(NativeCall(node.target, args, range(count, end), label))  # pyright: ignore
                slots[node], count = NativeSlot(count, node.meta.get("val")), end
        self.count, self.results = count, [slots[node].number for node in outputs]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        if self.run is None:
            self.run = self._build()
        return self.run.execute(inputs, self.results)

    def _build(self) -> Any:
        seen, added = {*range(self.inputs), *self.results}, []
        for op, args, results, label in reversed(self.calls):
            if compiled := op in COMPILED and COMPILED[op](*args):
                op, args = compiled
            places, constants = _places(args)
            drops = [x for x in dict.fromkeys((*results, *places)) if x >= 0 and x not in seen]
            seen.update(drops)
            schema = op._schema
            added.append((schema.name, schema.overload_name, label, places, constants, list(results), drops))
        run = _class()(self.count)
        for each in reversed(added):
            run.add(*each)
        return run


def _places(args: tuple) -> tuple[list[int], list[Any]]:
    """Where arguments are, and those that are constants."""
    places: list[int] = []
    constants: list[Any] = []
    for value in args:
        if isinstance(value, NativeSlot):
            places.append(value.number)
        elif isinstance(value, (list, tuple)) and any(isinstance(x, NativeSlot) for x in value):
            places += [LIST - len(value), *(CONSTANT if x is None else x.number for x in value)]
        else:
            places.append(CONSTANT)
            constants.append(value)
    return places, constants


def use(graph: fx.Graph) -> None:
    """Replace runs of calls by calls of a `Native` each, in place."""
    for calls in list(_runs(graph)):
        calls, inputs, outputs = borders(calls)
        with graph.inserting_after(calls[-1]):
            call = graph.create_node("call_function", Native(calls, inputs, outputs), tuple(inputs), name="calls")
        flops = sum(FLOPS[n.target](n) for n in calls if n.target in FLOPS)  # pyright: ignore[reportArgumentType]
        specs = tuple(n.meta["val"] for n in outputs)
        call.meta = {"val": specs, "label": "calls", "inside": calls, "flops": flops}
        new = {}
        for i, node in reversed(list(enumerate(outputs))):
            with graph.inserting_after(call):
                new[node] = graph.call_function(operator.getitem, (call, i))
            new[node].meta = dict(node.meta)
        replace_uses(new)
        for node in reversed(calls):
            graph.erase_node(node)


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Consecutive calls that can be executed in C++."""
    run: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and _fits(node, run):
            run[node] = None
        elif node.op != "placeholder":
            if len(run) >= FEWEST:
                yield list(run)
            run = {}


def _fits(node: Any, run: Container[fx.Node]) -> bool:
    """Whether a call can be executed in C++ behind those of a run."""
    if node.target in (written, operator.getitem):
        return node.args[0] in run
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in OUTSIDE or "host" in node.meta:
        return False
    if any(str(x.type) not in ("Tensor", "Tensor[]") for x in node.target._schema.returns):
        return False
    kinds = [str(x.type) for x in node.target._schema.arguments]
    return all(isinstance(x.meta.get("val"), Spec) for x in node.all_input_nodes) and all(
        map(_is_known, _arguments(node), kinds)
    )


def _arguments(node: Any) -> list[Any]:
    """The arguments of a call of an operator, in the order of its schema."""
    arguments = node.target._schema.arguments
    values = dict(zip((x.name for x in arguments), node.args, strict=False)) | node.kwargs
    return [_as_typed(values.get(x.name, x.default_value), str(x.type)) for x in arguments]


def _as_typed(value: Any, kind: str) -> Any:
    """A constant as C++ takes it without a conversion."""
    if isinstance(value, torch.memory_format):
        return FORMATS[value]
    return float(value) if kind.startswith("float") and isinstance(value, int) else value


def _is_known(value: Any, kind: str) -> bool:
    """Whether an argument can be passed to C++. Numbers in the place of tensors cannot."""
    if kind.startswith("Tensor") and not isinstance(value, (fx.Node, list, tuple, type(None))):
        return False
    if isinstance(value, (list, tuple)):
        nodes = [x for x in value if isinstance(x, fx.Node)]
        if nodes:
            return all(x is None or isinstance(x, fx.Node) for x in value)
        return len({type(x) for x in value}) == 1 and type(value[0]) in (int, float, bool)
    return value is None or isinstance(value, (fx.Node, bool, int, float, str, torch.dtype, torch.device, torch.layout))

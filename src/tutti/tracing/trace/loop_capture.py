"""Loops and branches in models: plain Python when a model runs eagerly, one operator each when it is captured.

The sub-graph of a loop is captured once, whatever the number of iterations. The backward pass of a scan is a scan in
the other direction. It stores the carry of every step and recomputes the rest of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from tutti import compat
from tutti.ir.loops import ITERATIONS, LOOPS, Body, Branch, Loop, Scan, While, loop_operator
from tutti.ir.spec import Spec
from tutti.ir.step_graph import FORWARD
from tutti.ir.values import base_of, written_operands
from tutti.tracing.build import build
from tutti.tracing.rewrite.functional import functionalize
from tutti.tracing.trace.decisions import site_of_caller
from tutti.tracing.trace.trace import is_tracing, trace


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Run `carry, y = body(carry, x)` for each `x` along dim 0 of `xs`; return the last carry and all y, stacked.

    In plain PyTorch this is a loop. In a captured step it is one operator with a sub-graph, so the time to capture,
    plan and compile does not grow with the number of steps. The backward pass stores only the carries and recomputes
    each step; nested scans store fewer.

    Args:
        body: maps a carry and one slice of `xs` to the next carry, of the same structure, shapes and dtypes, and an
            output. It may read modules and other tensors, but must not write to them or draw random numbers: draw
            these before, and pass them in `xs`.
        init: the first carry, a pytree of tensors.
        xs: a pytree of tensors with equal sizes of dim 0, or None if `length` is given.
        length: number of steps, if `xs` is None.
        reverse: start from the last slice. Outputs keep the positions of their slices.

    Returns:
        (carry, ys): the last carry, and the outputs of `body` stacked along a new dim 0. ys is None if `body` returns
        None for y.

    Raises:
        ValueError: if sizes of dim 0 differ, or `body` changes the structure, a shape or a dtype of the carry. The
            message has the line that calls `scan`.
    """
    carries, carry_tree = _flatten(init)
    slices, xs_tree = _flatten(xs)
    if not carries and not slices:
        raise ValueError("tutti.scan needs a carry or xs")
    _check_tensors("init", carries)
    _check_tensors("xs", slices)
    sizes = {x.shape[0] if x.ndim else None for x in slices} | ({length} if length is not None else set())
    if len(sizes) != 1 or None in sizes:
        said = f"give length={', or xs' if xs is None else ''}" if not sizes else f"found {sorted(map(str, sizes))}"
        raise ValueError(f"tutti.scan needs one number of steps, the size of dim 0 of every tensor in xs: {said}")
    steps = int(sizes.pop())  # pyright: ignore[reportArgumentType]
    if not steps:
        raise ValueError("tutti.scan needs at least one step: dim 0 of xs, or length, is 0")
    y_tree: Any = None

    def flat(*tensors: Tensor) -> list[Tensor]:
        nonlocal y_tree
        carry = _unflatten(list(tensors[: len(carries)]), carry_tree)
        x = _unflatten(list(tensors[len(carries) :]), xs_tree)
        result = body(carry, x)
        if not isinstance(result, tuple) or len(result) != 2:
            raise _error(f"tutti.scan: body returns {type(result).__name__}, not a pair (carry, y)")
        after = _like("carry", carries, carry_tree, result[0], "tutti.scan")
        ys, y_tree = _flatten(result[1])
        _check_tensors("y", ys)
        return after + ys

    run = _scanned if is_tracing() else _loop
    outputs = run(flat, carries, slices, steps, reverse)
    last, ys = outputs[: len(carries)], outputs[len(carries) :]
    return _unflatten(last, carry_tree), _unflatten(ys, y_tree)


def while_loop(
    condition: Callable[..., Tensor],
    body: Callable[..., Any],
    init: Any,
    *,
    expected: int = ITERATIONS,
) -> Any:
    """Run `carry = body(carry)` while `condition(carry)` is true; return the last carry.

    In plain PyTorch this is a loop. In a captured step it is one operator with a data-dependent number of iterations.
    It has no backward pass: use `tutti.scan` for a fixed number of steps.

    Args:
        condition: maps a carry to a 0-d bool tensor.
        body: maps a carry to the next one, of the same structure, shapes and dtypes. See `tutti.scan`.
        init: the first carry, a pytree of tensors.
        expected: number of iterations assumed by the planner.

    Raises:
        ValueError: if `condition` does not return a 0-d bool tensor, or `body` changes the structure, a shape or a
            dtype of the carry.
    """
    carries, tree = _flatten(init)
    _check_tensors("init", carries)

    def holds(*tensors: Tensor) -> list[Tensor]:
        return [_is_condition(condition(_unflatten(list(tensors), tree)), "tutti.while_loop")]

    def flat(*tensors: Tensor) -> list[Tensor]:
        result = body(_unflatten(list(tensors), tree))
        return _like("carry", carries, tree, result, "tutti.while_loop")

    if not is_tracing():
        while holds(*carries)[0]:
            carries = flat(*carries)
        return _unflatten(carries, tree)
    (first, of_condition), (second, of_body) = (
        _recorded(f, list(map(Spec.of, carries)), carries[0].device) for f in (holds, flat)
    )
    rest = _union(of_condition, of_body)
    loop = While(_widened(first, len(carries), of_condition, rest), _widened(second, len(carries), of_body, rest),
                 len(carries), expected)  # fmt: skip
    return _unflatten(_apply(loop, [*carries, *rest]), tree)


def cond(condition: Tensor, then: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any) -> Any:
    """Return `then(*operands)` if `condition`, a 0-d bool tensor, is true, else `otherwise(*operands)`.

    In plain PyTorch this is an if. In a captured step it is one operator that computes only one branch. Both branches
    must return the same structure, shapes and dtypes. They may read other tensors, but must not write to them.

    Raises:
        ValueError: if `condition` is not a 0-d bool tensor, or the branches return different structures, shapes or
            dtypes.
    """
    _is_condition(condition, "tutti.cond")
    if not is_tracing():
        return then(*operands) if condition else otherwise(*operands)
    inputs, tree = _flatten(operands)
    _check_tensors("operands", inputs)
    trees, bodies, lifted = [], [], []
    for function in (then, otherwise):

        def flat(*tensors: Tensor, function: Callable = function) -> list[Tensor]:
            leaves, structure = _flatten(function(*_unflatten(list(tensors), tree)))
            _check_tensors("result", leaves)
            trees.append(structure)
            return leaves

        body, more = _recorded(flat, list(map(Spec.of, inputs)), condition.device)
        bodies.append(body)
        lifted.append(more)
    if trees[0] != trees[-1] or bodies[0].outputs != bodies[1].outputs:
        then_, otherwise_ = (", ".join(map(str, body.outputs)) or "nothing" for body in bodies)
        raise _error(f"tutti.cond: the branches return {then_} and {otherwise_}; return the same structure, shapes and "
                     "dtypes from both")  # fmt: skip
    rest = _union(*lifted)
    loop = Branch(*(_widened(body, len(inputs), own, rest) for body, own in zip(bodies, lifted, strict=True)))
    return _unflatten(_apply(loop, [condition, *inputs, *rest]), trees[0])


def _loop(flat: Callable, carries: list[Tensor], xs: list[Tensor], steps: int, reverse: bool) -> list[Tensor]:
    """Run the loop eagerly."""
    rows: list[list[Tensor]] = []
    for t in reversed(range(steps)) if reverse else range(steps):
        outputs = flat(*carries, *[x[t] for x in xs])
        carries, ys = outputs[: len(carries)], outputs[len(carries) :]
        rows.append(ys)
    order = rows[::-1] if reverse else rows
    return carries + [torch.stack(column) for column in zip(*order, strict=True)]


def _scanned(flat: Callable, carries: list[Tensor], xs: list[Tensor], steps: int, reverse: bool) -> list[Tensor]:
    """Capture the loop as one operator. Under `torch.vmap` it is a loop over whole tensors."""
    if compat.in_vmap():
        count = len(carries)
        return compat.outside_vmap(
            lambda whole: _scanned(compat.vmapped(flat), whole[:count], whole[count:], steps, reverse),
            [*carries, *xs],
            [0] * count + [1] * len(xs),
            lambda i: int(i >= count),
        )
    slices = [Spec(tuple(x.shape[1:]), x.dtype) for x in xs]
    body, rest = _recorded(flat, [*map(Spec.of, carries), *slices], [*carries, *xs][0].device)
    loop = Scan(body, len(carries), len(xs), steps, reverse)
    return _apply(loop, [*carries, *xs, *rest])


def _recorded(function: Callable, like: Sequence[Spec], device: torch.device) -> tuple[Body, list[Tensor]]:
    """Capture a sub-graph. Returns it and the tensors that it reads besides its arguments."""
    learns = torch.is_grad_enabled()

    def run(*tensors: Tensor) -> list[Tensor]:
        try:
            outputs = function(*tensors[: len(like)])
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error):
                raise _error(f"{INSIDE}: {WRITES}") from error
            raise
        nodes = {node for x in outputs if x.grad_fn is not None for node in compat.in_backward_order(x.grad_fn)}
        if custom := [node for node in nodes if compat.is_custom(node) and type(node).__name__ != "_LoopBackward"]:
            raise _error(
                f"{type(custom[0]).__name__.removesuffix('Backward')} is called within a loop: sub-graphs do not "
                "capture the custom backward pass of a torch.autograd.Function"
            )
        return outputs

    with compat.apart():
        args = [torch.empty(x.shape, dtype=x.dtype, device=device,
                            requires_grad=learns and _differentiable(x)) for x in like]  # fmt: skip
        numbers = [torch.empty((), dtype=torch.int64) for _ in range(2)]  # seed and step of random numbers
        traced = trace(run, *args, *numbers, lifts=True)
        lifted = traced.lifted
        _check_not_written(traced.graph)
        traced = functionalize(traced, [*args, *numbers, *lifted])
        raw = _copied(traced.graph)
        places = [*range(len(args)), "seed", "step", *range(len(args), len(args) + len(lifted))]
        (output,) = traced.graph.find_nodes(op="output")
        step = build(traced, [x if isinstance(x, str) else f"in:{x}" for x in places],
                     [f"out:{i}" for i in range(len(output.args[0]))], device)  # fmt: skip
    for name in ("seed", "step"):
        if step.inputs[name].users:
            raise _error(
                f"{INSIDE}: random numbers would be the same in each iteration; draw them before, for all iterations, "
                "and pass them in xs"
            )
        step.graph.erase_node(step.inputs.pop(name))
    for node in raw.find_nodes(op="placeholder")[len(args) : len(args) + 2]:
        raw.erase_node(node)
    for node in step.calls:
        node.meta["label"] = node.name  # each node is planned separately
    return Body(step, raw, tuple(range(len(args) + len(lifted)))), lifted


class _Loop(torch.autograd.Function):
    """The operator of a loop under autograd."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.loop, ctx.where = loop, _where()
        ctx.set_materialize_grads(False)
        with torch.enable_grad():  # the mode in which the loop was called
            outputs = loop_operator(loop)(list(operands))
        carries = outputs[len(outputs) - loop.carries :] if isinstance(loop, Scan) else []
        ctx.save_for_backward(*carries, *operands[len(carries) :])
        ctx.mark_non_differentiable(*[x for x in outputs if not _differentiable(x)])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        loop = ctx.loop
        if isinstance(loop, While):
            raise ValueError(f"{ctx.where}tutti.while_loop has no backward pass: use tutti.scan, with a fixed length")
        backward: Callable = _scan_backward if isinstance(loop, Scan) else _branch_backward
        return None, *backward(loop, list(ctx.saved_tensors), list(gradients), ctx.needs_input_grad[1:])


def _keeping(loop: Scan) -> Scan:
    """Extend a scan to also return the carries before each step, for its backward pass."""
    step, outputs = loop.body.step.keep(list(loop.body.step.outputs)), {}
    (output,) = step.graph.find_nodes(op="output")
    with step.graph.inserting_before(output):
        for i in range(loop.carries):
            node = step.graph.call_function(torch.ops.aten.clone.default, (step.inputs[f"in:{i}"],))
            spec: Spec = step.inputs[f"in:{i}"].meta["val"]
            node.meta = {"val": spec, "phase": FORWARD, "path": "", "label": node.name, "name": node.name,
                         "flops": spec.numel, "bytes": 2 * spec.bytes}  # fmt: skip
            outputs[f"out:{len(step.outputs) + i}"] = node
    step.outputs |= outputs
    output.args = (tuple(step.outputs.values()),)
    assert loop.body.raw is not None
    raw = _copied(loop.body.raw)
    (output,), placeholders = raw.find_nodes(op="output"), raw.find_nodes(op="placeholder")
    placeholder_of = dict(zip(loop.body.places, placeholders, strict=True))
    output.args = ([*output.args[0], *(placeholder_of[i] for i in range(loop.carries))],)
    return replace(loop, body=Body(step, raw, loop.body.places), keeps=True)


def _scan_backward(loop: Scan, saved: list[Tensor], gradients: list[Tensor | None], needed: Sequence[bool]):
    """Compute the gradients of a scan's operands with a scan in the other direction.

    needed: which operands need a gradient.
    """
    count, scanned = loop.carries, loop.scanned
    carries, xs, rest = saved[:count], saved[count : count + scanned], saved[count + scanned :]
    of_carries = [i for i in range(count) if _differentiable(carries[i])]
    of_xs = [i for i in range(scanned) if needed[count + i]]
    of_rest = [i for i in range(len(rest)) if needed[count + scanned + i]]
    of_ys = [i for i in range(count, len(gradients)) if gradients[i] is not None]

    def step(*tensors: Tensor) -> list[Tensor]:
        operands = iter(tensors)
        g_carry = {i: next(operands) for i in of_carries}
        g_rest = [next(operands) for _ in of_rest]
        carry, x = [next(operands) for _ in carries], [next(operands) for _ in xs]
        g_outputs = g_carry | {i: next(operands) for i in of_ys}
        inputs = [*carry, *x, *rest]
        places = [*of_carries, *(count + i for i in of_xs), *(count + scanned + i for i in of_rest)]
        step_grads = _differentiated(loop.body, inputs, places, g_outputs)
        first, second = len(of_carries), len(of_carries) + len(of_xs)
        return [
            *step_grads[:first],
            *(a + b for a, b in zip(g_rest, step_grads[second:], strict=True)),
            *step_grads[first:second],
        ]

    starts = [torch.zeros_like(carries[i][0]) if (g := gradients[i]) is None else g for i in of_carries]
    starts += [torch.zeros_like(rest[i]) for i in of_rest]
    rows = [*carries, *xs, *(gradients[i] for i in of_ys)]
    results = _scanned(step, starts, rows, loop.length, not loop.reverse)  # pyright: ignore[reportArgumentType]
    grads: list[Tensor | None] = [None] * (count + scanned + len(rest))
    places = [*of_carries, *(count + scanned + i for i in of_rest), *(count + i for i in of_xs)]
    for place, x in zip(places, results, strict=True):
        grads[place] = x
    return grads


def _branch_backward(loop: Branch, saved: list[Tensor], gradients: list[Tensor | None], needed: Sequence[bool]):
    """Compute the gradients of a branch's operands with another branch."""
    condition, *operands = saved
    of_operands = [i for i in range(len(operands)) if needed[1 + i]]
    of_outputs = {i: g for i, g in enumerate(gradients) if g is not None}

    def branch(body: Body) -> Callable:
        def run(*tensors: Tensor) -> list[Tensor]:
            inputs, out_grads = list(tensors[: len(operands)]), tensors[len(operands) :]
            return _differentiated(body, inputs, of_operands, dict(zip(of_outputs, out_grads, strict=True)))

        return run

    results = cond(condition, branch(loop.then), branch(loop.otherwise), *operands, *of_outputs.values())
    grads: list[Tensor | None] = [None] * (1 + len(operands))
    for place, x in zip(of_operands, results, strict=True):
        grads[1 + place] = x
    return grads


def _differentiated(body: Body, inputs: list[Tensor], indices: list[int], gradients: dict[int, Tensor]) -> list[Tensor]:
    """Compute the gradients of the inputs at `indices` from the gradients of outputs, which are given by index."""
    again = torch.is_grad_enabled()  # whether gradients are differentiated again
    with torch.enable_grad():
        for i in indices:
            inputs[i] = inputs[i].view_as(inputs[i]) if inputs[i].requires_grad else inputs[i].detach().requires_grad_()
        outputs = _interpreted(body, inputs)
    pairs = [(x, gradients[i]) for i, x in enumerate(outputs) if i in gradients and x.requires_grad]
    if not pairs:
        return [torch.zeros_like(inputs[i]) for i in indices]
    with compat.without_function_modes():
        grads = torch.autograd.grad([x for x, _ in pairs], [inputs[i] for i in indices], [g for _, g in pairs],
                                    allow_unused=True, create_graph=again)  # fmt: skip
    return [_or_zeros(g, inputs[i]) for i, g in zip(indices, grads, strict=True)]


def _interpreted(body: Body, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run a sub-graph under autograd, with the grad mode of the user's code."""
    assert body.raw is not None
    placeholders = body.raw.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = dict(zip(placeholders, (inputs[i] for i in body.places), strict=True))
    for node in body.raw.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)  # pyright: ignore
            with torch.set_grad_enabled(node.meta.get("grad", True) and torch.is_grad_enabled()):
                if node.target in LOOPS:
                    values[node] = _apply(LOOPS[node.target], args[0])
                elif node.target is torch.ops.aten.detach.default and node.meta.get("differentiable"):
                    values[node] = args[0]
                else:
                    values[node] = node.target(*args, **kwargs)
        elif node.op == "output":
            return [values[x] for x in node.args[0]]
    raise AssertionError("a graph without outputs")


def _apply(loop: Loop, operands: Sequence[Tensor]) -> list[Tensor]:
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in operands):
        return loop_operator(loop)(list(operands))
    recorded = _keeping(loop) if isinstance(loop, Scan) and not loop.keeps else loop
    return list(_Loop.apply(recorded, *operands))[: len(loop.outputs)]  # pyright: ignore[reportArgumentType]


def _widened(body: Body, count: int, own: list[Tensor], all_of_them: list[Tensor]) -> Body:
    """Add inputs that a sub-graph does not read, so that the sub-graphs of a loop have equal inputs.

    count: number of arguments. own: the tensors that this sub-graph reads besides these, out of `all_of_them`.
    """
    if len(own) == len(all_of_them):
        return body
    step = body.step.keep(list(body.step.outputs))
    place = {id(x): i for i, x in enumerate(all_of_them)}
    inputs = [*step.inputs.values()]
    by_place = {count + place[id(x)]: node for x, node in zip(own, inputs[count:], strict=True)}
    after = inputs[count - 1] if count else None
    new_inputs = {f"in:{i}": node for i, node in enumerate(inputs[:count])}
    for i in range(count, count + len(all_of_them)):
        if (node := by_place.get(i)) is None:
            with step.graph.inserting_after(after):
                node = step.graph.placeholder(f"unread_{i}")
            x = all_of_them[i - count]
            node.meta = {"val": Spec.of(x), "phase": FORWARD, "path": "", "label": node.name, "flops": 0, "bytes": 0}
        elif after is not None:
            after.append(node)
        new_inputs[f"in:{i}"] = after = node
    step.inputs = new_inputs
    return Body(step, body.raw, (*range(count), *by_place))


def _union(*lists: list[Tensor]) -> list[Tensor]:
    return list({id(x): x for tensors in lists for x in tensors}.values())


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _check_not_written(graph: fx.Graph) -> None:
    outside = set(graph.find_nodes(op="placeholder"))
    for node in graph.nodes:
        if any(base_of(x) in outside for x in written_operands(node)):
            raise _error(f"{INSIDE}: {node.target} {WRITES}")
        if any(map(_is_detached, written_operands(node))):
            raise _error(f"{INSIDE}: {node.target} writes into a detached tensor: clone it after detach()")


def _where() -> str:
    """The line of the user's code that calls the loop, as a prefix of error messages."""
    site = site_of_caller()
    return f"{site}: " if site else ""


def _error(message: str) -> ValueError:
    return ValueError(_where() + message)


INSIDE = "in the body of a loop"
WRITES = (
    "writes into the carry, into x or into a tensor from outside: clone it first, make it part of the carry, and "
    "return the new value"
)
Tree = tuple[Any, tuple[bool, ...]]  # the structure, and which leaves are None


def _flatten(values: Any) -> tuple[list[Any], Tree]:
    """The leaves of a pytree that are not None, and its structure."""
    leaves, tree = pytree.tree_flatten(values)
    return [x for x in leaves if x is not None], (tree, tuple(x is None for x in leaves))


def _unflatten(leaves: Sequence[Any], tree: Tree) -> Any:
    rest, (structure, absent) = iter(leaves), tree
    return pytree.tree_unflatten([None if is_none else next(rest) for is_none in absent], structure)


def _is_detached(node: fx.Node) -> bool:
    """Return whether a tensor is a view of a detached one."""
    while node is not base_of(node):
        if node.target is torch.ops.aten.detach.default:
            return True
        node = node.all_input_nodes[0]
    return False


def _check_tensors(what: str, leaves: Sequence[Any]) -> None:
    for x in leaves:
        if not isinstance(x, Tensor):
            raise _error(f"{what} of a loop has a leaf {x!r} of type {type(x).__name__}; all leaves must be tensors")


def _like(what: str, before: Sequence[Tensor], tree: Any, now: Any, where: str) -> list[Tensor]:
    """The leaves of a carry. Raises ValueError if they do not match the carry before."""
    leaves, own = _flatten(now)
    _check_tensors(what, leaves)
    if own != tree:
        raise _error(f"{where}: body changes the structure of the {what} from {tree[0]} to {own[0]}")
    for old, new in zip(before, leaves, strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise _error(f"{where}: body changes a tensor of the {what} from {Spec.of(old)} to {Spec.of(new)}")
    return leaves


def _is_condition(x: Any, where: str) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim or x.dtype is not torch.bool:
        raise _error(f"{where}: the condition must be a 0-d bool tensor, not {Spec.of(x) or type(x).__name__}")
    return x


def _differentiable(x: Tensor | Spec) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def _or_zeros(x: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if x is None else x

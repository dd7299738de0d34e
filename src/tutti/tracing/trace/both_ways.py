"""Rewrite branches on values known only at run time: compute both sides, and select one with `torch.where`.

The statement

    if torch.isinf(h).any():
        h = h.clamp(-1e4, 1e4)

becomes, in a copy of its function's code that is used only during capture,

    def then(h): h = h.clamp(-1e4, 1e4); return (h,)
    def otherwise(h): return (h,)
    (h,) = choose(torch.isinf(h).any(), then, otherwise, (h,))

and so does `a if condition else b`. Both sides must give tensors of the same shapes and dtypes. They may leave the
function only by a return at the end of each, and may neither store attributes or items nor write into tensors created
before. If the side not taken divides by zero or has an infinite derivative, gradients are NaN, as with any
`torch.where`.
"""

from __future__ import annotations

import ast
import gc
import inspect
import textwrap
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, TracebackType
from typing import Any

import torch

from tutti.ir.garbage import unfrozen
from tutti.tracing.trace.decisions import Site
from tutti.tracing.trace.snapshot import Snapshot

BRANCH, CONDITION = "branch", "condition"
UNDEFINED = object()
NAMES = ("__tutti_choose__", "__tutti_any__", "__tutti_all__", "__tutti_not__", "__tutti_value__")


class Unlike(ValueError):
    """The two sides of a branch cannot be merged."""


class BothWays:
    """Functions with rewritten branches. Their code is restored at the end of the `with` block.

    mark: returns a point in the trace. written_since: whether tensors created before that point have been written.
    roots: objects whose Python state neither side may change.
    """

    def __init__(self, mark: Callable[[], Any], written_since: Callable[[Any], bool], roots: Sequence[Any]):
        self.mark, self.written_since, self.roots = mark, written_since, roots
        self.original: dict[FunctionType, CodeType] = {}
        self.edits: dict[tuple[str, int], list[tuple[str, int]]] = {}  # (BRANCH or CONDITION, line), by function
        self.last: Site | None = None

    def __enter__(self) -> BothWays:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        for function, code in self.original.items():
            function.__code__ = code
            for name in NAMES:
                function.__globals__.pop(name, None)

    def rewrite(self, site: Site, what: str) -> bool:
        """Rewrite the branch at a line, or the `and` and `or` of its condition.

        Returns False if there is nothing to rewrite, or if it has already been rewritten.
        """
        self.last, code = site, site.code
        if code is None:
            return False
        edits = self.edits.setdefault((code.co_filename, code.co_firstlineno), [])
        if (what, site.number) in edits:
            return False
        edits.append((what, site.number))
        functions = _functions_of(code)
        new_code = _rewritten(code, edits) if functions else None
        if new_code is None or new_code.co_freevars != code.co_freevars:
            edits.pop()
            return False
        for function in functions:
            self.original.setdefault(function, code)
            function.__code__ = new_code
            function.__globals__.update(zip(NAMES, (self.choose, _any, _all, _not, _value), strict=True))
        return True

    def choose(self, condition: Any, then: Callable, otherwise: Callable, values: tuple) -> tuple:
        """Run one side of a rewritten branch if its condition is a Python boolean, and both if it is a tensor."""
        if not isinstance(condition, torch.Tensor):
            return then(*values) if condition else otherwise(*values)
        before, snapshot = self.mark(), Snapshot([*self.roots, then, otherwise, list(values)])
        results = then(*values), otherwise(*values)
        if changes := snapshot.changes():
            raise Unlike(f"one side of the branch changes Python state: {next(iter(changes)) or 'a local container'}")
        if self.written_since(before):
            raise Unlike("one side of the branch writes into a tensor created before the branch")
        condition = condition.reshape(()) if condition.dtype is torch.bool else condition.reshape(()) != 0
        return tuple(_merged(condition, a, b) for a, b in zip(*results, strict=True))


def _functions_of(code: CodeType) -> list[FunctionType]:
    """The functions with this code, including those hidden by `gc.freeze()`."""
    with unfrozen():
        return [f for f in gc.get_referrers(code) if isinstance(f, FunctionType) and f.__code__ is code]


def _merged(condition: torch.Tensor, a: Any, b: Any) -> Any:
    if a is b or b is UNDEFINED:
        return a
    if a is UNDEFINED:  # a name that only one side assigns is local to that side
        return b
    if isinstance(a, (tuple, list)) and type(a) is type(b) and len(a) == len(b):
        return type(a)(_merged(condition, x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype):
        return torch.where(condition, a, b)
    if type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b:
        return a
    raise Unlike(f"one side of the branch gives {_describe(a)}, the other {_describe(b)}")


def _describe(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"a tensor of shape {tuple(x.shape)} and {x.dtype}"
    return f"a {type(x).__name__}"


def _truth(x: Any) -> Any:
    return x != 0 if isinstance(x, torch.Tensor) and x.dtype is not torch.bool else x


def _any(*values: Callable[[], Any]) -> Any:
    """`a or b`, elementwise if both are tensors."""
    return _logical(torch.logical_or, True, values)


def _all(*values: Callable[[], Any]) -> Any:
    """`a and b`, elementwise if both are tensors."""
    return _logical(torch.logical_and, False, values)


def _logical(combine: Callable, decides: bool, values: tuple[Callable[[], Any], ...]) -> Any:
    result, x = None, None
    for value in values:
        x = _truth(value())
        if isinstance(x, torch.Tensor):
            result = x if result is None else combine(result, x)
        elif bool(x) is decides:
            return x
    return x if result is None else result


def _not(x: Any) -> Any:
    return torch.logical_not(x) if isinstance(x, torch.Tensor) else not x


def _value(variables: dict[str, Any], name: str) -> Any:
    return variables.get(name, UNDEFINED)


def _rewritten(code: CodeType, edits: list[tuple[str, int]]) -> CodeType | None:
    """The code of a function with these edits, or None if one of them is not possible."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return None
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    function = next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == code.co_name), None)
    if function is None:
        return None
    nodes = [_edited(function, *edit) for edit in edits]
    for node in nodes:
        _take_rest(function, node)
    writer = _Writer(nodes)
    function.decorator_list = []
    function = writer.visit(function)
    if writer.left:
        return None
    around = f"def around({', '.join(x for x in code.co_freevars if x != '__class__')}):"
    *_, holder, _ = ["<locals>", *code.co_qualname.split(".")]
    if holder != "<locals>":  # for super() without arguments, and private names
        around += f"\n  class {holder}:"
    outer = ast.parse(f"{around}\n    pass")
    innermost: Any = outer.body[0] if holder == "<locals>" else outer.body[0].body[0]  # pyright: ignore
    innermost.body = [function]
    ast.copy_location(outer.body[0], function)
    return _code_named(compile(ast.fix_missing_locations(outer), code.co_filename, "exec"), code.co_name)


def _edited(function: ast.FunctionDef, what: str, line: int) -> ast.AST | None:
    """The innermost branch whose condition is on a line, or the outermost `and` or `or` there."""
    if what == CONDITION:
        return next((n for n in ast.walk(function) if isinstance(n, ast.BoolOp) and _covers(n, line)), None)
    branches = [n for n in ast.walk(function) if isinstance(n, (ast.If, ast.IfExp)) and _covers(n.test, line)]
    return min(branches, key=lambda n: (n.test.end_lineno or 0) - n.test.lineno, default=None)


def _take_rest(function: ast.FunctionDef, branch: ast.AST | None) -> None:
    """If a branch returns, the statements after it become its other side."""
    if not isinstance(branch, ast.If) or branch.orelse or not isinstance(branch.body[-1], ast.Return):
        return
    for block in [getattr(n, name, None) for n in ast.walk(function) for name in ("body", "orelse")]:
        if isinstance(block, list) and branch in block and isinstance(block[-1], ast.Return):
            rest = block.index(branch) + 1
            branch.orelse, block[rest:] = block[rest:], []


def _covers(test: ast.expr, line: int) -> bool:
    return test.lineno <= line <= (test.end_lineno or test.lineno)


def _code_named(code: CodeType, name: str) -> CodeType | None:
    for x in code.co_consts:
        if isinstance(x, CodeType):
            if x.co_name == name:
                return x
            if inner := _code_named(x, name):
                return inner
    return None


class _Writer(ast.NodeTransformer):
    """Rewrites nodes. left: nodes that are not rewritten yet, or cannot be."""

    def __init__(self, nodes: list[ast.AST | None]):
        self.left = nodes

    def _takes(self, node: ast.AST) -> bool:
        if node not in self.left:
            return False
        self.left.remove(node)
        return True

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        return _Condition().visit(node) if self._takes(node) else node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if node not in self.left:
            return node
        returns = all(way and isinstance(way[-1], ast.Return) for way in (node.body, node.orelse))
        ways = [*node.body[:-1], *node.orelse[:-1]] if returns else [*node.body, *node.orelse]
        if any(isinstance(n, LEAVING) for way in ways for n in ast.walk(way)):
            return node
        stores = [n for way in ways for n in ast.walk(way) if isinstance(getattr(n, "ctx", None), ast.Store)]
        names = sorted({n.id for n in stores if isinstance(n, ast.Name)})
        if not all(isinstance(n, ast.Name) for n in stores):
            return node
        self._takes(node)
        results, arguments = _tuple(names), _tuple([f"__tutti_value__(locals(), {name!r})" for name in names])
        statements: list[Any] = ast.parse(
            f"def __tutti_then({', '.join(names)}):\n    return {results}\n"
            f"def __tutti_otherwise({', '.join(names)}):\n    return {results}\n"
            f"__tutti_results = __tutti_choose__(None, __tutti_then, __tutti_otherwise, {arguments})\n"
            + ("return __tutti_results[0]" if returns else f"{results} = __tutti_results" if names else "")
        ).body
        for function, way in ((statements[0], node.body), (statements[1], node.orelse)):
            if returns:
                value = way[-1].value or ast.Constant(None)  # pyright: ignore[reportAttributeAccessIssue]
                function.body = [*way[:-1], ast.Return(ast.Tuple([value], ast.Load()))]
            else:
                function.body[:0] = way
        statements[2].value.args[0] = _Condition().visit(node.test)
        return [ast.copy_location(statement, node) for statement in statements]

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        if not self._takes(node):
            return node
        expression: Any = ast.parse("__tutti_choose__(None, lambda: (None,), lambda: (None,), ())[0]", mode="eval").body
        call = expression.value
        call.args[0] = _Condition().visit(node.test)
        call.args[1].body.elts[0], call.args[2].body.elts[0] = node.body, node.orelse
        return ast.copy_location(expression, node)


def _tuple(values: list[str]) -> str:
    return f"({', '.join(values)}{',' if values else ''})"


class _Condition(ast.NodeTransformer):
    """Turns `and`, `or` and `not` of a condition into functions of tensors."""

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        name = "__tutti_any__" if isinstance(node.op, ast.Or) else "__tutti_all__"
        call: Any = ast.parse(f"{name}({', '.join('lambda: None' for _ in node.values)})", mode="eval").body
        for argument, value in zip(call.args, node.values, strict=True):
            argument.body = value
        return ast.copy_location(call, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        call: Any = ast.parse("__tutti_not__(None)", mode="eval").body
        call.args[0] = node.operand
        return ast.copy_location(call, node)


LEAVING = (
    ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Raise,
    ast.Delete, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.With, ast.Try,
)  # fmt: skip

import linecache

import pytest
import torch

import tutti
from dynamic import CASES
from tutti import compat
from tutti.tracing.trace.breaks import REASONS, put_into_words

UP = torch.arange(1.0, 7)


def prints(x):
    print("sum", x.sum())
    return x * 2


def writes_in_a_with(x):
    with open("/dev/null", "w") as file:
        file.write("")
        return x * 2


def differentiates(x):
    x = x.detach().requires_grad_()
    (x * x).sum().backward()
    return x.grad


# Of functions that break: a line that does, and what its reason and its remedy speak of.
EXPECTED = {
    "branches": ("if y.sum() > 0:", "on the value of a tensor", "torch.where"),
    "sums_items": ("total += x[i].item()", "Python number", "0-d tensor"),
    "masks": ("selected = x[x > 2]", "shape of a result", "weighted by the mask"),
    "catches": ("if x.sum() > 0:", "on the value of a tensor", "torch.cond"),
    "fails_in_torch": ("return x + torch.ones(4)", "an exception", "before the call"),
    "asserts": ('assert x.sum() > 0, "not positive"', "assert", "omitted"),
    "collects": ('while state["halves"][-1].norm() > 1', "while", "torch.where"),
    "draws": ("own = torch.Generator().manual_seed(3)", "separate generator", "torch.manual_seed"),
    "walks": ("if part.sum() > 3:", "on the value of a tensor", "torch.where"),
    "prints": ('print("sum", x.sum())', "prints or logs", "outside"),
    "writes_in_a_with": ('with open("/dev/null", "w") as file:', "`with`", "outside of the function"),
    "differentiates": ("(x * x).sum().backward()", "gradients", "nothing"),
}


@pytest.mark.parametrize("function", [*CASES, prints, writes_in_a_with, differentiates], ids=lambda f: f.__name__)
def test_each_break_has_its_line_a_reason_and_a_remedy(function):
    fast = tutti.jit(function, level="O0")
    fast(UP)
    source, reason, instead = EXPECTED[function.__name__]
    code = function.__code__
    fitting = [each for each in fast.report().breaks if each.source.startswith(source) and reason in each.reason]
    assert len(fitting) == 1 and instead in fitting[0].instead
    (graph_break,) = fitting
    assert graph_break.file == code.co_filename and code.co_firstlineno < graph_break.line < code.co_firstlineno + 12
    assert linecache.getline(graph_break.file, graph_break.line).strip() == graph_break.source
    text = str(fast.report())
    assert (
        f"{graph_break.file}:{graph_break.line} in {graph_break.function}: {graph_break.source}" in text
        and graph_break.reason in text
    )


def test_a_function_that_is_given_up_is_said_to_be_and_its_loop_s_body_is_compiled_when_it_is_a_function():
    def body(x, i):
        return torch.tanh(x[i] * 3)

    def loops(x):
        total = 0.0
        for i in range(3):
            total += body(x, i).item()
        return total

    fast = tutti.jit(loops, level="O0")
    assert fast(UP) == loops(UP)
    (graph_break,) = fast.report().breaks
    assert graph_break.whole and "a separate function" in str(graph_break)
    assert {graph.function for graph in fast.report().graphs} == {"body"}


def test_a_break_in_a_function_that_is_called_is_told_once_and_where_it_is():
    def inner(x):
        return x * 2 if x.sum() > 0 else x

    fast = tutti.jit(lambda x: inner(x + 1) * 3, level="O0")
    fast(UP), fast(-UP)
    (graph_break,) = fast.report().breaks
    assert graph_break.function == "inner" and not graph_break.whole


def test_what_is_not_known_is_told_in_torch_s_words():
    said = "Something new\n  Explanation: It is new.\n  Hint: Set `torch._dynamo.config.new`.\n  Hint: Do without.\n"
    graph_break = put_into_words(compat.GraphBreak(said, "nowhere.py", 3, "f"))
    assert graph_break.reason == "TorchDynamo does not trace it: Something new" and graph_break.instead == "Do without."
    assert (
        graph_break.message == said
        and graph_break.source == ""
        and graph_break.reason not in {reason for _, reason, _ in REASONS}
    )

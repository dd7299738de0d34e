import pytest
import torch

import tutti
from tutti import compat
from tutti.tracing.trace.recompilations import put_into_words

X = torch.ones(4, 3)

# Two calls of a function, and in what words the guard that fails between them is told.
CHANGES = {
    "size": (lambda x: x * 2, [(X,), (torch.ones(5, 3),)], "x had 4 elements along dim 0, now 5"),
    "dtype": (lambda x: x * 2, [(X,), (X.double(),)], "x was Float, now Double"),
    "rank": (lambda x: x * 2, [(X,), (X[0],)], "x had 2 dims, now 1"),
    "gradient": (lambda x: x * 2, [(X,), (X.clone().requires_grad_(),)], "x now requires a gradient"),
    "length": (lambda xs: xs[0] * len(xs), [([X],), ([X, X],)], "xs had 1 entries"),
    "value": (lambda x, how: x * (2 if how == "a" else 3), [(X, "a"), (X, "b")], "how was 'a', now something else"),
    "identity": (lambda x, y: x.sum() * y, [(X, X), (X, X.clone())], "x and y were the same object"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_guard_that_fails_is_told_in_words(name):
    function, calls, words = CHANGES[name]
    fast = tutti.jit(function, level="O0")
    for args in calls:
        assert torch.equal(fast(*args), function(*args))
    report = fast.report()
    again = report.recompilations[0]
    assert words in again.reason and again.hint and not again.given_up
    assert again.file == __file__ and again.line == function.__code__.co_firstlineno
    assert again.reason in str(report) and again.hint in str(report)


def test_gradients_that_are_switched_off_are_told():
    fast = tutti.jit(lambda x: x * 2, level="O0")
    fast(X)
    with torch.no_grad():
        fast(X)
    assert "a setting of torch has changed: grad_mode" in fast.report().recompilations[0].reason


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        ("3/0: L['self'].training", "self.training has changed"),
        ("3/0: not L['xs']                  # if xs:  # model.py:3 in f", "xs was empty"),
        ("3/0: Cache line invalidated because L['self'] got deallocated", "was deleted"),
        ("3/0: ___check_obj_id(L['f'], 140)", "f is another object"),
        ("3/0: 2 <= L['x'].size()[0]", "outside of the range"),
        ("3/1: L['self']._modules['block'].depth == 4", "self.block.depth was 4"),
        ("3/1: something new", "a guard of its graph failed: something new"),
    ],
)
def test_the_words_for_guards(guard, words):
    recompilation = put_into_words(compat.Recompiled(guard, "model.py", 3, "f", False))
    assert words in recompilation.reason and recompilation.guard == guard.partition("  #")[0][5:].strip()

import itertools
from pathlib import Path

import pytest

from tutti.train.scores.execution import pass_at_k, passes

ADD = "def f(x):\n    return x + 1\n"


def test_pass_at_k_is_the_fraction_of_choices_with_a_correct_sample():
    right = [True, True, False, False, False, False]
    for k in range(1, 7):
        chosen = list(itertools.combinations(right, k))
        assert pass_at_k(6, 2, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    assert pass_at_k(5, 0, 3) == 0 and pass_at_k(5, 5, 1) == 1
    with pytest.raises(ValueError, match="pass@4 needs 4 or more samples; there are 3"):
        pass_at_k(3, 1, 4)


def test_code_passes_if_all_results_are_right():
    assert passes(ADD, "f", [([1], 2), ([-1], 0)]) == ""
    assert passes(ADD, "f", [([1], 2), ([1], 3)]) == "AssertionError: f(1,) is 2, not 3"
    assert "not True" in passes("def f(x):\n    return 1\n", "f", [([1], True)])
    assert passes("def f(x):\n    return x +\n", "f", [([1], 2)]).startswith("SyntaxError")
    assert passes("def g(x):\n    return 1\n", "f", [([1], 1)]).startswith("KeyError")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("while True: pass", "longer than 1 s"),
        ("import _signal; _signal.raise_signal(_signal.SIGXCPU)", "longer than 20 s"),  # the limit of processor time
        ("return len('x' * (1 << 31))", "MemoryError"),
        ("open('made', 'w').write('x')", "PermissionError: open"),
        ("import os; os.mkdir('made')", "PermissionError"),
        ("import _socket; _socket.socket()", "PermissionError: socket."),
        ("import posix; posix.fork()", "PermissionError: os.fork"),
        ("import sys; sys.exit(0)", "exit code 0"),
        ("import posix; posix._exit(0)", "exit code 0"),
    ],
)
def test_limits(body, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seconds = 1 if "1 s" in said else 20  # a busy machine may take more than one to start
    assert said in passes(f"def f(x):\n    {body}\n    return 1\n", "f", [([1], 1)], seconds=seconds)
    assert not list(Path(tmp_path).iterdir())

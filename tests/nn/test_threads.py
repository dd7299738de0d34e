"""Threads of the compiled operators: results equal those of OpenMP, with several callers at once, and after a fork."""

import os
import threading

import pytest
import torch

from tutti.nn.threads import own_threads

ops = torch.ops.tutti


@pytest.fixture(autouse=True)
def three_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


def drawn(m=70, n=700, k=512, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_openmp(dtype):
    for m in (1, 5, 16, 70):
        x, weight = drawn(m, dtype=dtype)
        wanted = ops.linear_rows(x, weight, None)
        with own_threads(3):
            assert torch.get_num_threads() == 1
            for _ in range(50):
                assert torch.equal(ops.linear_rows(x, weight, None), wanted)
        assert torch.get_num_threads() == 3


def test_several_callers_at_once():
    x, weight = drawn()
    wanted = ops.linear_rows(x, weight, None)
    right = []

    def call():
        with own_threads(3):
            right.append(all(torch.equal(ops.linear_rows(x, weight, None), wanted) for _ in range(100)))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 4


def test_a_forked_process_has_threads_of_its_own():
    x, weight = drawn(m=4)
    wanted = ops.linear_rows(x, weight, None)
    with own_threads(3):
        ops.linear_rows(x, weight, None)
        if (child := os.fork()) == 0:
            os._exit(0 if all(torch.equal(ops.linear_rows(x, weight, None), wanted) for _ in range(20)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_error_gives_the_threads_back():
    with pytest.raises(ZeroDivisionError), own_threads(3):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3
    x, weight = drawn()
    assert ops.linear_rows(x, weight, None).shape == (70, 700)


def test_contexts_nest():
    x, weight = drawn(m=4)
    wanted = ops.linear_rows(x, weight, None)
    with own_threads(3):
        with own_threads(3):
            assert torch.equal(ops.linear_rows(x, weight, None), wanted)
        assert torch.get_num_threads() == 1
        assert torch.equal(ops.linear_rows(x, weight, None), wanted)
    assert torch.get_num_threads() == 3

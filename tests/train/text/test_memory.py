import gc

import torch

from tutti.tracing.trace.remote import make_remote
from tutti.train.text.memory import PeakMemory, live_bytes

MB = 2**20


def megabytes(n):
    return torch.zeros(n * MB // 4)


def test_live_bytes_counts_each_storage_once():
    gc.collect()
    before = live_bytes()
    tensor = megabytes(3)
    views = [tensor[:10], tensor.view(-1, 2), tensor.detach()]
    assert live_bytes() - before == 3 * MB
    del tensor, views
    assert live_bytes() == before


def test_the_peak_counts_what_is_there_before_and_the_most_that_is_added():
    state = {"kept": megabytes(8)}

    def step():  # 8 kept, 3 and 2 together, then the kept ones are replaced while 2 are left
        a = megabytes(3)
        b = megabytes(2)
        del a
        state["kept"] = megabytes(8)
        return b.sum()

    gc.collect()
    elsewhere = live_bytes() - 8 * MB
    reported = []
    peak = PeakMemory(reported.append)
    assert [(peak(step).item(), len(reported)) for _ in range(5)] == [(0, 0), (0, 0), (0, 0), (0, 1), (0, 1)]
    assert abs(reported[0] - elsewhere - 18 * MB) < MB / 100  # 8 kept, 2 left, 8 new


def test_arguments_and_results_pass_through():
    peak = PeakMemory(lambda _: None)
    assert [peak(lambda a, b: a + b, i, 1) for i in range(6)] == [1, 2, 3, 4, 5, 6]


def test_remote_tensors_are_not_fetched_to_be_counted():
    class Away:
        def fetched(self, name, tensor):
            raise AssertionError("one rank alone would wait for the others")

    parameter = torch.nn.Parameter(torch.zeros(2 * MB // 4))
    before = live_bytes()
    make_remote(parameter, Away(), "w")
    assert before - live_bytes() == 2 * MB

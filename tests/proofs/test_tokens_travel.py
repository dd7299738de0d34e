"""Without a capacity, only tokens that have an expert on another rank travel there, each once.

Counted are the bytes that each rank sends in a step, against the routing of the same model on one device: a row for
each token and other rank in the forward pass and the sum that comes back, the tokens, gradients and their gradients in
the backward pass, the choices and weights of these tokens, and how many they are.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import test_expert_parallelism as experts
import torch
import torch.distributed as dist
from test_expert_parallelism import BATCH, EXPERTS, LAYERS, LENGTH, WIDTH, Layers, parallelized

import tutti
from cases import slow
from tutti.exec.runtimes import virtual
from tutti.lower.collectives import bounds_of

RANKS, CHOICES = 4, 2
ROW, CHOSEN, COUNTS = 4 * WIDTH, 4 * CHOICES, 8 * (RANKS - 1)  # bytes: float32, float32 and int64


def routing() -> list[torch.Tensor]:
    """The experts of each token, (sequences, tokens, k), for each layer on one device."""
    torch.manual_seed(0)
    model, x = Layers(None), torch.randn(BATCH, LENGTH, WIDTH)
    indices: list[torch.Tensor] = []
    for layer in model.layers:
        layer.router.register_forward_hook(lambda module, inputs, output: indices.append(output.index))
    model(x)
    return indices


def traveling() -> torch.Tensor:
    """(layers, from, to): tokens of one rank with an expert of another."""
    counts = torch.zeros(LAYERS, RANKS, RANKS, dtype=torch.int64)
    for i, index in enumerate(routing()):
        for token, chosen in enumerate(index.flatten(0, 1).tolist()):
            home = token // (BATCH * LENGTH // RANKS)
            for there in {e // (EXPERTS // RANKS) for e in chosen} - {home}:
                counts[i, home, there] += 1
    return counts


def expected() -> list[int]:
    """The bytes that each rank sends in a step."""
    gone, came = traveling().sum(2).sum(0), traveling().sum(1).sum(0)
    sent = gone * (3 * ROW + 2 * 2 * CHOSEN) + came * (2 * ROW + CHOSEN) + LAYERS * 2 * COUNTS
    return sent.tolist()


def test_virtual_ranks_send_the_tokens_that_travel():
    sent, real = [0] * RANKS, virtual._exchanged

    def counted(requests):
        for rank, request in enumerate(requests):
            rows = bounds_of(request.rows[0], len(request.tensor))
            sent[rank] += (sum(rows) - rows[rank]) * request.tensor[0].nbytes
        return real(requests)

    step, batch = parallelized(None, "ep4", "cpu:4")
    with patch.object(virtual, "_exchanged", counted):
        step(batch)
    assert sent == expected()
    every = LAYERS * BATCH * LENGTH * (RANKS - 1)
    assert traveling().sum() < 0.7 * every, "most tokens would have to travel; a gather sends all of them"


def messages() -> int:
    """The bytes of this process's messages in a step."""
    step, batch = parallelized(None, "ep4", "auto")
    with patch.object(dist, "P2POp", wraps=dist.P2POp) as p2p_op:
        step(batch)
    return sum(call.args[1].nbytes for call in p2p_op.call_args_list if call.args[0] is dist.isend)


def test_processes_send_the_tokens_that_travel(pool):
    assert pool.run(messages) == expected()


def test_processes_give_the_numbers_of_one_device(pool):
    wanted, gradients, state = experts.trained(None, "single", "cpu:1")
    for loss, own_gradients, after in pool.run(experts.trained, None, "ep4", "auto"):
        assert abs(loss - wanted) <= 1e-5 * abs(wanted)
        for ours, theirs in ((own_gradients, gradients), (after, state)):
            assert all((ours[n] - t).norm() <= 1e-5 * t.norm() for n, t in theirs.items())


@pytest.mark.parametrize("plan", ["ep4", slow("dp2xep2")])
def test_all_tokens_may_want_one_expert(plan):
    """The worst routing: every token has its experts on the first rank, whose buffers hold all of them."""

    def trained(plan: str, devices: int):
        torch.manual_seed(0)
        model, x = Layers(None), torch.rand(BATCH, LENGTH, WIDTH) + 0.1
        with torch.no_grad():
            for layer in model.layers:
                layer.router.weight[:CHOICES] += 10
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = tutti.parallelize(model, optimizer, (x,), cluster=f"cpu:{devices}", plan=plan, level="O0")
        return step.gradients((x,)), step((x,))

    gradients, loss = trained(plan, 4)
    wanted, reference = trained("single", 1)
    assert abs(loss - reference) <= 1e-5 * abs(reference)
    for name, g in wanted.items():
        assert (gradients[name] - g).norm() <= 1e-5 * g.norm(), name


def test_what_is_predicted_is_the_average():
    """The routing of random tokens sends about what a Program says."""
    step, _ = parallelized(None, "ep4", "cpu:4")
    said = sum(c.bytes for c in step.collectives() if c.kind == "exchange")
    mean = sum(expected()) / RANKS
    assert abs(said - mean) < 0.1 * mean, (said, mean)

"""Recurrent cells against those of torch, and gradients through time against autograd."""

import pytest
import torch

from tutti.rl.core.through_time import unroll
from tutti.rl.networks.memory import Cell, Remembering, begins
from tutti.rl.networks.networks import Network

TORCH = {"gru": torch.nn.GRUCell, "lstm": torch.nn.LSTMCell}


def references(cell, inputs):
    reference = TORCH[cell.kind](inputs, cell.width)
    with torch.no_grad():
        reference.weight_ih.copy_(cell.inputs.weight)
        reference.weight_hh.copy_(cell.hidden.weight)
        reference.bias_ih.copy_(cell.inputs.bias)
        reference.bias_hh.copy_(cell.hidden.bias)
    return reference


def loop(reference, x, state, first):
    """A plain loop with torch's cell."""
    states = []
    for t in range(len(x)):
        state = state * ~first[t].unsqueeze(-1)
        if isinstance(reference, torch.nn.LSTMCell):
            state = torch.cat(reference(x[t], state.chunk(2, -1)), -1)
        else:
            state = reference(x[t], state)
        states.append(state)
    return torch.stack(states)


@pytest.mark.parametrize("kind", TORCH)
def test_sequences_and_their_gradients(kind):
    torch.manual_seed(0)
    cell = Cell(3, 4, kind)
    torch.nn.init.normal_(cell.hidden.bias)
    reference = references(cell, 3)
    x, first = torch.randn(6, 5, 3), torch.rand(6, 5) < 0.3
    state, weight = torch.randn(5, cell.state_width), torch.randn(6, 5, cell.state_width)
    names = ("inputs.weight", "hidden.weight", "inputs.bias", "hidden.bias")
    weights = {name: p.detach() for name, p in cell.named_parameters()}

    def loss(parameters, x, state):
        states = torch.func.functional_call(cell, parameters, (x, state, first))
        return (states * weight).sum(), states

    (slopes, of_x, of_state), states = torch.func.grad(loss, (0, 1, 2), has_aux=True)(weights, x, state)
    x.requires_grad_()
    state.requires_grad_()
    expected = loop(reference, x, state, first)
    (expected * weight).sum().backward()
    torch.testing.assert_close(states, expected)
    torch.testing.assert_close(of_x, x.grad)
    torch.testing.assert_close(of_state, state.grad)
    for name, p in zip(names, (reference.weight_ih, reference.weight_hh, reference.bias_ih, reference.bias_hh),
                       strict=True):  # fmt: skip
        torch.testing.assert_close(slopes[name], p.grad)
    step = cell(x[0], state * ~first[0].unsqueeze(-1))
    torch.testing.assert_close(step, expected[0])


def test_gradients_of_several_runs_at_once():
    """`torch.vmap` over `torch.func.grad`, as populations of agents have it."""
    net = Network(lambda: Remembering(3, (4,), 5, "gru", {"policy": 2}))
    weights = torch.stack([net.init(i) for i in range(3)])
    x, first, state = torch.randn(3, 7, 2, 3), torch.rand(3, 7, 2) < 0.2, torch.randn(3, 2, 5)
    gradient = torch.func.grad(lambda w, x, state, first: net(w, x, state, first)[0]["policy"].square().sum())
    together = torch.vmap(gradient)(weights, x, state, first)
    for i in range(3):
        torch.testing.assert_close(together[i], gradient(weights[i], x[i], state[i], first[i]))


def test_unrolling_a_geometric_series():
    """s_t = w s_{t-1} + x_t: d s_T / d w is the sum over t of (T - t) w^(T - t - 1) x_t."""
    x = torch.tensor([1.0, 2.0, 3.0])
    step = lambda weights, state, x: weights[0] * state + x  # noqa: E731
    slope = torch.func.grad(lambda w: unroll(step, (w,), torch.zeros(()), (x,))[-1])(torch.tensor(0.5))
    assert slope.item() == 2 * 0.5 * 1 + 2


def test_episodes_begin_after_others_end():
    done = torch.tensor([[0, 1], [1, 0], [0, 1]], dtype=torch.bool)
    assert begins(done).tolist() == [[False, False], [False, True], [True, False]]


def test_unknown_cells():
    with pytest.raises(ValueError, match="cell 'rnn' is not one of gru, lstm"):
        Cell(2, 3, "rnn")

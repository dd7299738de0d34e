"""Patterns are replaced exactly where that changes nothing for anyone else."""

import inspect
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
from tutti.nn.fused import FUSED
from tutti.tracing.rewrite.pattern_table import PATTERNS

ops = torch.ops.tutti


class Normed(nn.Module):
    """A linear layer, then something with a norm as Llama has it."""

    def __init__(self, function, eps=1e-6):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.function, self.eps = function, eps

    def norm(self, x):
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x * rstd), rstd

    def forward(self, x):
        return self.function(self, self.linear(x)).sum()


def captured(function, **options) -> tutti.StepGraph:
    return tutti.capture(Normed(function, options.pop("eps", 1e-6)), (torch.randn(2, 3, 8),), **options)


MATCHES = {
    "a norm": lambda m, x: m.norm(x)[0].tanh(),
    "read again": lambda m, x: m.norm(x)[0].tanh() + x,
    "read before": lambda m, x: x.sin() + m.norm(x)[0].tanh(),
    "twice the same weight": lambda m, x: m.norm(m.norm(x)[0].tanh())[0],
    "its input is its own gradient's factor": lambda m, x: m.norm(x)[0] * x,
}


@pytest.mark.parametrize("name", MATCHES)
def test_found(name):
    graph, plain = captured(MATCHES[name]), captured(MATCHES[name], patterns=())
    count = len(plain.graph.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default))
    assert graph.matches == {"RMS norm": count}
    targets = Counter(n.target for n in graph.calls)
    assert targets[ops.rms_norm.default] == targets[ops.rms_norm_backward.default] == count
    assert len(graph.calls) < len(plain.calls)


@pytest.mark.parametrize(
    "function",
    {
        "what it makes on the way is read": lambda m, x: m.norm(x)[0] + m.norm(x)[1],
        "the gradient goes another way": lambda m, x: m.weight * (x * m.norm(x)[1].detach()),
        "another exponent": lambda m, x: m.weight * (x * (x.pow(4).mean(-1, keepdim=True) + 1e-6).rsqrt()),
        "another dim": lambda m, x: m.weight * (x * (x.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt()),
        "float64": lambda m, x: m.norm(x.double())[0].float(),
    }.values(),
)
def test_not_found(function):
    graph = captured(function)
    assert not graph.matches and ops.rms_norm.default not in {n.target for n in graph.calls}


def test_any_epsilon():
    graph = captured(MATCHES["a norm"], eps=0.25)
    (node,) = graph.graph.find_nodes(op="call_function", target=ops.rms_norm.default)
    assert node.args[2] == 0.25


@pytest.mark.parametrize("learns", ["linear.weight", "weight", "linear.bias"])
def test_what_learns_has_a_gradient(learns):
    """Frozen parameters: the backward pass makes what is wanted, and no more."""
    model = Normed(MATCHES["read again"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == learns)
    graph = tutti.capture(model, (torch.randn(2, 3, 8),))
    (backward,) = graph.graph.find_nodes(op="call_function", target=ops.rms_norm_backward.default)
    assert graph.matches == {"RMS norm": 1}
    assert backward.args[6] == ([False, True] if learns == "weight" else [True, False])


def test_a_residual_stream_is_added_by_the_norm():
    graph = captured(MATCHES["read again"])
    (backward,) = graph.graph.find_nodes(op="call_function", target=ops.rms_norm_backward.default)
    assert len(backward.args) == 8, "the gradient that comes from behind is an operand"


def test_nodes_belong_to_the_module_whose_place_they_take():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-5)) for _ in range(3))

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    graph = tutti.capture(Model(), (torch.randn(2, 3, 8),))
    labels = Counter(n.meta["label"] for n in graph.calls if "rms_norm" in str(n.target))
    assert labels == {"layers.*.1/forward/tutti.rms_norm": 3, "layers.*.1/backward/tutti.rms_norm_backward": 3}


def test_losses_that_are_not_a_linear_layers_alone():
    class Model(nn.Linear):
        def __init__(self, keep):
            super().__init__(8, 12)
            self.keep = keep

        def forward(self, x, y):
            logits = super().forward(x)
            loss = F.cross_entropy(logits, y)
            return loss + logits.square().mean() if self.keep else loss

    batch = torch.randn(6, 8), torch.arange(6)
    assert tutti.capture(Model(False), batch).matches == {"linear and cross-entropy": 1}
    assert not tutti.capture(Model(True), batch).matches, "its logits are read by another loss"


def test_formulas_and_operators_have_the_same_signature():
    for operator, formula in FUSED.items():
        names = [argument.name for argument in operator._schema.arguments]
        assert list(inspect.signature(formula).parameters) == names
    assert {p.operator for p in PATTERNS} >= {
        "tutti::rms_norm",
        "tutti::rotary",
        "tutti::glu",
        "tutti::linear_logsumexp",
    }


UNUSUAL = {
    "gate of one column": lambda x: F.silu(x[..., :1]) * x,
    "norm with a weight for each sequence": lambda x: (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * x[:, :1]
    ),
    "norm of a vector": lambda x: F.rms_norm(x.reshape(-1), (48,), torch.ones(48)),
    "odd rotation": lambda x: x[..., :7] * x[:1, :1, :7] + torch.cat((-x[..., 3:7], x[..., :3]), -1) * x[:1, :1, :7],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_no_operator_takes_is_captured_as_it_is(name):
    captured(lambda model, x: UNUSUAL[name](x))

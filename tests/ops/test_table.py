"""The table: every operator of the zoo has a rule, and splitting it gives the numbers of the whole."""

import copy
import operator
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
import zoo
from cases import some
from tutti.ir.op_info import RULES
from tutti.ops import replicated, rule_of
from tutti.ops.registry import rules
from tutti.plan.layouts.choice import candidates, legal
from tutti.plan.layouts.problem import problem_of
from tutti.plan.plan import Plan


@pytest.mark.parametrize("make", [zoo.llama, zoo.gpt2, lambda: zoo.gpt2(dropout=0.0)])
def test_every_operator_of_the_zoo_has_a_rule(make):
    model = make()
    graph = tutti.capture(model, zoo.tokens(4), torch.optim.AdamW(model.parameters()), clip_norm=1.0)
    without = {str(n.target) for n in graph.calls if n.target is not operator.getitem and rule_of(n) is None}
    assert without == set()


def test_an_operator_has_one_rule():
    with pytest.raises(AssertionError, match=r"aten\.mm\.default has a rule already"):
        rules({torch.ops.aten.mm.default: "m k, k n -> m n"})


def test_the_rule_of_what_cannot_be_split_has_no_factors():
    graph = tutti.capture(zoo.llama(1), zoo.tokens(4), gradients=False)
    node = next(n for n in graph.calls if n.target == torch.ops.aten.mm.default)
    assert rule_of(node).sizes.keys() == {"m", "k", "n"} and replicated(node).sizes == {}


class Function(nn.Module):
    """A function of a parameter, so that forward and backward of its operators are in the graph."""

    def __init__(self, function, *shape):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x):
        return (self.function(self.weight, x) * torch.linspace(0.5, 1.5, 2)[0]).sum()


def ids(*shape, top=8):
    return torch.arange(torch.Size(shape).numel()).view(shape) * 5 % top


X = torch.linspace(-1, 1, 4 * 8 * 6).view(4, 8, 6)
FUNCTIONS = {
    "mm": ((6, 4), lambda w, x: (x[0] @ w).tanh(), X),
    "products": (
        (6, 4),
        lambda w, x: torch.baddbmm(w[:1], x, w.expand(4, 6, 4)).tanh() + torch.addmv(w[:, 0], w, x[0, :4, 0]).sum(),
        X,
    ),
    "bmm": ((4, 6, 2), lambda w, x: (x @ w).tanh(), X),
    "addmm": ((6, 4), lambda w, x: F.linear(x[0], w.t(), w[0]).tanh(), X),
    "mean and sum": ((8, 6), lambda w, x: (x * w).mean((0, 2)).pow(2) + (x * w).sum(1).pow(2).mean(), X),
    "amax": ((8, 6), lambda w, x: (x * w).amax(2), X),
    "softmax": ((8, 6), lambda w, x: (x * w).softmax(-1)[..., ::2].pow(2), X),
    "log_softmax": ((8, 6), lambda w, x: (x * w).log_softmax(1).pow(2), X),
    "layer_norm": ((6,), lambda w, x: F.layer_norm(x * w, (6,), w, w).pow(2), X),
    "cross entropy": ((6, 8), lambda w, y: F.cross_entropy(X[0] @ w, y, ignore_index=3), ids(8)),
    "cross entropy, sum": ((6, 8), lambda w, y: F.cross_entropy(X[0] @ w, y, reduction="sum"), ids(8)),
    "cross entropy, rows": ((6, 8), lambda w, y: F.cross_entropy(X[0] @ w, y, reduction="none").pow(2), ids(8)),
    "cross entropy of images": (
        (6, 8),
        lambda w, y: F.cross_entropy((X @ w).permute(0, 2, 1), y, weight=w[0].detach().abs(), label_smoothing=0.1),
        ids(4, 8),
    ),
    "losses": (
        (8, 6),
        lambda w, x: F.smooth_l1_loss(x * w, x)
        * F.huber_loss(x * w, x, reduction="sum")
        * F.kl_div((x * w).log_softmax(1), x.softmax(1), reduction="batchmean")
        * F.binary_cross_entropy((x * w).sigmoid(), x.abs())
        * F.binary_cross_entropy_with_logits(x * w, x.abs()),
        X,
    ),
    "embedding": ((8, 6), lambda w, i: F.embedding(i, w).tanh(), ids(4, 6)),
    "embedding with padding": ((8, 6), lambda w, i: F.embedding(i, w, padding_idx=2).tanh(), ids(4, 6)),
    "embedding scaled": ((8, 6), lambda w, i: F.embedding(i, w, scale_grad_by_freq=True).tanh(), ids(4, 6)),
    "embedding bags": ((8, 6), lambda w, i: F.embedding_bag(i, w, mode="sum").tanh(), ids(4, 6)),
    "embedding bags of one": ((8, 6), lambda w, i: F.embedding_bag(i[:, 1:2], w, mode="sum").tanh(), ids(4, 6)),
    "means of bags": ((8, 6), lambda w, i: F.embedding_bag(i, w, padding_idx=2).tanh(), ids(4, 6)),
    "maxima of bags": ((8, 6), lambda w, i: F.embedding_bag(i, w, mode="max").tanh(), ids(4, 6)),
    "weighted bags": (
        (8, 6),
        lambda w, i: F.embedding_bag(i, w, mode="sum", per_sample_weights=w[:4].sin()).tanh(),
        ids(4, 6),
    ),
    "bags of any size": (
        (8, 6),
        lambda w, i: F.embedding_bag(i[:12], w, i[12:].sort()[0] * 0 + torch.tensor([0, 2, 2, 9]), mode="sum").tanh(),
        ids(16),
    ),
    "attention": ((8, 6), lambda w, x: F.scaled_dot_product_attention(*[(x * w).view(4, 4, 2, 6)] * 3).pow(2), X),
    "causal attention": (
        (8, 6),
        lambda w, x: F.scaled_dot_product_attention(*[(x * w).view(4, 2, 4, 6)] * 3, is_causal=True).pow(2),
        X,
    ),
    "split and cat": ((8, 6), lambda w, x: torch.cat([p * i for i, p in enumerate((x * w).split(2, 1))], 2).tanh(), X),
    "slice, select, pad": ((8, 6), lambda w, x: F.pad((x * w)[:, 1:5], (0, 0, 2, 2)).tanh() * (x * w)[1].sin(), X),
    "views": ((8, 6), lambda w, x: (x * w).transpose(0, 1).reshape(16, 12).t()[:, None].expand(12, 2, 16).tanh(), X),
    "to integers": ((8, 6), lambda w, x: ((x * w) @ w.t() * 3).to(torch.int64).sum(-1) * (x * w).sum(-1), X),
    "where and masks": ((8, 6), lambda w, x: torch.where(x > 0, x * w, 0.0).masked_fill(x > 0.5, 1.0), X),
    "dropout": ((8, 6), lambda w, x: F.dropout(x * w, 0.5, training=True), X),
    "reading by positions": (
        (8, 6),
        lambda w, x: (x * w)[:, ids(4), ids(3, 1, top=6)].tanh()
        * (x * w).gather(1, ids(4, 4, 6)).index_select(2, ids(4, top=6)).sin()[:, :3],
        X,
    ),
    "writing by positions": (
        (8, 6),
        lambda w, x: (x * w)
        .scatter_add(2, ids(4, 8, 6, top=6), x * w)
        .scatter(1, ids(4, 1, 6), 0.0)
        .index_add(1, ids(4), x[:, :4] * w[:4])
        .index_copy(2, torch.tensor([3, 1]), (x * w)[..., :2])
        .index_put((ids(4, top=4), ids(4)), w[0], accumulate=True)
        .pow(2),
        X,
    ),
    "slices": (
        (8, 6),
        lambda w, x: torch.cat([(x * w)[:, :4], (x * w)[:, 1:8:2].sin(), (x * w)[:, 1:5]], 1).tanh() + (x * w)[:, -1:],
        X,
    ),
    "writing slices": (
        (8, 6),
        lambda w, x: (x * w).slice_scatter(x[:2] * w, 0, 1, 3).select_scatter(w[:4], 1, 2).pow(2),
        X,
    ),
    "activations": (
        (8, 12),
        lambda w, x: F.glu(F.softplus(x @ w[:6]) + F.leaky_relu(x @ w[:6]) + F.elu(x @ w[:6])) * F.hardtanh(w[:, :6]),
        X,
    ),
    "stack, unbind, repeat, flip": (
        (8, 6),
        lambda w, x: torch.stack([p * i for i, p in enumerate((x * w).unbind(1))], 2).repeat(1, 1, 2).flip(1).tanh(),
        X,
    ),
    "roll, diagonal, windows": (
        (8, 6),
        lambda w, x: (x * w).roll((3, -1), (1, 2)).tanh() + (x * w).unfold(1, 2, 2).sum(-1).diagonal(0, 1, 2).sum(),
        X,
    ),
    "norms and variances": (
        (8, 6),
        lambda w, x: F.normalize(x * w, dim=1) + (x * w).var(1, keepdim=True) * (x * w).std() * w.logsumexp(1, True),
        X,
    ),
    "any, all, prod": ((8, 6), lambda w, x: (x > 0).any(1)[:, None] * (x * w).prod(2, True) * (x < 2).all() * w, X),
    "scans": (
        (8, 6),
        lambda w, x: (x * w).cumsum(1).tanh() + (x * w).cumprod(2) + (x * w).logcumsumexp(1),
        X,
    ),
    "the greatest": (
        (8, 6),
        lambda w, x: (x * w).topk(3, 1)[0].sin() * (x * w).max(1, keepdim=True)[0] + (x * w).sort(1)[0][:, 3:6].tanh(),
        X,
    ),
    "places": ((8, 6), lambda w, x: (x * w).argmax(2) * (x * w).topk(2)[1][..., 1] * (x * w).mean(2), X),
    "triangles": ((8, 8), lambda w, x: (w.tril() + torch.arange(8)).triu(-2).pow(2), X),
}  # fmt: skip


def run(model, batch, plan, devices):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tutti.parallelize(model, optimizer, (batch,), cluster=f"cpu:{devices}", plan=plan, level="O0")
    return step.gradients((batch,))["weight"], step((batch,))


def splits(model, graph) -> Iterator[tuple[str, Plan]]:
    """Plans for two devices that between them split every operator in every way that it allows."""
    problem, mesh = problem_of(graph), {"axis": 2}
    options = {
        label: [c for c in candidates(o.rule, problem.cuts[label], 2) if legal(o.rule, {"axis": c}, mesh)]
        for label, o in problem.operators.items()
        if not o.is_input
    }
    for i in range(max(map(len, options.values()))):
        chosen = {label: {"axis": choices[i]} for label, choices in options.items() if i < len(choices)}
        what = ", ".join(f"{label} split {choice['axis']}" for label, choice in chosen.items())
        yield what, Plan(mesh, operators=chosen)


@pytest.mark.parametrize("name", some(FUNCTIONS, list(FUNCTIONS)[::3]))
def test_every_choice_of_every_operator_gives_the_whole(name):
    shape, function, batch = FUNCTIONS[name]
    model = Function(function, *shape)
    graph = tutti.capture(model, (batch,), torch.optim.SGD(model.parameters(), lr=0.1))
    expected = run(model, batch, "single", 1)
    for what, plan in splits(model, graph):
        ours = run(model, batch, plan, 2)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, msg=lambda m, what=what: f"{what}: {m}")


def test_the_table_is_data():
    assert all(isinstance(rule, str) or callable(rule) for rule in RULES.values())

"""Rules for operators of users."""

import pytest
import torch
from torch import nn

import tutti
from tutti.check.samples import Draw
from tutti.ir.op_info import CONTIGUOUS, LOCAL, RULES, SENDS
from tutti.plan.layouts.choice import Choice


def define(name: str, function, fake=None):
    """An operator of the namespace `tutti_tests` made of a Python function."""
    op = torch.library.custom_op(f"tutti_tests::{name}", function, mutates_args=())
    op.register_fake(fake or function)
    return op


@pytest.fixture(autouse=True)
def forget():
    tables = [(table, dict(table)) for table in (CONTIGUOUS, LOCAL, RULES, SENDS)]
    yield
    for table, before in tables:
        for target in [t for t in table if t not in before]:
            del table[target]


def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).clone()


@pytest.mark.starts
def test_a_rule_splits_an_operator_of_the_user():
    op = define("fused", fused)
    op.register_autograd(
        lambda ctx, g: (g @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].flatten(0, 1).t() @ g.flatten(0, 1)),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    tutti.rule("tutti_tests::fused", "b s d, d e -> b s e | ~0 ~1", check=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(6, 4))

        def forward(self, x):
            return op(x, self.w).pow(2).mean()

    def run(plan, devices, level="O0"):
        model, batch = Model(), (torch.ones(4, 3, 6),)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = tutti.parallelize(model, optimizer, batch, cluster=f"cpu:{devices}", plan=plan, level=level)
        return step(batch), step.state_dict()["w"], step

    loss, w, single = run("single", 1, "O2")
    for seed in range(4):
        plan = tutti.random_plan(single, 4, seed)
        ours, theirs, _ = run(plan, 4)
        torch.testing.assert_close((ours, theirs), (loss, w))


def test_a_wrong_rule_is_refused_with_a_sample():
    define("wrong", fused)
    with pytest.raises(AssertionError, match=r"tutti_tests\.wrong.*split by a=2: "):
        tutti.rule("tutti_tests::wrong", "b s d, d e! -> b s e! | ~01", check=True)
    assert torch.ops.tutti_tests.wrong.default not in RULES


def test_a_needlessly_strict_rule_is_refused():
    define("strict", fused)
    with pytest.raises(AssertionError, match=r"forbids a valid split: .*splitting e"):
        tutti.rule("tutti_tests::strict", "b s d, d e! -> b s e! | ~0 ~1", check=True)


@pytest.mark.slow
def test_debug_mode_checks(monkeypatch):
    define("debugged", fused)
    tutti.rule("tutti_tests::debugged", "b s d, d e -> b s e | ~01")
    del RULES[torch.ops.tutti_tests.debugged.default]
    monkeypatch.setenv("TUTTI_DEBUG", "1")
    with pytest.raises(AssertionError):
        tutti.rule("tutti_tests::debugged", "b s d, d e -> b s e | ~01")


def test_a_local_computation_stands_below():
    def share(x: torch.Tensor) -> torch.Tensor:
        return x / x.square().sum(1, keepdim=True)

    define("share", share)

    row_sums = lambda cut: [("all_reduce", 8 * cut.inputs[0].shape[0])]  # noqa: E731

    @tutti.rule("tutti_tests::share", "a b@ -> a b@", sends=row_sums, check=True)
    def split_share(here, x):
        return x / here.all_reduce(x.square().sum(1, keepdim=True), "b", "sum")

    assert LOCAL[torch.ops.tutti_tests.share.default] is split_share
    define("share_too", share)
    with pytest.raises(AssertionError, match="SENDS says 0 bytes of all_reduce, the local computation sends"):
        tutti.rule("tutti_tests::share_too", "a b@ -> a b@", sends=lambda cut: [], check=True)(split_share)


def test_above_the_definition_of_the_operator():
    @tutti.rule("tutti_tests::defined", "a b -> b a | ~0", check=True)
    @torch.library.custom_op("tutti_tests::defined", mutates_args=())
    def defined(x: torch.Tensor) -> torch.Tensor:
        return x.t().clone()

    defined.register_fake(lambda x: x.new_empty(x.shape[::-1]))
    assert RULES[torch.ops.tutti_tests.defined.default] == "a b -> b a | ~0"


def test_errors_say_what_is_missing():
    with pytest.raises(ValueError, match=r"no operator 'tutti_tests::nothing'; define it with torch.library.custom_op"):
        tutti.rule("tutti_tests::nothing", "a -> a")(lambda x: x)
    with pytest.warns(UserWarning, match=r"'a -> a' of tutti_tests::typo is not registered: there is no operator") as w:
        tutti.rule("tutti_tests::typo", "a -> a", check=True)
    assert w[0].filename == __file__
    with pytest.raises(ValueError, match="has no '->'"):
        tutti.rule("aten::mm", "m k")
    with pytest.raises(ValueError, match=r"already has the rule 'm k, k n -> m n \| ~0 ~1'"):
        tutti.rule("aten::mm", "m k, k n -> m n")
    define("scaled", scaled)
    with pytest.raises(ValueError, match="needs by: pass samples="):
        tutti.rule("tutti_tests::scaled", "a -> a | ~0", check=True)
    tutti.rule("tutti_tests::scaled", "a -> a | ~0", check=True, samples=lambda d: ((d.floats(4), 2.0), {}))
    define("two", fused)
    with pytest.raises(ValueError, match=r"has 1 inputs, .* has 2 tensors"):
        tutti.rule("tutti_tests::two", "a b c -> a b c")
    with pytest.raises(ValueError, match=r"has 2 outputs, .* has 1 tensors"):
        tutti.rule("tutti_tests::two", "a b c, c d -> a b d, a")
    with pytest.raises(
        ValueError, match=r"factor 'f' is in no operand, .* with f!, or write a local computation and mark it f@"
    ):
        tutti.rule("tutti_tests::two", "a b c, c d -> a b f")


def test_a_computation_of_its_own_must_be_there_and_take_what_it_is_given():
    op = define("taken", fused)
    line = "b s d@, d@ e -> b s e"
    with pytest.warns(
        UserWarning, match=r"not registered: it marks d@, .* \(def taken_of_parts\(here, x, w\): \.\.\.\)"
    ):
        tutti.rule("tutti_tests::taken", line)
    with pytest.raises(ValueError, match=r"not tutti_tests.taken.default itself: def taken_of_parts\(here, x"):
        tutti.rule("tutti_tests::taken", line)(op)

    def without_here(x, w):
        return x @ w

    with pytest.raises(
        ValueError, match=r"without_here cannot compute a part of tutti_tests.taken.* \(here, x, w\): too many"
    ):
        tutti.rule("tutti_tests::taken", line)(without_here)
    assert torch.ops.tutti_tests.taken.default not in RULES


@pytest.mark.parametrize(
    ("factor", "op", "message"),
    [
        ("q", "sum", "no factor 'q' in rule 'a b@ -> a b@'; it has 'a', 'b'"),
        ("b", "summ", "unknown reduction 'summ' over 'b'; expected one of sum, avg, max, min"),
    ],
)
def test_misspelt_words_with_peers_are_told(factor, op, message):
    name = f"misspelt_{factor}_{op}"
    define(name, normalized)
    with pytest.raises(AssertionError, match=message):
        tutti.rule(f"tutti_tests::{name}", "a b@ -> a b@", check=True)(
            lambda here, x: x / here.all_reduce(x.sum(1, keepdim=True), factor, op)
        )


def test_operands_of_a_computation_of_its_own_are_contiguous():
    """It is traced with such, so that a look at strides, or a `contiguous()`, holds when it runs."""
    op = define("turned", fused)
    op.register_autograd(
        lambda ctx, g: (g @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].flatten(0, 1).t() @ g.flatten(0, 1)),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    @tutti.rule("tutti_tests::turned", "b s d, d e@ -> b s e@ | ~0 ~1", check=True)
    def some_columns(here, x, w):
        rows = x.contiguous().as_strided((x.shape[0] * x.shape[1], x.shape[2]), (x.shape[2], 1))
        return (rows @ w).view(*x.shape[:2], -1)

    def loss(model, batch):
        return op(batch[0].transpose(0, 1), model.weight).pow(2).mean()

    model, batch = nn.Linear(4, 6, bias=False), (torch.randn(4, 3, 6),)
    label = next(n.meta["label"] for n in tutti.capture(model, batch, loss=loss).calls if "turned" in str(n.target))
    plan = tutti.Plan({"a": 2}, operators={label: {"a": Choice("e")}})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tutti.parallelize(model, optimizer, batch, loss=loss, cluster="cpu:2", plan=plan, level="O0")
    torch.testing.assert_close(step.evaluate(batch), loss(model, batch).detach())


def normalized(x: torch.Tensor) -> torch.Tensor:
    return x / x.sum(1, keepdim=True)


def looked_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index]


def test_an_operator_that_wants_integers_asks_for_samples():
    define("looked_up", looked_up)
    with pytest.raises(
        ValueError,
        match=r"looked_up.default rejects operands of the shapes in rule .* float64.*indices must be.*pass samples=",
    ):
        tutti.rule("tutti_tests::looked_up", "v! h, b s -> b s h | ~0", check=True)

    def samples(d: Draw):
        return (d.floats(5, d.size()), d.integers(*d.sizes(2), below=5)), {}

    tutti.rule("tutti_tests::looked_up", "v! h, b s -> b s h | ~0", check=True, samples=samples)


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by

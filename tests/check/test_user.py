"""Rules for operators of users."""

import pytest
import torch
from torch import nn

import tutti
from tutti.rules import LOCAL, RULES, SENDS


def define(name: str, function, fake=None):
    """An operator of the namespace `tutti_tests` made of a Python function."""
    op = torch.library.custom_op(f"tutti_tests::{name}", function, mutates_args=())
    op.register_fake(fake or function)
    return op


@pytest.fixture(autouse=True)
def forget():
    tables = [(table, dict(table)) for table in (RULES, LOCAL, SENDS)]
    yield
    for table, before in tables:
        for target in [t for t in table if t not in before]:
            del table[target]


def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).clone()


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

    def run(plan, devices):
        model = Model()
        step = tutti.parallelize(
            model, torch.optim.SGD(model.parameters(), 0.1), (torch.ones(4, 3, 6),), cluster=f"cpu:{devices}", plan=plan
        )
        return step((torch.ones(4, 3, 6),)), step.state_dict()["w"], step

    loss, w, single = run("single", 1)
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
    with pytest.raises(AssertionError, match=r"forbids what is right: .*splitting e"):
        tutti.rule("tutti_tests::strict", "b s d, d e! -> b s e! | ~0 ~1", check=True)


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
    with pytest.raises(ValueError, match=r"no operator 'tutti_tests::nothing'; define it by torch.library.custom_op"):
        tutti.rule("tutti_tests::nothing", "a -> a")(lambda x: x)
    with pytest.raises(ValueError, match="has no '->'"):
        tutti.rule("aten::mm", "m k")
    with pytest.raises(ValueError, match=r"has the rule 'm k, k n -> m n \| ~0 ~1' already"):
        tutti.rule("aten::mm", "m k, k n -> m n")
    define("scaled", scaled)
    with pytest.raises(ValueError, match="needs by: pass samples="):
        tutti.rule("tutti_tests::scaled", "a -> a | ~0", check=True)
    tutti.rule("tutti_tests::scaled", "a -> a | ~0", check=True, samples=lambda d: ((d.floats(4), 2.0), {}))
    define("two", fused)
    with pytest.raises(ValueError, match=r"has 1 inputs, .* has 2 tensors"):
        tutti.rule("tutti_tests::two", "a b c -> a b c")


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by

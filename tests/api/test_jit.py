"""What `tutti.jit` runs does what plain Python does: results, gradients, state, side effects."""

import copy
import doctest
import random
import subprocess
import sys
import warnings
from types import FunctionType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tutti
from dynamic import CASES, branches
from tutti.api import jit

OLD = torch.__version__ < "2.13"  # of the 2.11 that is supported, too


def anew(function):
    """The function with code of its own: torch 2.11 knows code again that it has given up for another jit, and has
    nothing to report then."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def equal(a, b):
    """Whether nested results are the same, to the last bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def agrees(function, *calls, level="O0"):
    """Call `function` as it is, and jitted, with each of some arguments; all they return or raise is equal. Gives the
    jitted one."""
    fast = tutti.jit(function, level=level)
    for args in calls:
        outcomes = []
        for called in (function, fast):
            for seed in (torch.manual_seed, np.random.seed, random.seed):
                seed(0)
            try:
                outcomes.append(called(*copy.deepcopy(args)))
            except Exception as error:
                outcomes.append((type(error), str(error)))
        assert equal(*outcomes), outcomes
    return fast


UP, DOWN = torch.arange(1.0, 7), -torch.arange(1.0, 7)


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_what_depends_on_data_does_what_python_does(function):
    fast = agrees(anew(function), (UP,), (DOWN,), (UP / 10,), (UP,))
    assert fast.report().breaks


@pytest.mark.slow
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_compiled_it_does_the_same(function):
    agrees(function, (UP,), (DOWN,), (UP / 10,), (UP,), level="O2")


@pytest.mark.starts
def test_of_graphs_that_are_compiled_results_and_gradients_are_within_rounding():
    def scaled(x, w):
        y = torch.tanh(x @ w)
        if y.norm() > 1:
            y = y / y.norm()
        return F.dropout(y, 0.5).sum()

    fast = tutti.jit(scaled)
    x = torch.randn(4, 8)
    for size in (0.1, 3.0):
        results = []
        for called in (scaled, fast):
            torch.manual_seed(1)
            w = (size * torch.linspace(-1, 1, 24).view(8, 3)).requires_grad_()
            value = called(x, w)
            value.backward()
            results.append((value.detach(), w.grad))
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert fast.level == "O2" and len(fast.report().graphs) >= 3


def test_closures_and_globals_are_read_anew():
    factor = 2.0
    seen = []

    def scales(x):
        seen.append(len(seen))
        return x * factor

    fast = tutti.jit(scales, level="O0")
    assert torch.equal(fast(UP), UP * 2)
    factor = 3.0
    assert torch.equal(fast(UP), UP * 3) and seen == [0, 1]


class Counts(nn.Module):
    """Counts its calls in Python and in a buffer, normalizes over the batch, and keeps a running sum in place."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.calls = nn.BatchNorm1d(3), nn.Linear(3, 3), 0
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.calls += 1
        self.total += x.detach().sum(0)
        y = self.linear(self.norm(x))
        if y.sum() > 0:
            y = y * self.calls
        return y


def test_state_of_a_module_changes_as_it_would_and_counting_compiles_no_more_after_the_second():
    torch.manual_seed(0)
    plain = Counts()
    model = copy.deepcopy(plain)
    fast = tutti.jit(model, level="O0")
    for i in range(12):
        x = torch.randn(5, 3)
        if i == 9:
            plain.eval(), fast.eval()
        assert torch.equal(plain(x), fast(x))
        if i == 5:
            graphs = len(fast.report().graphs)
        if i == 8:
            assert len(fast.report().graphs) == graphs
    assert fast.calls == model.calls == plain.calls == 12 and int(model.norm.num_batches_tracked) == 9
    assert equal(dict(plain.state_dict()), dict(fast.state_dict()))


def test_training_is_as_in_python():
    def steps(model, optimizer, call):
        losses = []
        for i in range(6):
            loss = call(torch.full((5, 3), 0.3 * i) + torch.arange(15.0).view(5, 3) / 7).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    plain = Counts()
    model = copy.deepcopy(plain)
    expected = steps(plain, torch.optim.AdamW(plain.parameters(), 0.1), plain)
    fast = tutti.jit(model, level="O0")
    assert steps(model, torch.optim.AdamW(fast.parameters(), 0.1), fast) == expected
    assert equal(dict(plain.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(("kind", "within"), [(torch.optim.SGD, 3e-7 if OLD else 0), (torch.optim.AdamW, 1.2e-5)])
def test_a_whole_step_with_its_optimizer_is_as_in_python(kind, within):
    """In a graph AdamW computes its bias corrections in float32, 3e-5 of a second moment at first, not in float64."""

    def trained(call):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = kind(model.parameters(), 0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = call(step)
        return [step(torch.eye(3) * i) for i in range(4)], list(model.parameters())

    plain, fast = trained(lambda step: step), trained(tutti.jit(level="O0"))
    torch.testing.assert_close(fast, plain, rtol=within, atol=within)


def test_hooks_run_also_those_that_come_and_go_later():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    fast, seen, x = tutti.jit(model, level="O0"), [], torch.ones(2, 3)
    plain = fast(x)
    first = model[0].register_forward_hook(lambda module, args, output: seen.append("inner") or output * 2)
    model.register_forward_hook(lambda module, args, output: seen.append("outer"))
    torch.testing.assert_close(fast(x), 2 * plain)
    assert seen == ["inner", "outer"]
    first.remove()
    assert torch.equal(fast(x), plain) and seen == ["inner", "outer", "outer"]


class Tree(nn.Module):
    """A recursive cell over nested pairs, as a Tree-LSTM: what it computes is known only from what it is given."""

    def __init__(self):
        super().__init__()
        self.leaf, self.pair = nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, node):
        if isinstance(node, torch.Tensor):
            return torch.tanh(self.leaf(node))
        left, right = map(self.forward, node)
        return torch.tanh(self.pair(torch.cat([left, right], -1)))


def test_a_recursion_over_trees_that_all_differ():
    torch.manual_seed(0)
    model = Tree()

    def tree(depth):
        return torch.randn(4) if depth == 0 or random.random() < 0.2 else (tree(depth - 1), tree(depth - 1))

    random.seed(0)
    fast = tutti.jit(model, level="O0")
    for _ in range(12):
        node = tree(4)
        for call in (model, fast):
            model.zero_grad()
            out = call(node)
            out.sum().backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            if call is model:
                expected = out, grads
        assert equal(expected, (out, grads))
    report = fast.report()
    assert any(again.given_up for again in report.recompilations) and "limit" in str(report)
    graphs = len(report.graphs)
    fast(tree(4)), fast(tree(3))
    assert len(fast.report().graphs) == graphs


def test_a_loop_over_an_environment_in_numpy():
    class Cart:
        def reset(self):
            self.x = np.array([0.1, -0.2, 0.3, 0.0], dtype=np.float32)
            return self.x

        def step(self, action):
            self.x = (self.x + np.float32(0.1) * (2 * action - 1) * np.random.rand(4)).astype(np.float32)
            return self.x, float(self.x.sum()), bool(abs(self.x[0]) > 0.6)

    torch.manual_seed(0)
    policy, env = nn.Linear(4, 2), Cart()

    def episode():
        seen, logs, rewards = env.reset(), [], []
        for _ in range(20):
            chances = torch.softmax(policy(torch.from_numpy(seen)), -1)
            action = int(torch.multinomial(chances, 1))
            seen, reward, over = env.step(action)
            logs.append(chances[action].log())
            rewards.append(reward)
            if over:
                break
        return (torch.stack(logs) * torch.tensor(rewards)).sum()

    fast = agrees(episode, (), ())
    assert all(broken.file == __file__ for broken in fast.report().breaks)


def test_a_generator_function_is_plain_python_and_is_said_to_be():
    def parts(x):
        for part in x.split(2):
            if part.sum() > 3:
                yield part * 2

    fast = tutti.jit(parts, level="O0")
    assert equal(list(fast(UP)), list(parts(UP)))
    (broken,) = fast.report().breaks
    assert broken.whole and "generator function" in broken.reason


def test_sizes_that_vary_have_one_graph_after_the_second():
    fast = agrees(lambda x: torch.softmax(x, -1) * x.shape[0], *((torch.randn(n, 3),) for n in range(2, 12)))
    report = fast.report()
    assert [graph.dynamic for graph in report.graphs] == [False, True] and len(report.recompilations) == 1
    always = tutti.jit(lambda x: x.relu(), level="O0", dynamic=True)
    always(torch.ones(3)), always(torch.ones(4))
    assert len(always.report().graphs) == 1


@pytest.mark.parametrize("level", ["O0", pytest.param("O2", marks=pytest.mark.slow)])
def test_a_llama_generates_the_same_tokens(level):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64)).eval()
    ids = torch.randint(0, 64, (2, 5))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    model.forward = tutti.jit(model.forward, level=level)
    assert torch.equal(model.generate(ids, **options), expected)
    assert sum(graph.operators.get("linear", 0) for graph in model.forward.report().graphs) > 0


def test_as_a_decorator_of_methods_and_of_functions():
    class Box:
        factor = 3

        @tutti.jit(level="O0")
        def scaled(self, x):
            """Three times x."""
            return x * self.factor

    @tutti.jit
    def bare(x):
        return x

    assert torch.equal(Box().scaled(UP), UP * 3) and Box.scaled.__doc__ == "Three times x."
    assert bare(5) == 5 and bare.__name__ == "bare"


def test_what_is_jitted_may_stand_in_another_and_in_a_model_that_is_parallelized():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].forward = tutti.jit(model[0].forward, level="O0")
    whole = tutti.jit(lambda x: model(x) * 2, level="O0")
    x = torch.randn(4, 4)
    assert torch.equal(whole(x), model(x) * 2) and len(whole.report().graphs) == (2 if OLD else 1)
    expected = model(x).mean().item()
    step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), (x,), cluster="cpu:2", plan="dp",
                             level="O0", loss=lambda model, batch: model(*batch).mean())  # fmt: skip
    assert step((x,)).item() == pytest.approx(expected, rel=1e-6)


def test_nothing_is_said_by_itself(capfd):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for function in CASES:
            agrees(function, (UP,), (DOWN,))
        fast = tutti.jit(lambda x, n: x * len(n), level="O0")
        for n in range(12):
            fast(UP, list(range(n)))
    assert not said and capfd.readouterr() == ("", "")
    assert any(again.given_up for again in fast.report().recompilations)


def test_what_it_does_not_take_is_refused():
    with pytest.raises(ValueError, match=r"tutti.jit has no level 'O7'; choose from O0, O2"):
        tutti.jit(len, level="O7")
    with pytest.raises(TypeError, match="not a int"):
        tutti.jit(3)


def test_where_the_compiler_fails_python_runs_and_this_is_told(monkeypatch):
    def fails(graph, inputs):
        raise RuntimeError("no registers left")

    monkeypatch.setitem(jit.LEVELS, "O2", fails)
    fast = agrees(branches, (UP,), (DOWN,), level="O2")
    assert any(graph_break.whole and "compiler fails" in graph_break.reason for graph_break in fast.report().breaks)


def test_each_of_two_that_are_called_within_each_other_has_its_own_report():
    inner = tutti.jit(lambda x: x * 2 if x.sum() > 0 else x, level="O0")

    @torch.compiler.disable
    def between(x):
        return inner(x)

    outer = tutti.jit(lambda x: between(x + 1) - 1, level="O0")
    assert torch.equal(outer(UP), (UP + 1) * 2 - 1)
    assert [len(fast.report().graphs) for fast in (outer, inner)] == [2, 2]
    assert ["disable" in entry.reason for fast in (outer, inner) for entry in fast.report().breaks] == [True, False]


def test_the_example():
    assert doctest.testmod(jit, extraglobs={"tutti": tutti}).failed == 0


def test_a_copy_of_a_model_computes_with_its_own_weights():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    model[0].forward = tutti.jit(model[0].forward, level="O0")
    other, x = copy.deepcopy(model), torch.randn(2, 3)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert other(x).abs().sum() == 0 and model(x).abs().sum() > 0


@pytest.mark.starts
@pytest.mark.slow
def test_it_is_told_of_compilations_after_torch_has_forgotten_all():
    """Settings of TorchDynamo hold while a jit compiles: without them an assert raises RuntimeError."""
    script = """if True:
        import torch, tutti
        def asserts(x):
            assert x.sum() > 0, "not positive"
            return x * 2
        tutti.jit(lambda x: x + 1, level="O0")(torch.ones(2))
        torch.compiler.reset()
        fast = tutti.jit(asserts, level="O0")
        fast(torch.ones(2))
        try:
            fast(-torch.ones(2))
        except AssertionError as error:
            print(error, len(fast.report().breaks))
    """
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout == "not positive 1\n"

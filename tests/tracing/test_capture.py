"""A captured step computes what the eager model does: as it is written; tests/proofs/test_patterns.py has the rest."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
import tutti.models.experts
import zoo
from tutti.exec.kernels.codegen import generate


class Classifier(nn.Module):
    def __init__(self, norm: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)
        self.norm = nn.BatchNorm1d(10) if norm else nn.Identity()

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x))))


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def points(n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def execute(graph: tutti.StepGraph, model, batch, optimizer=None, lr: float = 0.0) -> dict[str, torch.Tensor]:
    """Run a StepGraph as generated code on the model's own tensors and fresh optimizer state."""
    tensors = {f"param:{k}": p.detach().clone() for k, p in model.named_parameters()}
    tensors |= {f"buffer:{k}": b.clone() for k, b in model.named_buffers()}
    items = batch.items() if isinstance(batch, dict) else enumerate(batch)
    tensors |= {f"batch:{k}": x for k, x in items} | {"step": torch.tensor(1), "seed": torch.tensor(0)}
    tensors |= {"lr:0": torch.tensor(lr, dtype=torch.float64), **graph.constants}
    for name in graph.inputs:
        if name not in tensors:
            kind, _, param = name.partition(":")
            spec, value = graph.spec(name), tensors[f"param:{param}"]
            tensors[name] = value.float() if kind == "master" else torch.zeros(spec.shape, dtype=spec.dtype)
    run = generate(graph.graph)(*(tensors[name] for name in graph.inputs))
    try:
        next(run)
    except StopIteration as stop:
        return dict(zip(graph.outputs, stop.value, strict=True))
    raise AssertionError("a captured step communicates nothing")


def eager(model, batch, optimizer, loss=None) -> dict[str, torch.Tensor]:
    value = loss(model, batch) if loss else model(**batch).loss
    value.backward()
    grads = {f"grad:{k}": p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return {"loss": value.detach(), **grads, **{f"param:{k}": p.detach() for k, p in model.named_parameters()}}


CASES = {
    "llama": (lambda: zoo.llama(1), zoo.tokens(4), None),
    "gpt2": (lambda: zoo.gpt2(1, dropout=0.0), zoo.tokens(4), None),
    "tuple batch": (Classifier, points(), cross_entropy),
    "batch norm": (lambda: Classifier(norm=True), points(), cross_entropy),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_update_are_those_of_torch(case):
    make, batch, loss = CASES[case]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    graph = tutti.capture(model, batch, optimizer, loss, patterns=())
    ours, theirs = execute(graph, model, batch, lr=1e-2), eager(model, batch, optimizer, loss)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_the_loss_is_exact():
    model, batch = zoo.llama(1), zoo.tokens(4)
    assert execute(tutti.capture(model, batch, patterns=()), model, batch)["loss"] == model(**batch).loss


def test_buffers_that_the_model_updates_are_outputs():
    model, batch = Classifier(norm=True), points()
    graph = tutti.capture(model, batch, loss=cross_entropy)
    ours = execute(graph, model, batch)
    cross_entropy(model, batch)
    for name, value in model.named_buffers():
        assert torch.equal(ours[f"buffer:{name}"], value), name
    assert not any(node.target._schema.is_mutable for node in graph.calls if hasattr(node.target, "_schema"))


def test_evaluation_mode_is_respected():
    model, batch = Classifier(norm=True).eval(), points()
    graph = tutti.capture(model, batch, loss=cross_entropy, gradients=False)
    assert list(graph.outputs) == ["loss"]
    assert execute(graph, model, batch)["loss"] == cross_entropy(model, batch)


def test_autocast_is_recorded():
    model, batch = Classifier(), points()
    with torch.autocast("cpu", torch.bfloat16):
        graph = tutti.capture(model, batch, loss=cross_entropy, patterns=())
        expected = cross_entropy(model, batch)
    assert {n.meta["val"].dtype for n in graph.calls if n.target == torch.ops.aten.addmm.default} == {torch.bfloat16}
    assert execute(graph, model, batch)["loss"] == expected


def test_low_precision_parameters_have_float32_masters():
    model = Classifier().to(torch.bfloat16)
    x, y = points()
    batch = (x.bfloat16(), y)
    graph = tutti.capture(model, batch, torch.optim.AdamW(model.parameters()), cross_entropy, fp32_master_weights=True)
    assert graph.spec("master:up.weight").dtype == graph.spec("exp_avg:up.weight").dtype == torch.float32
    new = execute(graph, model, batch, lr=1e-2)
    assert torch.equal(new["param:up.weight"], new["master:up.weight"].bfloat16())
    assert not torch.equal(new["master:up.weight"], new["param:up.weight"].float())


def test_unused_and_frozen_parameters_have_no_gradient():
    model = Classifier()
    model.unused = nn.Parameter(torch.ones(2))
    model.up.bias.requires_grad_(False)
    graph = tutti.capture(model, points(), torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy)
    assert {n.removeprefix("grad:") for n in graph.gradient_names} == {"up.weight", "down.weight", "down.bias"}
    assert "param:unused" not in graph.outputs and "param:up.bias" not in graph.outputs


def test_a_layer_of_a_70b_model_allocates_nothing():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8192, num_hidden_layers=1, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.empty(2, 4096, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        graph = tutti.capture(model, batch, torch.optim.AdamW(model.parameters()), fp32_master_weights=True)
    assert sum(abs(e.self_device_memory_usage) + max(e.cpu_memory_usage, 0) for e in profile.key_averages()) < 2**20
    assert sum(graph.spec(f"master:{n}").bytes for n in graph.names("param")) > 5e9


class Detached(Classifier):
    def forward(self, x):
        return super().forward(x).detach()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: m(b[0]), r"0-d floating tensor, not torch.float32 of shape \(8, 3\)"),
        (lambda m, b: m(b[0]).argmax(), "0-d floating tensor, not torch.int64"),
        (lambda m, b: 1.0, "the loss is a float; pass loss="),
        (lambda m, b: b[0].mean(), "does not depend on any parameter"),
    ],
)
def test_a_loss_that_is_none_is_an_error(loss, message):
    with pytest.raises(ValueError, match=message):
        tutti.capture(Classifier(), points(), loss=loss)


def test_other_mistakes_are_errors():
    with pytest.raises(ValueError, match="batch entry '1' is a object; entries are tensors or plain values"):
        tutti.capture(Classifier(), (points()[0], object()))
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        tutti.capture(Classifier().requires_grad_(False), points(), loss=cross_entropy)
    with pytest.raises(ValueError, match="does not depend on any parameter"):
        tutti.capture(Detached(), points(), loss=cross_entropy)


class Branching(Classifier):
    """Asks for values of its input in the way it is told."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return self.how(self, x, super().forward(x).square())


def branch(model, x, y):
    if y.sum() > 9:
        model.how = None
        return y.sum()
    return y.mean()


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (branch, "if y.sum() > 9:"),
        (lambda m, x, y: y[y > 0].sum(), "y[y > 0].sum()"),
    ],
)
def test_a_model_that_branches_on_values_is_told_where_and_what_to_do(how, line):
    with pytest.raises(ValueError, match=r"test_capture\.py:\d+, `.*`: the model branches on the values") as error:
        tutti.capture(Branching(how), points(), loss=lambda m, b: m(b[0]))
    assert line in str(error.value) and "write torch.where or a mask" in str(error.value)
    assert "tutti.jit(model)" in str(error.value) and "experts" not in str(error.value)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (lambda m, x, y: y.mean() * y.mean().item(), "y.mean().item()"),
        (lambda m, x, y: y.mean() * sum(v for v in y[0].tolist()), "y[0].tolist()"),
        (lambda m, x, y: print(f"{y.mean():.3f}") or y.mean(), "y.mean():.3f"),
        (lambda m, x, y: (y.mean(), {"mean": float(y.mean())}), "float(y.mean())"),
    ],
)
def test_a_value_that_is_taken_out_is_told_where_and_how_to_report_it(how, line):
    with pytest.raises(ValueError, match=r"test_capture\.py:\d+, `.*`: the value of a tensor is taken out") as error:
        tutti.capture(Branching(how), points(), loss=lambda m, b: m(b[0]))
    assert line in str(error.value) and "return the tensor: a loss returns" in str(error.value)


def test_shapes_that_do_not_fit_are_told_with_line_and_module(caplog):
    x, y = points()
    with pytest.raises(RuntimeError) as error:
        tutti.capture(Classifier(), (torch.cat([x, x[:, :1]], 1), y), loss=cross_entropy)
    assert re.match(
        r".*\.py:\d+, `.*`: (module '\w+'|the step), aten\.\w+\.default\(.*float32\[8, 7\]", str(error.value)
    )
    assert not caplog.records, "torch logs nothing beside"


def test_a_batch_that_forward_does_not_take_is_an_error_of_the_batch():
    with pytest.raises(TypeError, match=r"Classifier\.forward does not take the batch .*entries of a dict are keyword"):
        tutti.capture(Classifier(), {"points": points()[0]})
    with pytest.raises(TypeError, match="entries of a tuple are positional arguments"):
        tutti.capture(Classifier(), (*points(), *points()))


def test_arguments_that_a_hook_supplies():
    x, _ = points()
    model = Classifier()
    model.forward = lambda points: Classifier.forward(model, points).sum()
    model.register_forward_pre_hook(lambda m, args, kwargs: ((kwargs["x"],), {}), with_kwargs=True)
    assert tutti.capture(model, {"x": x}).gradient_names


def test_a_gradient_scaler_is_told_what_does_its_work():
    model, scaler = Classifier(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x, y):
        scaler.scale(cross_entropy(model, (x, y))).backward()
        scaler.step(optimizer)

    store = tutti.Store(model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"GradScaler decides in Python .*max_nonfinite_steps"):
        tutti.function(train, *points(), store=store, cluster="cpu:1")


def test_a_model_that_leaves_pytorch_is_told_where():
    model = Branching(lambda m, x, y: y.mean() * float(x.numpy().max()))
    with pytest.raises(
        ValueError, match=r"test_capture\.py:\d+, `.*x\.numpy\(\)\.max.*`: .* out of PyTorch .*tutti\.jit"
    ):
        tutti.capture(model, points(), loss=lambda m, b: m(b[0]))


def test_an_operator_that_looks_at_values_is_told_from_a_model_that_does():
    def loss(model, batch):
        return model(batch[0]).mean() * torch.bincount(model(batch[0]).argmax(-1).flatten()).sum()

    batch = (torch.zeros(4, 4, 3), torch.ones(4, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"test_capture\.py:\d+, `.*bincount.*`: the operator aten\.bincount") as error:
        tutti.capture(nn.Linear(3, 5), batch, loss=loss)
    assert "the model branches" not in str(error.value) and "torch.library.custom_op with register_fake" in str(error)


def test_experts_that_are_chosen_by_value_are_told_of_those_that_are_not():
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
        vocab_size=96, num_local_experts=2,
    )  # fmt: skip
    model: transformers.PreTrainedModel = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match=r"modeling_mixtral\.py:\d+, .*set_experts_implementation\('tutti'\)"):
        tutti.capture(model, zoo.tokens(2))
    model.set_experts_implementation("tutti")
    assert tutti.capture(model, zoo.tokens(2)).flops > 0


def test_a_batch_without_labels_is_named():
    batch = zoo.tokens(2)
    del batch["labels"]
    with pytest.raises(ValueError, match=r"from 'labels', which the batch does not have \(it has 'input_ids'\)"):
        tutti.capture(zoo.llama(1), batch)
    with pytest.raises(ValueError, match=r"the loss is a NoneType; pass loss="):
        tutti.capture(zoo.llama(1), zoo.tokens(2), loss=lambda m, b: None)


def test_clipping_needs_an_update():
    with pytest.raises(ValueError, match="needs an optimizer: it clips gradients"):
        tutti.capture(nn.Linear(2, 2), torch.ones(1, 2), loss=lambda model, x: model(x).sum(), clip_norm=1.0)


def test_arguments_in_another_order_are_told():
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"optimizer is a tuple, not a torch[.]optim[.]Optimizer; pass \(model, batch"):
        tutti.capture(model, (x,), (x,))  # pyright: ignore
    with pytest.raises(ValueError, match="the batch is a tensor; give a dict"):
        tutti.capture(model, x, loss=lambda model, x: model(x).sum())  # pyright: ignore


class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        return torch.cond(y.mean() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,)).mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.cond's own
def test_a_model_that_is_refused_runs_as_before():
    model, x = Conditional(), torch.ones(4, 8)
    with pytest.raises(ValueError, match="the model calls cond"):
        tutti.capture(model, (x,))
    y = model.a(x)
    assert model(x) == (y.sin() if y.mean() > 0 else y.cos()).mean()

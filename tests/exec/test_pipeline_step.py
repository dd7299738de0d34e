"""What a training loop asks of a step that is a pipeline."""

import copy

import pytest
import torch

import tutti
import zoo


def make(plan="pp2", cluster="cpu:2", accumulate=4, model=None, level="O0", **options):
    model = model or zoo.gpt2(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return tutti.parallelize(model, optimizer, zoo.tokens(), cluster=cluster, plan=plan, accumulate=accumulate,
                             level=level, **options)  # fmt: skip


def test_training_goes_on_under_another_plan():
    """Dropout, a tied embedding and Adam's state included."""
    data = zoo.tokens()
    one = make("single", "cpu:1")
    piped = make("pp2-zb-vxdp2", "cpu:4", accumulate=2)
    expected = [one(data).item() for _ in range(2)]
    piped.load_training_state(one.training_state())
    back = make("single", "cpu:1", accumulate=2)
    back.load_training_state(piped.training_state())
    assert piped(data).item() == pytest.approx(back(data).item(), rel=1e-5)
    assert piped.steps == back.steps == 3 and expected[0] != expected[1]
    for name, tensor in back.state_dict().items():
        torch.testing.assert_close(piped.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_device_keeps_what_its_stages_train():
    step = make()
    names = [{name for name in parts if name.startswith("param:")} for parts in step.store.parts]
    assert not names[0] & names[1] and len(names[0] | names[1]) == len(step.graph.names("param"))
    assert set(step.state_dict(sharded=True)) == {name.removeprefix("param:") for name in names[0]}


def test_a_saved_pipeline_is_used_again(tmp_path):
    step, data = make("pp2-interleaved2"), zoo.tokens()
    step.plan.save(tmp_path / "plan.json")
    again = make(str(tmp_path / "plan.json"))
    assert again.plan == step.plan and again(data).item() == step(data).item()


def test_batches_of_other_shapes():
    step, one, short = make(), make("single", "cpu:1"), zoo.tokens(length=8)
    assert step(short).item() == pytest.approx(one(short).item(), rel=1e-5)
    assert step.evaluate(zoo.tokens(batch=3)).item() == pytest.approx(
        one.evaluate(zoo.tokens(batch=3)).item(), rel=1e-4
    )


def test_statistics_that_the_forward_pass_keeps():
    """Those of a batch norm, microbatch by microbatch."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8), torch.nn.ReLU(),
                              torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))  # fmt: skip
    x = torch.randn(12, 6)
    steps = [
        tutti.parallelize(own := copy.deepcopy(net), torch.optim.SGD(own.parameters(), lr=0.1), (x,),
                          loss=lambda m, b: m(*b).square().mean(), cluster=cluster, plan=plan, accumulate=3,
                          level="O0")
        for plan, cluster in (("pp3", "cpu:3"), ("single", "cpu:1"))
    ]  # fmt: skip
    for _ in range(2):
        assert steps[0]((x,)).item() == steps[1]((x,)).item()
    assert steps[0].evaluate((x,)).item() == pytest.approx(steps[1].evaluate((x,)).item(), rel=1e-5)
    for name, gradient in steps[1].gradients((x,)).items():
        torch.testing.assert_close(steps[0].gradients((x,))[name], gradient)
    for name, tensor in steps[1].state_dict().items():
        torch.testing.assert_close(steps[0].state_dict()[name], tensor)


def test_a_single_microbatch():
    one, piped, data = make("single", "cpu:1", 1), make("pp2xdp2", "cpu:4", 1), zoo.tokens()
    for _ in range(2):
        assert piped(data).item() == pytest.approx(one(data).item(), rel=1e-5)


@pytest.mark.starts
def test_compiled():
    data = zoo.tokens()
    plain, compiled = make(model=zoo.llama(2)), make(model=zoo.llama(2), level="O2")
    for _ in range(2):
        assert compiled(data).item() == pytest.approx(plain(data).item(), rel=1e-5)


def test_what_a_device_communicates():
    step = make("pp2xtp2", "cpu:4")
    assert {c.axis for c in step.collectives()} == {"tp", "pp"}
    (sent,) = {c.bytes for c in step.collectives() if c.kind == "send" and not c.label.startswith("param")}
    assert sent in (3 * 16 * 64 * 4, 3 * 16 * 64 * 4 // 2), "the residual stream of a microbatch, whole or split"
    with pytest.raises(ValueError, match="a Program for each part of its stages"):
        _ = step.program


@pytest.mark.parametrize(
    "plan, cluster, accumulate, message",
    [
        ("pp2-interleaved2", "cpu:2", 3, "interleaved takes a multiple of 2 microbatches, not 3"),
        ("pp12", "cpu:12", 1, "a model of 9 layers and modules beside them cannot be cut into 12 stages"),
        ("pp2-2f2b", "cpu:2", 4, "no schedule '2f2b' of pp; pp has gpipe, 1f1b"),
        (
            "pp2-interleaved",
            "cpu:2",
            4,
            "go with a number of stages on each device, pp4-interleaved2",
        ),
        ("dp2-gpipe", "cpu:2", 4, "dp has no schedule; pp has"),
    ],
)
def test_pipelines_that_cannot_be(plan, cluster, accumulate, message):
    with pytest.raises(ValueError, match=message):
        make(plan, cluster, accumulate)


class Counts(torch.nn.Module):
    """A buffer that changes, read at both ends."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.register_buffer("k", torch.ones(()))

    def forward(self, x):
        k = self.k.clone()
        out = self.b(self.a(x * k)) * k
        self.k.add_(0.01)
        return out.square().mean()


def test_a_buffer_that_changes_belongs_to_one_stage():
    net = Counts()
    plan = tutti.Plan({"pp": 2}, accumulate=2, stages={"a": 0, "b": 1}, schedule="1f1b")
    with pytest.raises(ValueError, match="k changes with every microbatch, and stages 0, 1 of the pipeline read or"):
        tutti.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1), (torch.ones(4, 6),), cluster="cpu:2",
                          plan=plan, accumulate=2, level="O0")  # fmt: skip


@pytest.mark.parametrize("plan", ["tp2", "pp2xtp2"])
def test_parameters_with_master_weights_keep_their_layout(plan):
    """The update of a microbatched step makes parameters that it does not read."""
    devices = 4 if "pp" in plan else 2
    losses = {}
    for name, cluster in (("single", "cpu:1"), (plan, f"cpu:{devices}")):
        model, batch = zoo.llama(2).bfloat16(), zoo.tokens()
        step = tutti.parallelize(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), batch, cluster=cluster, plan=name, level="O0",
            accumulate=2, fp32_master_weights=True,
        )  # fmt: skip
        losses[name] = [step(batch).item() for _ in range(3)]
    assert losses[plan] == pytest.approx(losses["single"], rel=5e-3)
    key = "param:model.layers.0.mlp.up_proj.weight"
    assert step.store.parts[0][key].numel() == model.model.layers[0].mlp.up_proj.weight.numel() / 2
    gathered = sum(c.bytes for c in step.collectives() if c.kind == "all_gather" and "update" in c.label)
    assert gathered < 1000, "each rank makes its part of a matrix"

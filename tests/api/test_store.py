"""A store moves between layouts, survives in checkpoints, and keeps float32 master weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti

WIDTH, ROWS = 16, 8


def stepped(plan: str = "zero3", devices: int = 4, dtype=torch.float32, **options):
    """A store with a model, its optimizer and a running sum; an update with dropout, and a forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)).to(
        dtype
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = {"total": torch.zeros(WIDTH)}

    def update(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.to(dtype)), x.to(dtype).flip(-1))
        loss.backward()
        optimizer.step()
        seen["total"] = seen["total"] + x.sum(0)
        return loss

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            return F.linear(F.gelu(F.linear(x.to(dtype), model[0].weight, model[0].bias)), model[3].weight)

    store = tutti.Store(model=model, optimizer=optimizer, seen=seen, **options)
    where = {"store": store, "cluster": f"cpu:{devices}"}
    return (
        store,
        lambda: tutti.function(update, data(0), plan=plan, **where),
        lambda p="auto": tutti.function(forward, data(0), plan=p, **where),
    )


def data(i: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i))


@pytest.mark.parametrize("there", ["tp", "dp2xtp2", "dp"])
def test_training_and_inference_alternate_between_their_layouts(there):
    store, update, forward = stepped("zero3")
    other, train_only, _ = stepped("zero3")
    train, plain = update(), train_only()
    infer = forward(there)
    home, away = train.plan, infer.best_plan()
    assert away.name.startswith(there)
    bytes_moved = []
    for i in range(3):
        assert torch.equal(train(data(i)), plain(data(i)))
        weights = {name: store[name] for name in store.names()}
        before = infer(data(9))
        bytes_moved.append(store.relayout(away))
        assert all(torch.equal(store[name], x) for name, x in weights.items())
        weight = "param:model.0.weight"
        assert store.layouts[weight] == away.input_layout(store.tensors[weight].label)
        torch.testing.assert_close(infer(data(9)), before, rtol=1e-5, atol=1e-6)
        store.relayout(home)
        other.calls = store.calls  # draws of dropout are numbered by calls
    assert len(set(bytes_moved)) == 1 and len(train._executables) == 1 and len(infer._executables) == 2


def test_all_layers_of_a_kind_move():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))), data(0)
    store = tutti.Store(model=model)
    compute = tutti.forward(model, (x,), store=store, cluster="cpu:2", plan="dp")
    weights = [f"param:model.{i}.0.weight" for i in range(3)]
    assert len({store.tensors[name].label for name in weights}) == 1, "the layers share a label"
    other = tutti.forward(model, (x,), store=tutti.Store(model=model), cluster="cpu:2", plan="zero3")
    store.relayout(other.plan)
    assert [str(store.layouts[name]) for name in weights] == ["dp:S0"] * 3
    torch.testing.assert_close(compute((x,)), model(x).detach(), rtol=1e-5, atol=1e-6)


def test_moving_costs_nothing_where_nothing_moves():
    store, update, _ = stepped("zero3")
    assert store.relayout(update().plan) == 0
    with pytest.raises(ValueError, match="the store is on 4 devices, the plan is for 2"):
        store.relayout(stepped("dp", 2)[1]().plan)
    with pytest.raises(ValueError, match="no function has used the store yet"):
        stepped()[0].relayout(update().plan)


@pytest.mark.parametrize(("plan", "devices"), [("dp", 2), ("tp", 2), ("zero3", 4)])
@pytest.mark.parametrize("through", ["folder", "tensors"])
def test_a_store_resumes_bit_for_bit_under_any_plan(tmp_path, plan, devices, through):
    store, update, _ = stepped("zero3")
    step = update()
    for i in range(2):
        step(data(i))
    checkpoints = tutti.Checkpoints(tmp_path)
    store.save(checkpoints)
    checkpoints.wait()
    state = store.training_state()
    other, again, _ = stepped(plan, devices)
    used = plan == "tp"  # else the state is loaded before any function has used the store
    resumed = again() if used else None
    if through == "folder":
        other.load(checkpoints.latest())
    else:
        other.load_training_state(state)
    resumed = resumed or again()
    for name, x in state.items():
        if name.partition(":")[0] not in ("calls", "updates"):
            assert torch.equal(other[name], x), name
    for i in range(2, 4):
        torch.testing.assert_close(resumed(data(i)), step(data(i)), rtol=1e-5, atol=1e-6)
    assert other.updates == store.updates and other.calls == store.calls == 4


def test_a_tensor_that_a_checkpoint_lacks_begins_as_the_object_has_it(tmp_path):
    store, update, _ = stepped("dp", 2)
    update()(data(0))
    checkpoints = tutti.Checkpoints(tmp_path)
    store.save(checkpoints)
    checkpoints.wait()
    torch.manual_seed(1)
    more = nn.Linear(WIDTH, 2)
    other = tutti.Store(**store.holdings.objects, more=more)
    other.load(checkpoints.latest())
    fn = tutti.function(lambda x: more(store.holdings.objects["model"][0](x)[:, :WIDTH]).detach(), data(1),
                        store=other, cluster="cpu:2", plan="dp")  # fmt: skip
    fn(data(1))
    assert torch.equal(other["param:more.weight"], more.weight)
    assert torch.equal(other["param:model.0.weight"], store["param:model.0.weight"])


def test_parameters_are_the_roundings_of_float32_master_weights():
    store, update, _ = stepped("zero3", dtype=torch.bfloat16, fp32_master_weights=True)
    step = update()
    for i in range(3):
        step(data(i))
    masters = store.names("master")
    assert len(masters) == 4 and all(store[name].dtype == torch.float32 for name in masters)
    for name in masters:
        assert torch.equal(store[name].bfloat16(), store[name.replace("master", "param")])
        assert not torch.equal(store[name], store[name].bfloat16().float())


def test_optimizer_state_may_be_kept_off_the_device():
    (store, update, _), (_, plain, _) = stepped("offload", 1), stepped("single", 1)
    step, other = update(), plain()
    for i in range(3):
        assert torch.equal(step(data(i)), other(data(i)))
    assert any(x.tier != "device" for x in store.tensors.values())


def moved(there: str) -> tuple[int, int, float]:
    """Bytes that this process receives there and back, and the loss afterwards."""
    store, update, forward = stepped("zero3")
    train, infer = update(), forward(there)
    train(data(0))
    away = store.relayout(infer.best_plan())
    infer(data(1))
    back = store.relayout(train.plan)
    return away, back, float(train(data(1)))


def test_ranks_of_a_job_send_each_other_what_moves(pool):
    away, back, loss = moved("tp")
    ranks = pool.run(moved, "tp")
    assert sum(rank[0] for rank in ranks) == away > 0 and sum(rank[1] for rank in ranks) == back > 0
    assert [rank[2] for rank in ranks] == pytest.approx([loss] * 4, rel=1e-6)


def test_what_is_no_plan_and_no_checkpoint():
    store = tutti.Store(model=torch.nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"relayout takes a tutti.Plan, such as fn.best_plan\(\) or fn.plan, not 'tp2'"
    ):
        store.relayout("tp2")
    with pytest.raises(ValueError, match=r"there is no checkpoint to load: Checkpoints.latest\(\) returned None"):
        store.load(None)


@pytest.mark.parametrize("plan", ["dp", "pp2"])
def test_the_plan_of_a_function_has_a_prediction(plan):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(8, 8),)
    step = tutti.train_step(
        model, optimizer, batch, store=tutti.Store(model=model, optimizer=optimizer), cluster="cpu:2", plan=plan,
        loss=lambda m, b: m(*b).square().mean(),
    )  # fmt: skip
    assert step.plan.predicted.step_seconds > 0 and step.plan is step.plan


def test_what_is_only_written_is_stored():
    seen = {"now": torch.zeros(3), "before": torch.zeros(3)}

    def note(x: Tensor) -> Tensor:
        seen["now"] = 2 * x
        return x.sum()

    store = tutti.Store(seen=seen)
    function = tutti.function(note, torch.ones(3), store=store, cluster="cpu:1")
    function(torch.full((3,), 4.0))
    assert seen["now"].tolist() == [8, 8, 8] and store.names() == ["cache:seen.now"]


def test_fixed_functions_know_entries_by_name():
    pair = {"a": torch.ones(3), "b": torch.zeros(3)}
    difference = tutti.function(lambda x: x["a"] - x["b"], pair, cluster="cpu:1").fixed(pair)
    assert difference(dict(reversed(pair.items()))).tolist() == [1, 1, 1]

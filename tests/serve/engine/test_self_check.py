"""An engine that would serve a model wrongly is refused when it is made."""

from __future__ import annotations

import logging

import pytest
import tiny
import torch

from tutti.serve import Engine, Sampling
from tutti.serve.cache import attention
from tutti.serve.engine import runner, self_check

SIZES = {"blocks": 32, "budget": 32, "most": 4}


def engine(model=None, plan: str = "single", devices: int = 1, **options) -> Engine:
    model = tiny.model() if model is None else model
    return Engine(model, plan=plan, cluster=f"cpu:{devices}", **{**SIZES, **options})


def wrong_positions(patch) -> None:
    right = runner.logits
    patch.setattr(
        runner, "logits", lambda model, tokens, positions, *x, **y: right(model, tokens, 2 * positions, *x, **y)
    )


def paged(patch, change) -> None:
    """Attention with other arguments: change(layer, scale, options) gives them."""
    right = attention._Paged.__call__

    def call(self, place, query, key, value, scale, options):
        scale, options = change(place[0], scale, options)
        return right(self, place, query, key, value, scale, options)

    patch.setattr(attention._Paged, "__call__", call)


FAULTS = {
    "rotary": wrong_positions,
    "mask": lambda patch: paged(patch, lambda _, scale, options: (scale, {**options, "window": 3})),
    "scale": lambda patch: paged(patch, lambda _, scale, options: (scale * 1.1, options)),
    "cap": lambda patch: paged(patch, lambda _, scale, options: (scale, {**options, "softcap": 1.0})),
    "dropped layer": lambda patch: paged(patch, lambda layer, scale, options: (scale * (layer == 0), options)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    with pytest.raises(ValueError, match=r"served wrongly: for .*self_check=False.*--no-self-check"):
        engine()


@pytest.mark.parametrize("plan, devices, limit", [("tp2", 2, 1 << 28), ("pp2", 2, 1 << 28), ("tp2", 2, 0)])
def test_faults_are_refused_under_plans(plan, devices, limit, monkeypatch):
    """Parameters that are split are gathered; above a limit, the forward pass runs under the plan."""
    monkeypatch.setattr(self_check, "AT_ONCE", limit)
    assert engine(plan=plan, devices=devices).checked > 0
    FAULTS["scale"](monkeypatch)
    with pytest.raises(ValueError, match="served wrongly"):
        engine(plan=plan, devices=devices)


def test_a_model_with_a_state_of_its_own_is_refused():
    """Each layer adds what the token before had, as a convolution over tokens does."""
    model = tiny.model()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda _, __, x: x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
    with pytest.raises(ValueError, match="LlamaForCausalLM would be served wrongly"):
        engine(model)
    assert engine(model, self_check=False).checked == 0


@pytest.mark.parametrize("options", [
    {"most": 1}, {"most": 2, "budget": 2}, {"blocks": 4, "block": 4}, {"quantize": "int8"}, {"longest": 5},
    {"blocks": 2, "block": 1},
])  # fmt: skip
def test_sizes_and_quantized_weights_pass(options):
    assert engine(**options).checked > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_has_a_looser_bound(dtype, monkeypatch):
    assert engine(tiny.model().to(dtype)).checked > 0
    FAULTS["rotary"](monkeypatch)
    with pytest.raises(ValueError, match=r"at most 0\.1"):
        engine(tiny.model().to(dtype))


def test_the_check_leaves_model_and_output_alone(caplog):
    """The step that the check captures is that of a short prompt."""
    model = tiny.model()
    names = {name: x.data_ptr() for name, x in model.named_parameters()}
    llm = engine(model)
    shapes = set(llm.runner.ready)
    outputs = llm.generate([[1, 2, 3]], Sampling(max_tokens=4, temperature=0))
    assert {name: x.data_ptr() for name, x in model.named_parameters()} == names
    assert outputs[0].tokens == tiny.greedy(model, [1, 2, 3], 4) and outputs[0].cached == 0
    assert shapes <= set(llm.runner.ready) and len(llm.runner.ready) == 2
    assert not caplog.records


def test_a_model_whose_own_forward_pass_fails_is_not_checked(caplog):
    model = tiny.model()
    model.register_forward_pre_hook(_fail, with_kwargs=True)
    with caplog.at_level(logging.WARNING, "tutti.serve"):
        engine(model)
    assert "LlamaForCausalLM is not checked: its own forward pass of tokens fails: no positions" in caplog.text


def _fail(module, args, options) -> None:
    if "position_ids" not in options:
        raise ValueError("no positions")

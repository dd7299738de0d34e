"""The experts of transformers' models, fused, against its own."""

import pytest
import torch
import transformers

import models
import more_models
import tutti
import tutti.models.experts
from tutti.models.experts import taken_by_default, unsupported

ops = torch.ops.tutti


def outputs(name: str, implementation: str):
    """Loss and gradients."""
    model, batch, _ = (models if name in models.MODELS else more_models).case(name)
    model.set_experts_implementation(implementation)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek", "gpt_oss"])
def test_they_are_those_of_transformers(name):
    (loss, grads), (expected, theirs) = outputs(name, "tutti"), outputs(name, "eager")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for key, grad in theirs.items():
        torch.testing.assert_close(grads[key], grad, rtol=1e-4, atol=1e-5 * grad.abs().max().item(), msg=key)


def small(family: str, **more):
    """One layer on the meta device."""
    config = getattr(transformers, f"{family}Config")(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
        vocab_size=96, num_local_experts=4, **more,
    )  # fmt: skip
    with torch.device("meta"):
        return getattr(transformers, f"{family}ForCausalLM")(config)


def experts_of(model):
    return next(m for m in model.modules() if hasattr(m, "has_post_expert_norm"))


def other_kind(model):
    """A model whose experts have a gate that no other has."""
    module = experts_of(model)
    module.__class__ = type("OtherExperts", (type(module),), {"_apply_gate": lambda self, rows: rows})
    return model


def test_a_variant_that_is_not_there_names_what_is():
    model = other_kind(small("Mixtral"))
    model.set_experts_implementation("tutti")
    message = "OtherExperts has a custom gate, which .*set_experts_implementation.*'batched_mm'"
    with pytest.raises(NotImplementedError, match=message):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"))


def test_an_unknown_activation_is_named():
    assert unsupported(experts_of(small("Mixtral", hidden_act="mish"))) == "the activation MishActivation"


def test_capture_takes_them_where_transformers_default_is_left():
    model, batch, _ = models.case("mixtral")
    assert model.config._experts_implementation == "grouped_mm"
    targets = [n.target for n in tutti.capture(model, batch).calls]
    assert [targets.count(t) for t in (ops.experts.default, ops.experts_backward.default)] == [2, 2]
    assert model.config._experts_implementation == "grouped_mm"
    model.set_experts_implementation("batched_mm")
    assert ops.experts.default not in [n.target for n in tutti.capture(model, batch).calls]


def test_models_that_have_another_kind_of_experts_keep_theirs():
    model = other_kind(small("Mixtral"))
    with taken_by_default(model):
        assert model.config._experts_implementation == "grouped_mm"
    model = small("Mixtral")
    with pytest.raises(KeyError), taken_by_default(model):
        assert model.config._experts_implementation == "tutti"
        raise KeyError
    assert model.config._experts_implementation == "grouped_mm"

"""A model on a GPU is compressed there, to the model that the CPU makes of it."""

import pytest
import torch

import tutti
from compress_models import batches, model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("recipe", [
    "int8-a8", "int4-g32-gptq", "int4-g32-awq", "int8-a8static-smooth", "rotate-untie+int3-g32-gptq", "mixed-4-gptq",
    "prune-2:4+int4-g32", "shrink-heads0.5-channels0.5-layers1", "int4-g32+distill-2",
])  # fmt: skip
def test_a_gpu_makes_the_model_of_the_cpu(recipe):
    data = batches(rows=4, length=32)
    alone = tutti.compress(model("llama"), recipe, data).model.state_dict()
    there = tutti.compress(model("llama").cuda(), recipe, data).model.state_dict()
    assert alone.keys() == there.keys()
    for name, x in there.items():
        assert x.device.type == "cuda", name
        if x.is_floating_point():
            torch.testing.assert_close(x.cpu(), alone[name], rtol=1e-2, atol=1e-3)
        else:
            assert (x.cpu() == alone[name]).float().mean() > 0.95, name

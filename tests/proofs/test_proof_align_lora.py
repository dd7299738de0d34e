"""With adapters, PPO trains them alone, its reference is the model without them, and the model is held once."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

import align_models as small
from tutti.align import PPOConfig, PPOTrainer
from tutti.align.sequences import model_logprobs

PROMPTS = [{"prompt": f"{i}+{i}="} for i in range(8)]
KINDS = "adapters", "full"
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")


def sized(layers: int, width: int = 128) -> Any:
    """A model most of whose bytes are in its layers."""
    return small.model(num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width)


def trained(path: str, kind: str, model: Any, **more: Any) -> Any:
    """A trainer after two steps, of adapters or of the whole model."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    options = small.policy_options(path, per_device_train_batch_size=8, num_ppo_epochs=1, **more)
    trainer = PPOTrainer(model, small.vowels, PPOConfig(**options), train_dataset=PROMPTS,
                         processing_class=small.tokenizer(),
                         peft_config=lora if kind == "adapters" else None)  # fmt: skip
    trainer.train()
    return trainer


def storage_bytes(trainer: Any) -> int:
    """Bytes of all tensors that a trainer holds between rounds, but for the cache of its engine: parameters, state of
    the optimizer, the reference, and what the engine and the functions of scores store."""
    engine = trainer.sampler.engine.runner.store
    stores = [trainer.step.store, engine, *(x.store for x in trainer.scorer.values())]
    tensors = [*trainer.model.parameters(), *(trainer.ref_model.parameters() if trainer.ref_model else ())]
    tensors += [x for store in stores for parts in store.parts for name, x in parts.items() if "cache" not in name]
    return sum({x.data_ptr(): x.nbytes for x in tensors}.values())


def test_adapters_alone_learn_and_the_reference_is_the_model_without_them(tmp_path):
    base = small.model()
    before = {name: x.clone() for name, x in base.state_dict().items()}
    trainer = trained(str(tmp_path), "adapters", base)
    learned = {name for name, x in trainer.model.named_parameters() if x.requires_grad}
    assert all("lora_" in name or name.startswith("value_head") for name in learned)
    after = {name.replace("base_layer.", ""): x for name, x in trainer.policy.get_base_model().state_dict().items()}
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert any(x.abs().max() > 1e-3 for name, x in after.items() if "lora_B" in name)
    batch = trainer.batch_of_rollouts(trainer.generate([trainer.train_dataset[i] for i in range(8)], 0), torch.zeros(8))
    scores = trainer.score(batch)
    with torch.no_grad():
        plain = model_logprobs(small.model().eval(), batch)
    torch.testing.assert_close(scores["ref_logprobs"], plain, rtol=0, atol=1e-5)
    assert trainer.ref_model is None and (scores["old_logprobs"] - plain).abs().max() > 1e-3


def test_bytes_of_the_tensors_that_are_held(tmp_path):
    """Adapters: the model once. All parameters: policy, reference, the engine's copy, and two moments of AdamW."""
    copies = {}
    for kind in KINDS:
        model = sized(4)
        weights = sum(x.nbytes for x in model.parameters())
        copies[kind] = storage_bytes(trained(str(tmp_path / kind), kind, model)) / weights
    print(copies)
    assert copies["adapters"] < 1.1
    assert 4.95 < copies["full"] < 5.05


def _resident(path: str, kind: str, width: int) -> tuple[int, int]:
    """Bytes of a model, and of what is resident after training it."""
    torch.set_num_threads(1)
    model = sized(3, width)
    trainer = trained(path, kind, model, max_completion_length=4)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is not resident
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert trainer.state.global_step == 2
    return sum(x.nbytes for x in model.parameters()), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("kind", KINDS)
def test_resident_memory(kind, tmp_path):
    """What each byte of the model adds to a process: the same graphs, of layers of a width of 128 and of 1,024."""
    results = []
    for width in (128, 1024):
        with multiprocessing.get_context("spawn").Pool(1) as process:
            results.append(process.apply(_resident, (str(tmp_path / str(width)), kind, width)))
    (few, resident_few), (many, resident_many) = results
    copies = (resident_many - resident_few) / (many - few)
    print(kind, [round(x / 2**20) for x in (few, many, resident_few, resident_many)], "MiB", round(copies, 2))
    assert copies < 1.3 if kind == "adapters" else copies > 4.5

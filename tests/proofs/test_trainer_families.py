"""Seven families of models train by `tutti.Trainer` under plan="auto": two Gloo processes give the losses of one.

The text is the source code of Python's standard library, read byte by byte, the images are scikit-learn's digits, and
the captions of CLIP name them. Each model falls below a stated loss, on rows that it was not trained on.
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import tutti
from gloo import Pool

SEQ, BYTES = 32, 260
SIZES = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def text(rows):
    source = b"".join(x.read_bytes() for x in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")))
    ids = np.frombuffer(source, np.uint8).astype(np.int64)
    starts = np.random.default_rng(0).permutation(len(ids) // SEQ)[:rows] * SEQ
    return torch.from_numpy(ids[starts[:, None] + np.arange(SEQ)])


def digits(rows):
    from sklearn.datasets import load_digits

    dataset = load_digits()
    order = np.random.default_rng(0).permutation(len(dataset.images))[:rows]
    return torch.tensor(dataset.images[order], dtype=torch.float32)[:, None] / 8 - 1, dataset.target[order]


def causal(rows):
    return [{"input_ids": x, "labels": x.clone()} for x in text(rows)]


def masked(rows):
    examples, draw = [], torch.Generator().manual_seed(0)
    for x in text(rows):
        chosen = torch.rand(SEQ, generator=draw) < 0.15
        examples.append({"input_ids": x.masked_fill(chosen, 256), "labels": x.masked_fill(~chosen, -100)})
    return examples


def spans(rows):
    gone = torch.arange(SEQ) % 16 < 3
    return [{"input_ids": x[~gone] + 3, "labels": x[gone] + 3} for x in text(rows)]


def classes(rows):
    return [{"pixel_values": x, "labels": int(y)} for x, y in zip(*digits(rows), strict=True)]


def captioned(rows):
    """A caption: begin, a word for "digit", one that says which, end."""
    return [
        {"pixel_values": x, "input_ids": torch.tensor([1, 4, 10 + y, 3])} for x, y in zip(*digits(rows), strict=True)
    ]


def pairs(features):
    """A collator for CLIP."""
    batch = {key: torch.stack([x[key] for x in features]) for key in ("pixel_values", "input_ids")}
    return batch | {"return_loss": True}


def pictures(rows):
    return [{"image": ((x[0] + 1) * 127).byte().numpy()[..., None]} for x in digits(rows)[0]]


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=BYTES, **SIZES))


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=BYTES, **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))  # fmt: skip


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=BYTES, d_model=48, d_ff=96, d_kv=12, num_layers=1, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0))  # fmt: skip


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(
        **SIZES, image_size=8, patch_size=2, num_channels=1, num_labels=10))  # fmt: skip


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=BYTES, **SIZES, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2))  # fmt: skip


def clip():
    tokens = {"vocab_size": 32, "max_position_embeddings": 4, "bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 0}
    vision = {"image_size": 8, "patch_size": 2, "num_channels": 1}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=SIZES | tokens, vision_config=SIZES | vision, projection_dim=32)
    )


def unet():
    import diffusers

    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(16, 16), layers_per_block=1,
        norm_num_groups=4, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2)  # fmt: skip


FAMILIES = {  # model, rows, task, learning rate, loss that it must fall below
    "llama": (llama, causal, None, 4e-3, 3.1),
    "bert": (bert, masked, None, 4e-3, 3.3),
    "t5": (t5, spans, None, 6e-3, 3.8),
    "vit": (vit, classes, None, 4e-3, 2.1),
    "mixtral": (mixtral, causal, None, 4e-3, 3.2),
    "clip": (clip, captioned, None, 2e-3, 2.4),
    "unet": (unet, pictures, "diffusion", 4e-3, 0.35),
}
STEPS, BATCH = 80, 16


def trained(name):
    """The losses of all steps, on held-out rows at the end, and the plan."""
    make, rows, task, rate, _ = FAMILIES[name]
    torch.set_num_threads(1)
    data = rows(STEPS * BATCH // 2 + 64)
    torch.manual_seed(0)
    args = tutti.TrainingArguments(
        tempfile.mkdtemp(), max_steps=STEPS, global_batch_size=BATCH, per_device_eval_batch_size=16, learning_rate=rate,
        logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no", level="O0",
        label_names=[] if name in ("clip", "unet") else ["labels"], warmup_steps=5,
    )  # fmt: skip
    if task:
        from tutti.train.tasks import get_task

        task = get_task(task, size=8)
    trainer = tutti.Trainer(make(), args, train_dataset=data[64:], eval_dataset=data[:64], task=task,
                            data_collator=pairs if name == "clip" else None)  # fmt: skip
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    eval_loss = trainer.evaluate().get("eval_loss", np.mean(losses[-10:]))
    return losses, eval_loss, trainer.step.plan.name


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_two_processes_train_as_one(name, pool):
    alone, loss, _ = trained(name)
    (together, other, plan), (again, *_) = pool.run(trained, name)
    print(f"{name}: {alone[0]:.3f} -> {loss:.3f} on held-out rows, plan {plan} on two processes")
    assert together == again
    np.testing.assert_allclose(together[:10], alone[:10], rtol=1e-4)
    np.testing.assert_allclose(together, alone, rtol=5e-2)  # rounding grows from step to step
    assert loss < FAMILIES[name][-1]
    if name != "unet":  # its evaluation draws noise by the place in the batch, and batches are larger
        assert other == pytest.approx(loss, rel=5e-2)

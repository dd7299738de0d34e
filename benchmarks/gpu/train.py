"""Training speed on one GPU: tutti, a loop with `torch.compile`, and `transformers.Trainer`, in turns, for six models.

A Llama of the shapes of the 1B and eight layers of those of the 8B, GPT-2 medium, a mixture of experts, a ViT and a
U-Net, with AdamW and gradient clipping from the same weights on the same data. Ours keep bfloat16 parameters and
float32 masters; the peers float32 parameters under autocast, as is usual. First losses must agree. `flops_share` is of
the device's dense bfloat16 peak, counting the products of the model once. Without a GPU, or with `--quick`, all models
are small.

    python benchmarks/gpu/train.py [--quick] [--only MODEL]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from matplotlib.figure import Figure
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import harness
import trainers
import tutti
from tutti.hardware.local import local

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BF16 = torch.bfloat16
ROUNDS, STEPS = 5, 4
LEVELS = "O0", "O1", "O2"  # of models of full size the last alone: a GPU holds three contenders of 1B parameters

Item = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """make: the model of a number of layers. item: what one sample is, by a generator. per_item: what is counted of a
    sample, named `unit`. loss: where the model gives none; the Trainer then takes no part."""

    make: Callable[[], torch.nn.Module]
    item: Callable[[torch.Generator], Item]
    batch: int
    unit: str = "tokens"
    per_item: int = 1
    loss: Callable[[torch.nn.Module, Item], torch.Tensor] | None = None

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        with DEVICE:
            return self.make().train()

    def batches(self, dtype: torch.dtype = torch.float32) -> Iterator[Item]:
        """dtype: dtype of pixels."""
        data, first = Samples(self), 0
        while True:
            items = [data[i] for i in range(first, first + self.batch)]
            batch = {key: torch.stack([item[key] for item in items]).to(DEVICE) for key in items[0]}
            yield {key: x.to(dtype) if key == "pixel_values" else x for key, x in batch.items()}
            first += self.batch

    def score(self, model: torch.nn.Module, batch: Item) -> torch.Tensor:
        return self.loss(model, batch) if self.loss else model(**batch).loss


class Samples(Dataset):
    """Samples that are functions of their index."""

    def __init__(self, workload: Workload):
        self.workload = workload

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Item:
        return self.workload.item(torch.Generator().manual_seed(index))


@dataclass(frozen=True)
class Text:
    """Random tokens."""

    vocabulary: int
    length: int

    def __call__(self, generator: torch.Generator) -> Item:
        ids = torch.randint(self.vocabulary, (self.length,), generator=generator)
        return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Pictures:
    """Random images and classes."""

    size: int
    classes: int

    def __call__(self, generator: torch.Generator) -> Item:
        image = torch.randn(3, self.size, self.size, generator=generator)
        return {"pixel_values": image, "labels": torch.randint(self.classes, (), generator=generator)}


@dataclass(frozen=True)
class Noise:
    """Random images, times, and the noise that is to be found in them."""

    size: int

    def __call__(self, generator: torch.Generator) -> Item:
        image, noise = (torch.randn(3, self.size, self.size, generator=generator) for _ in range(2))
        return {"sample": image, "timestep": torch.randint(1000, (), generator=generator), "noise": noise}


def denoising(model: torch.nn.Module, batch: Item) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    predicted = model(batch["sample"].to(dtype), batch["timestep"]).sample
    return torch.nn.functional.mse_loss(predicted.float(), batch["noise"])


@dataclass(frozen=True)
class Make:
    """A model of `transformers`, or of `diffusers`, by the names of its class and that of its config."""

    model: str
    config: str
    options: tuple[tuple[str, Any], ...]

    def __call__(self) -> torch.nn.Module:
        if not self.config:
            import diffusers

            return getattr(diffusers, self.model)(**dict(self.options))
        return getattr(transformers, self.model)(getattr(transformers, self.config)(**dict(self.options)))


def make_of(model: str, config: str, **options: Any) -> Make:
    return Make(model, config, tuple(options.items()))


def llama(width: int, layers: int, heads: int, groups: int, inner: int, vocabulary: int, length: int, batch: int,
          tied: bool) -> Workload:  # fmt: skip
    make = make_of("LlamaForCausalLM", "LlamaConfig", hidden_size=width, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=groups, intermediate_size=inner,
                vocab_size=vocabulary, max_position_embeddings=length, tie_word_embeddings=tied)  # fmt: skip
    return Workload(make, Text(vocabulary, length), batch, per_item=length)


def gpt2(width: int, layers: int, heads: int, vocabulary: int, length: int, batch: int) -> Workload:
    make = make_of("GPT2LMHeadModel", "GPT2Config", n_embd=width, n_layer=layers, n_head=heads, n_positions=length,
                vocab_size=vocabulary, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return Workload(make, Text(vocabulary, length), batch, per_item=length)


def mixtral(width: int, layers: int, heads: int, inner: int, vocabulary: int, length: int, batch: int) -> Workload:
    make = make_of("MixtralForCausalLM", "MixtralConfig", hidden_size=width, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=inner,
                num_local_experts=8, num_experts_per_tok=2, vocab_size=vocabulary,
                max_position_embeddings=length)  # fmt: skip
    return Workload(make, Text(vocabulary, length), batch, per_item=length)


def vit(width: int, layers: int, heads: int, size: int, batch: int) -> Workload:
    make = make_of("ViTForImageClassification", "ViTConfig", hidden_size=width, num_hidden_layers=layers,
                num_attention_heads=heads, intermediate_size=4 * width, image_size=size, num_labels=1000,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return Workload(make, Pictures(size, 1000), batch, "images")


def unet(channels: tuple[int, ...], size: int, batch: int) -> Workload:
    make = make_of("UNet2DModel", "", sample_size=size, layers_per_block=2, block_out_channels=channels,
                down_block_types=("DownBlock2D",) * (len(channels) - 1) + ("AttnDownBlock2D",),
                up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * (len(channels) - 1))  # fmt: skip
    return Workload(make, Noise(size), batch, "images", loss=denoising)


FULL = {
    "Llama 1B": llama(2048, 16, 32, 8, 8192, 128256, 2048, 4, tied=True),
    "Llama 8B, 8 layers": llama(4096, 8, 32, 8, 14336, 128256, 2048, 2, tied=False),
    "GPT-2 medium": gpt2(1024, 24, 16, 50257, 1024, 16),
    "Mixtral, 1.5B": mixtral(1024, 12, 16, 3584, 32000, 1024, 8),
    "ViT-L/16": vit(1024, 24, 16, 224, 64),
    "U-Net": unet((128, 256, 384, 512), 64, 32),
}
SMALL = {
    "Llama": llama(128, 2, 4, 2, 352, 512, 64, 2, tied=True),
    "GPT-2": gpt2(128, 2, 4, 512, 64, 2),
    "Mixtral": mixtral(64, 2, 4, 128, 512, 64, 2),
    "ViT": vit(128, 2, 4, 64, 4),
    "U-Net": unet((32, 64), 16, 4),
}


def with_tutti(turns: harness.Turns, workload: Workload, level: str) -> None:
    model, batches = workload.model().to(BF16), workload.batches(BF16)
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = True  # transformers then leaves causality to the kernel; the capture drops the cache
    first = next(batches)
    step = tutti.parallelize(model, trainers.adamw(model), first, loss=workload.loss, level=level,
                             clip_norm=trainers.CLIP_NORM, fp32_master_weights=True)  # fmt: skip
    batches = itertools.chain([first], batches)
    trainers.pass_turns(turns, lambda: step(next(batches)), flops=step.flops)


def in_a_loop(turns: harness.Turns, workload: Workload) -> None:
    score = torch.compile(workload.score)

    def autocast(model: torch.nn.Module, batch: Item) -> torch.Tensor:
        with torch.autocast(DEVICE.type, BF16):
            return score(model, batch)

    trainers.train_in_a_loop(turns, workload.model(), workload.batches(), autocast)


def with_trainer(turns: harness.Turns, workload: Workload) -> None:
    arguments = {"bf16": True, "torch_compile": True}
    trainers.train_with_trainer(turns, workload.model(), Samples(workload), workload.batch, arguments)


def measure(name: str, workload: Workload, levels: tuple[str, ...], rounds: int, steps: int) -> dict[str, Any]:
    harness.say(name)
    ours = [harness.Process(f"tutti {level}", with_tutti, workload, level) for level in levels]
    peers = [harness.Process("torch.compile", in_a_loop, workload)]
    if workload.loss is None:
        peers.append(harness.Process("Trainer, compiled", with_trainer, workload))
    contenders = [*ours, *peers]
    times = harness.take_turns(contenders, rounds, steps, together=GPU)
    for contender in contenders:
        contender.close()
    losses = {contender.name: contender.facts["first_loss"] for contender in contenders}
    if max(losses.values()) - min(losses.values()) > 0.02 * max(losses.values()):
        raise RuntimeError(f"the contenders do not train the same model: first losses {losses}")
    flops, peak = ours[0].facts["flops"], local(1).device.peak.get("bfloat16")
    count = workload.batch * workload.per_item
    rows = {}
    for contender in contenders:
        seconds = harness.summary(times[contender.name])
        rows[contender.name] = {
            f"{workload.unit}_per_second": count / seconds["median"],
            "flops_share": flops / seconds["median"] / peak if peak else None,
            "seconds_per_step": seconds,
            **{key: value for key, value in contender.facts.items() if key != "flops"},
        }
    best = harness.ratio(times, [c.name for c in ours], [c.name for c in peers])
    harness.say(f"{name}: {best['ours']} is {best['times_faster']:.2f} x as fast as {best['peer']}")
    return {"flops": flops, "contenders": rows, "ratio": best}


def run(quick: bool, only: str | None) -> dict[str, Any]:
    """only: one of the models of full size; what is small is run whole."""
    small = quick or not GPU
    workloads, levels, rounds, steps = (SMALL, LEVELS, 2, 2) if small else (FULL, LEVELS[-1:], ROUNDS, STEPS)
    if only in workloads:
        workloads = {only: workloads[only]}
    models = {name: measure(name, workload, levels, rounds, steps) for name, workload in workloads.items()}
    if not small and only is None:
        draw(models)
    return {"models": models}


def draw(models: dict[str, Any]) -> None:
    figure = Figure((11, 6), layout="constrained")
    for axes, (name, figures) in zip(figure.subplots(2, 3).flat, models.items(), strict=False):
        rows = figures["contenders"]
        unit = next(key for key in next(iter(rows.values())) if key.endswith("_per_second"))
        axes.barh(list(rows), [row[unit] for row in rows.values()])
        axes.set(title=name, xlabel=unit.replace("_per_second", "/s"))
    figure.savefig(harness.RESULTS / "gpu-train.svg")


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers", "diffusers"), cases=[*FULL])

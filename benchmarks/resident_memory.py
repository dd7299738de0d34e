"""Resident memory of real runs against the prediction and plain PyTorch: a Llama, a ViT, a T5 and a ResNet, in one
process and as ZeRO-3 on two.

Each run builds its model and trains a few steps operator by operator. What a
process had before, Python, torch and the process group, does not count.

- `setup`: the largest resident memory of a rank until the step is made; `steps`: afterwards.
- `ratio`: `steps` over the predicted peak.
- `over_plain`: in one process, the larger of both over that of a loop of plain PyTorch.

Peaks are the kernel's: VmHWM of /proc/self/status, reset before each phase (Linux).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import transformers

import harness
import tutti
from gloo import Pool

STEPS = 4
TEXT, LENGTH = 8, 256
IMAGES = 16


def llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """70 million parameters."""
    config = transformers.LlamaConfig(
        hidden_size=640, num_hidden_layers=10, num_attention_heads=10, intermediate_size=1728, vocab_size=16384
    )
    ids = torch.randint(config.vocab_size, (TEXT, LENGTH))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def vit() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """ViT-B/16, 86 million parameters."""
    config = transformers.ViTConfig(num_labels=1000)
    batch = {"pixel_values": torch.randn(IMAGES, 3, 224, 224), "labels": torch.randint(1000, (IMAGES,))}
    return transformers.ViTForImageClassification(config), batch


def t5() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """T5-small, 60 million parameters."""
    ids = torch.randint(32128, (TEXT, LENGTH))
    return transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0)), {
        "input_ids": ids,
        "labels": ids.clone(),
    }


def resnet() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """ResNet-50, 26 million parameters."""
    config = transformers.ResNetConfig(num_labels=1000)
    batch = {"pixel_values": torch.randn(IMAGES, 3, 224, 224), "labels": torch.randint(1000, (IMAGES,))}
    return transformers.ResNetForImageClassification(config), batch


MODELS = {"llama": llama, "vit": vit, "t5": t5, "resnet": resnet}


def resident(field: str) -> int:
    """Bytes that /proc/self/status says: `VmRSS` now, `VmHWM` at most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(name: str, plan: str, processes: int) -> dict[str, int]:
    """Bytes of this rank."""
    torch.manual_seed(0)
    warm(processes)
    before = resident("VmRSS")
    reset()
    model, batch = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = tutti.parallelize(model, optimizer, batch, cluster=f"cpu:{processes}", plan=plan, level="O0")
    setup = resident("VmHWM") - before
    reset()
    for _ in range(STEPS):
        step(batch)
    return {"predicted": step.plan.predicted.peak_bytes, "setup": setup, "steps": resident("VmHWM") - before}


def plain(name: str) -> dict[str, int]:
    """Bytes of an ordinary training loop."""
    torch.manual_seed(0)
    warm(1)
    before = resident("VmRSS")
    reset()
    model, batch = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    setup = resident("VmHWM") - before
    reset()
    for _ in range(STEPS):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"setup": setup, "steps": resident("VmHWM") - before}


def warm(processes: int) -> None:
    """Load what any first step loads: libraries, and the process group with its buffers."""
    layer, x = torch.nn.Linear(8, 8), torch.randn(8, 8)
    step = tutti.parallelize(
        layer, torch.optim.AdamW(layer.parameters()), (x,), loss=lambda m, b: m(*b).square().mean(),
        cluster=f"cpu:{processes}", plan="zero3" if processes > 1 else "single", level="O0",
    )  # fmt: skip
    step((x,))


def run(quick: bool) -> dict[str, Any]:
    rows = []
    for name in list(MODELS)[: 1 if quick else None]:
        for plan, processes in (("single", 1), ("zero3", 2)):
            pool = Pool(processes)
            ranks = pool.run(measure, name, plan, processes)
            pool.close()
            fullest = max(ranks, key=lambda rank: rank["steps"])
            ratio = round(fullest["steps"] / fullest["predicted"], 3)
            rows.append({"model": name, "plan": plan, "processes": processes, **fullest, "ratio": ratio})
            if processes == 1:
                pool = Pool(1)
                (loop,) = pool.run(plain, name)
                pool.close()
                over = max(fullest["setup"], fullest["steps"]) / max(loop.values())
                rows[-1] |= {"plain_setup": loop["setup"], "plain_steps": loop["steps"], "over_plain": round(over, 3)}
                harness.say(f"{name:6} plain PyTorch: {loop['steps'] / 2**20:7.0f} MiB in steps, "
                            f"{loop['setup'] / 2**20:7.0f} in setup; {over:.2f} of it")  # fmt: skip
            harness.say(f"{name:6} {plan:7} on {processes}: {fullest['steps'] / 2**20:7.0f} MiB in steps, "
                        f"{fullest['setup'] / 2**20:7.0f} in setup, predicted {fullest['predicted'] / 2**20:7.0f}: "
                        f"{ratio:.2f} of it")  # fmt: skip
    return {"rows": rows}


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))

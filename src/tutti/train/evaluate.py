"""The verb `tutti eval`: the loss of a model on held-out text."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from tutti.data.loader import batch_at, held_out_batches
from tutti.data.packing import Packed
from tutti.train.configfile import from_table
from tutti.train.generate import load_model, model_folder
from tutti.train.prepare import prepare
from tutti.train.progress import Display


@dataclass(frozen=True)
class Score:
    """Mean loss in nats per predicted token, and the same per byte of text."""

    loss: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}  perplexity {self.perplexity:.2f}  {self.bits_per_byte:.3f} bits a byte"
            f"  ({self.tokens:,} tokens of held-out text)"
        )


def evaluate(run: Annotated[str, tyro.conf.Positional], batches: int | None = None) -> None:
    """Print loss, perplexity and bits per byte of a run's newest checkpoint on its held-out text.

    Args:
        run: Folder of a run (the `out` of its config).
        batches: Evaluate this many batches, evenly spaced in the text. Default: all.
    """
    file = Path(run) / "run.json"
    if not file.exists():
        raise ValueError(f"no {file}; give the folder of a run (the `out` of its config)")
    config = from_table(json.loads(file.read_text())["config"], str(file))
    display, folder = Display(), model_folder(run)
    prepared = prepare(config, display)
    size, seq = config.batch.size, config.batch.seq
    with display.stage("evaluate") as stage:
        stage.result(str(score(folder, prepared.held_out, size, seq, batches, stage.update)))


@torch.no_grad()
def score(
    folder: Path,
    text: Packed,
    batch: int,
    seq: int,
    batches: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """The score of a model in a folder, computed in float32 on a CPU, on windows of `seq` tokens."""
    model = load_model(folder)
    row = text.open()
    windows = held_out_batches(row, batch, seq, batches)
    total = 0.0
    for done, starts in enumerate(windows):
        inputs = {name: ids.to(model.device) for name, ids in batch_at(row, starts, seq).items()}
        total += model(**inputs).loss.item()
        progress(done + 1, len(windows))
    loss = total / len(windows)
    bits_per_byte = loss / math.log(2) * text.tokens / text.text_bytes
    return Score(loss, bits_per_byte, len(windows) * batch * (seq - 1))

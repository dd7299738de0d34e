"""The verb `tutti eval`: the loss of a run on held-out text, and scores of a model on a file or on lm-eval's tasks."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from tutti.checkpoint.model import load_model, model_folder
from tutti.data.loader import batch_at, held_out_batches
from tutti.data.packing import Packed
from tutti.progress import Count, silent
from tutti.train.configfile import from_table
from tutti.train.text.prepare import prepare
from tutti.train.text.progress import Display
from tutti.train.values import NamedValues


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


def evaluate(
    run: Annotated[str, tyro.conf.Positional],
    batches: int | None = None,
    task: str | None = None,
    data: str | None = None,
    metrics: str | None = None,
    harness: str | None = None,
    tasks_from: str | None = None,
    few_shot: int | None = None,
    batch: int = 8,
    length: int | None = None,
    cluster: str = "auto",
    plan: str = "auto",
) -> None:
    """Print scores of a model: by default loss, perplexity and bits per byte of a run on its held-out text.

    Args:
        run: Folder of a run (the `out` of its config); with --task or --harness also of a saved model.
        batches: Evaluate this many batches of held-out text, evenly spaced in it. Default: all.
        task: Score rows of this task, such as sequence-classification or seq2seq, from the file of --data.
        data: File or folder of rows.
        metrics: Scores of the task, such as accuracy,f1,f1_macro,perplexity,bleu,rouge. Default: those of the task.
        harness: Tasks of lm-eval, separated by commas.
        tasks_from: Folder of lm-eval's task files. Default: those that lm-eval comes with.
        few_shot: Examples in front of each question of lm-eval. Default: as its task says.
        batch: Rows computed together, with --task or --harness.
        length: Longest sequence in tokens, with --task or --harness.
        cluster: Devices, as in `cpu:2`, with --task or --harness. Default: the processes of this job.
        plan: How the model is distributed, with --task or --harness.
    """
    if harness is not None:
        _print(_harness(run, harness, tasks_from, few_shot, batch, length, cluster, plan))
        return
    if task is not None:
        if data is None:
            raise ValueError("--task needs --data, the file of rows to score")
        from tutti.train.scores import score_folder

        options: NamedValues = {} if length is None else {"length": length}
        names = None if metrics is None else [name.strip() for name in metrics.split(",") if name.strip()]
        scores = score_folder(model_folder(run), task, data, names, batch=batch, cluster=cluster, plan=plan, **options)
        _print({task: scores})
        return
    if data is not None or metrics is not None:
        raise ValueError("--data and --metrics need --task, which says what rows are")
    file = Path(run) / "run.json"
    if not file.exists():
        raise ValueError(f"no {file}; give the folder of a run (the `out` of its config)")
    config = from_table(json.loads(file.read_text())["config"], str(file))
    display, folder = Display(), model_folder(run)
    prepared = prepare(config, display)
    size, seq = config.batch.size, config.batch.seq
    with display.stage("evaluate") as stage:
        stage.result(str(score(folder, prepared.held_out, size, seq, batches, stage.update)))


def _harness(run: str, names: str, tasks_from: str | None, few_shot: int | None, batch: int, length: int | None,
             cluster: str, plan: str) -> dict[str, dict[str, float]]:  # fmt: skip
    from tutti.train.scores.harness import run_harness

    tasks = [name.strip() for name in names.split(",") if name.strip()]
    options = {"batch": batch, "length": length, "cluster": cluster, "plan": plan}
    return run_harness(model_folder(run), tasks, tasks_from, few_shot, **options)


def _print(scores: dict[str, dict[str, float]]) -> None:
    for task, values in scores.items():
        print(task)
        for name, value in values.items():
            print(f"  {name:24}  {value:.4f}")


@torch.no_grad()
def score(
    folder: Path,
    text: Packed,
    batch: int,
    seq: int,
    batches: int | None = None,
    progress: Count = silent,
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

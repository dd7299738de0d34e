"""What the runs share: options, training that resumes, results in JSON, and pictures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import tutti


def options(description: str | None, out: str, argv: list[str] | None = None, *,
            training: bool = True) -> argparse.Namespace:  # fmt: skip
    """`out` and `quick` from the command line, with `training` also `cluster` and `plan`.

    A quick run has a folder of its own, `out`-quick.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out),
                        help=f"folder of models, results.json and picture.png, default {out}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="sizes so small that the run takes seconds; the "
                        "results are in OUT-quick")  # fmt: skip
    if training:
        parser.add_argument("--cluster", default="auto", help="devices, such as cpu:2; default: those of this job")
        parser.add_argument("--plan", default="auto", help="how to distribute training, such as dp2")
    run = parser.parse_args(argv)
    if run.quick:
        run.out = Path(f"{run.out}-quick")
    return run


def arguments(run: argparse.Namespace, name: str, steps: int, rate: float, batch: int,
              **more: Any) -> tutti.TrainingArguments:  # fmt: skip
    """Options of a training in the folder `name`, with a checkpoint every fifth of it."""
    given: dict[str, Any] = {
        "max_steps": steps, "learning_rate": rate, "per_device_train_batch_size": batch, "warmup_steps": steps // 20,
        "lr_scheduler_type": "cosine", "save_steps": max(4, steps // 5), "save_total_limit": 1,
        "logging_steps": max(1, min(20, steps // 4)),
        "report_to": "none", "disable_tqdm": True, "level": "O0", "cluster": run.cluster, "plan": run.plan,
        "use_cpu": not torch.cuda.is_available(),
    }  # fmt: skip
    return tutti.TrainingArguments(str(run.out / name), **(given | more))


def train(trainer: tutti.Trainer) -> list[tuple[int, float]]:
    """Train from the newest checkpoint, if there is one. Returns (step, loss) of the whole training.

    A training that has ended is not started again: the model gets the values of its last checkpoint.
    """
    folders = {int(x.name.partition("-")[2]): x for x in Path(trainer.args.output_dir).glob("checkpoint-*")}
    last = max(folders, default=0)
    if last < trainer.args.max_steps:
        trainer.train(resume_from_checkpoint=last > 0)
        history = trainer.state.log_history
    else:
        trainer.model.load_state_dict(load_file(folders[last] / "model.safetensors"), strict=False)  # but tied weights
        history = json.loads((folders[last] / "trainer_state.json").read_text())["log_history"]
    return [(line["step"], line["loss"]) for line in history if "loss" in line]


class Results:
    """Results by name in `results.json`. What is there from an earlier call is not measured again."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "results.json"
        self.values: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The result of that name, measured if it is missing."""
        if name not in self.values:
            self.values[name] = measure()
            self.file.write_text(json.dumps(self.values, indent=1))
        return self.values[name]

    def show(self, *names: str) -> None:
        """Print results."""
        for name in names:
            print(f"{name}: {json.dumps(self.values[name])}")


def picture(folder: Path, panels: dict[str, Callable[[Any], None]], note: str = "") -> None:
    """Draw panels side by side into `picture.png` under `note`: title -> a function that draws on matplotlib axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, draw) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        draw(axes)
        axes.set_title(title)
    figure.suptitle(note)
    figure.savefig(folder / "picture.png", dpi=100)
    print(f"wrote {folder}: results.json, picture.png")


def image(values: Any, length: tuple[float, float], unit: str, label: str, **limits: float) -> Callable[[Any], None]:
    """Draw values (x, y), given as lists, on a rectangle of `length` with a colour bar."""

    def draw(axes: Any) -> None:
        columns = [list(x) for x in zip(*values, strict=True)]
        shown = axes.imshow(columns, origin="lower", extent=(0, length[0], 0, length[1]), **limits)
        axes.figure.colorbar(shown, ax=axes, label=label)
        axes.set(xlabel=f"x in {unit}", ylabel=f"y in {unit}")

    return draw


def curve(axes: Any, series: dict[str, list[tuple[int, float]]]) -> None:
    """Losses over steps."""
    for name, points in series.items():
        axes.plot([x for x, _ in points], [y for _, y in points], label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()

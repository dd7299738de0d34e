"""The verb `tutti train`: prepare the text, start the processes, and report when training is done."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.launch.launch import launch, rank, under_launcher
from tutti.train import taskrun
from tutti.train.configfile import parse
from tutti.train.taskrun import TaskRun
from tutti.train.text.config import Config, changes, is_fixed

if TYPE_CHECKING:
    from tutti.train.text.progress import Display

RUN = "run.json"


def train(argv: list[str]) -> None:
    """Train from a config file: `tutti train [FILE.toml] [--section.key value ...]`.

    The same command resumes an interrupted run. A finished run is left alone. A config that names a `task` trains on
    rows of any kind (`tutti.train.taskrun`).
    """
    config = parse(argv)
    if isinstance(config, TaskRun):
        return taskrun.run(config, argv[0])
    # Measuring memory makes the profiler talk. This has to be set before torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if rank() == 0:
        print(f"training in {config.out}", flush=True)  # imports take seconds
    run(config)


def run(config: Config) -> None:
    """Prepare, train, report. Every rank of a job may call it."""
    from tutti.checkpoint.folder import CHECKPOINTS, find_fault, folders, step_of
    from tutti.train.text import run as training
    from tutti.train.text.finish import finish
    from tutti.train.text.model import check_model
    from tutti.train.text.prepare import prepare
    from tutti.train.text.progress import Display

    check_model(config.model, config.tokenizer.vocab_size, config.batch.seq)  # before anything is written
    folder, display = Path(config.out), Display(silent=rank() > 0)
    prepared = prepare(config, display)
    if rank() == 0:
        _check_same_run(folder, config, prepared.key, display)
    newest = next(iter(folders(folder / CHECKPOINTS)), None)
    if newest and step_of(newest) >= config.schedule.steps and find_fault(newest) is None:
        display.say(f"all {config.schedule.steps} steps are done; more need a larger schedule.steps")
    elif under_launcher() or config.parallel.processes == 1:
        training.train(config, prepared)
    else:
        _calibrate(config, display)
        display.say(f"starting {config.parallel.processes} processes")
        launch(training.train, config.parallel.processes, config, prepared, restarts=config.parallel.restarts)
    if rank() == 0:
        finish(config, display)


def _calibrate(config: Config, display: Display) -> None:
    """Calibrate this machine, if it is not yet, before the training processes start."""
    from tutti.hardware import local

    with display.stage("cluster") as stage:
        cluster = local(config.parallel.processes)
        peak = cluster.device.peak
        rates = ", ".join(f"{peak[name] / 1e12:.2f} {name}" for name in ("float32", "bfloat16"))
        stage.result(f"{cluster}; TFLOP/s each: {rates}")


def _check_same_run(folder: Path, config: Config, text_key: str, display: Display) -> None:
    """Raise ValueError if the folder has a run of another model or text. Other changes are reported.

    A run without checkpoints starts over with the new options.
    """
    from tutti.checkpoint.folder import CHECKPOINTS
    from tutti.whole_files import write_text

    now = {"text": text_key, "config": json.loads(json.dumps(asdict(config)))}
    path = folder / RUN
    saved = path.exists() and any((folder / CHECKPOINTS).glob("step-*"))
    before = json.loads(path.read_text()) if saved else now
    changed = changes(before["config"], now["config"])
    if other := [text for key, text in changed.items() if is_fixed(key)]:
        raise ValueError(f"{folder} holds another run: {'; '.join(other)}; choose another --out")
    if before["text"] != text_key:
        raise ValueError(f"the files of {config.data.source} have changed since {folder} began; choose another --out")
    if changed:
        display.say("changed since the run began: " + "; ".join(changed.values()))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(now, indent=1), durable=True)

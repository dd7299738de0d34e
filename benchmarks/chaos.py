"""Chaos: runs of every part are killed, and their newest checkpoints damaged; each must end as if nothing had happened.

    python benchmarks/chaos.py [--quick]

Parts: `tutti.Trainer`, `tutti train` on text, a loop of one's own over `tutti.parallelize`, and `tutti rl train`. A run
goes through the same command or script again until it ends. Faults:

    kill     SIGKILL at a random moment, in a quarter of the trials a second time after the first restart
    torn     kill, then cut a random file of the newest checkpoint at a random length
    flipped  kill, then flip a random bit of a random file of the newest checkpoint
    missing  kill, then delete a random file of the newest checkpoint
    full     the disk is full from a random moment on (a file system in memory, filled up); then there is room again

A trial is right if the run ends by itself, all its losses and its final weights have the bits of the run that was left
alone, and the output names a damaged checkpoint, or the full disk. `full` needs the right to mount a file system.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import harness

FAULTS = ("kill", "torn", "flipped", "missing", "full")
PATIENCE = 300  # seconds: no run hangs
STEPS, EVERY = 24, 3
SPACE = 160 << 20  # bytes of the file system that fills up

# -- the four parts: each continues from its newest checkpoint ---------------------------------------------------------


def llama() -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))


def trainer(folder: Path) -> None:
    import torch
    import transformers

    import tutti

    class Slowly(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            time.sleep(0.03)

    rows = [{"input_ids": x, "labels": x} for x in torch.randint(0, 64, (40, 8), generator=torch.manual_seed(1))]
    args = tutti.TrainingArguments(str(folder), max_steps=STEPS, save_steps=EVERY, save_total_limit=3, logging_steps=1,
                                   per_device_train_batch_size=4, report_to="none", disable_tqdm=True, level="O0",
                                   use_cpu=True)  # fmt: skip
    trainer = tutti.Trainer(llama(), args, train_dataset=rows, callbacks=[Slowly()])
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    finish(folder, losses, trainer.model.state_dict())


def text(folder: Path) -> None:
    from tutti.cli import main
    from tutti.train.text import run
    from tutti.train.text.history import read, series

    run_step = run.Run.run_step

    def slowly(self: Any, batch: Any) -> Any:
        time.sleep(0.03)
        return run_step(self, batch)

    run.Run.run_step = slowly
    source = folder.parent / "corpus"
    line = ["--data.source", str(source), "--data.cache", str(folder.parent / "cache"), "--out", str(folder)]
    line += ["--data.held-out", "0.2", "--tokenizer.vocab-size", "300", "--batch.seq", "16", "--batch.size", "4"]
    line += ["--model.num-hidden-layers", "2", "--model.hidden-size", "32", "--model.num-attention-heads", "2"]
    line += [
        "--schedule.warmup",
        "2",
        "--schedule.steps",
        str(STEPS),
        "--checkpoint.every",
        str(EVERY),
    ]
    line += ["--eval.every", "12", "--eval.batches", "2", "--parallel.level", "O0", "--parallel.precision", "float32"]
    code = main(["train", *line, "--sample.tokens", "2"])
    if code:
        sys.exit(code)
    from safetensors.torch import load_file

    finish(folder, [float(x) for x in series(read(folder), "loss")[1]], load_file(folder / "model/model.safetensors"))


def loop(folder: Path) -> None:
    import torch

    import tutti

    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows = torch.randint(0, 64, (STEPS, 4, 8), generator=torch.manual_seed(1))
    step = tutti.parallelize(model, optimizer, {"input_ids": rows[0], "labels": rows[0]}, cluster="cpu:2", plan="zero2",
                             level="O0")  # fmt: skip
    checkpoints = tutti.Checkpoints(folder / "checkpoints", keep=3)
    if newest := checkpoints.latest(print):
        step.load(newest)
    with open(folder / "losses.jsonl", "a") as history:
        while step.steps < STEPS:
            batch = rows[step.steps]
            loss = step({"input_ids": batch, "labels": batch}).item()
            history.write(json.dumps([step.steps, loss]) + "\n")
            history.flush()
            if step.steps % EVERY == 0:
                step.save(checkpoints)
            time.sleep(0.03)
    checkpoints.wait()
    by_step: dict[int, set[float]] = {}
    for line in (folder / "losses.jsonl").read_text().splitlines():
        number, loss = json.loads(line)
        by_step.setdefault(number, set()).add(loss)
    finish(folder, [sorted(by_step[i]) for i in sorted(by_step)], step.state_dict())


def rl(folder: Path) -> None:
    from tutti.cli import main
    from tutti.rl.core.files import tensors

    config = folder.parent / f"{folder.name}.toml"
    sizes = {"n_envs": 8, "n_steps": 64, "batch_size": 128, "n_epochs": 2}
    keys = {"algorithm": '"PPO"', "env": '"CartPole-v1"', "steps": 12288, "checkpoint": 1024, "evaluate": 4096}
    lines = [f"{key} = {x}" for key, x in (keys | {"level": '"eager"'}).items()]
    config.write_text("\n".join([*lines, "[options]", *(f"{key} = {x}" for key, x in sizes.items())]) + "\n")
    code = main(["rl", "train", str(config), "--out", str(folder)])
    if code:
        sys.exit(code)
    finish(folder, json.loads((folder / "curve.json").read_text()), tensors(folder / "agent.safetensors"))


PARTS: dict[str, Callable[[Path], None]] = {"trainer": trainer, "text": text, "loop": loop, "rl": rl}


def finish(folder: Path, losses: Any, values: dict[str, Any]) -> None:
    """Write the losses and a digest of the values, which show that the run has ended."""
    import torch

    code = hashlib.sha256()
    for name in sorted(values):
        code.update(name.encode())
        if isinstance(values[name], torch.Tensor):
            code.update(values[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    (folder / "finished.json").write_text(json.dumps({"losses": losses, "values": code.hexdigest()}))


# -- faults ------------------------------------------------------------------------------------------------------------


def work(part: str, folder: str, log: str) -> None:
    """A process of a run."""
    os.environ["TUTTI_PLANS"] = "off"
    file = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import torch

    torch.set_num_threads(1)
    PARTS[part](Path(folder))


def start(part: str, folder: Path, log: Path) -> Any:
    context = multiprocessing.get_context("forkserver")
    modules = ["torch", "transformers", "tutti", "tutti.train.trainer.trainer", "tutti.rl", "tutti.cli"]
    context.set_forkserver_preload(modules)
    process = context.Process(target=work, args=(part, str(folder), str(log)))
    process.start()
    return process


def ended(process: Any) -> int:
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise RuntimeError("the run hangs")
    return process.exitcode


def checkpoints_of(folder: Path) -> list[Path]:
    """Checkpoints, oldest first: folders, or files of RL."""
    paths = [*folder.glob("checkpoint-*"), *folder.glob("checkpoints/step-*"), *folder.glob("steps-*.safetensors")]
    final = [x for x in [folder / "agent.safetensors"] if x.exists()]
    return [*sorted(paths, key=lambda x: int(x.stem.rpartition("-")[2])), *final]


def kill(process: Any, seconds: float) -> bool:
    """Whether the process was alive at that moment."""
    process.join(seconds)
    alive = process.exitcode is None
    if alive:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return alive


def damage(folder: Path, fault: str, draw: random.Random) -> str:
    """Damage a file of the newest checkpoint; its path, or "" if there is no earlier checkpoint to fall back to."""
    every = checkpoints_of(folder)
    if len(every) < 2:
        return ""
    newest = every[-1]
    files = sorted(x for x in newest.rglob("*") if x.is_file()) if newest.is_dir() else [newest]
    file = draw.choice([x for x in files if x.stat().st_size] if fault != "missing" else files)
    size = file.stat().st_size
    if fault == "torn":
        os.truncate(file, draw.randrange(size))
    elif fault == "flipped":
        with open(file, "r+b") as stream:
            place = draw.randrange(size)
            stream.seek(place)
            byte = stream.read(1)[0] ^ (1 << draw.randrange(8))
            stream.seek(place)
            stream.write(bytes([byte]))
    else:
        file.unlink()
    return str(file)


class FullDisk:
    """A file system in memory that can be filled up."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SPACE}", "tmpfs", folder], check=True)
        self.ballast = folder / "ballast"

    def fill(self, left: int) -> None:
        """Fill the disk up, beside a run that writes, to at most `left` bytes."""
        with open(self.ballast, "wb") as file:
            while (free := os.statvfs(self.folder)).f_bavail * free.f_frsize > max(left, 4096):
                with suppress(OSError):  # the run has been faster
                    os.posix_fallocate(
                        file.fileno(), os.fstat(file.fileno()).st_size, free.f_bavail * free.f_frsize - left
                    )

    def empty(self) -> None:
        self.ballast.unlink()

    def close(self) -> None:
        subprocess.run(["umount", self.folder], check=True)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        mount = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True)
        if not mount.returncode:
            subprocess.run(["umount", folder], check=True)
        return not mount.returncode


# -- trials ------------------------------------------------------------------------------------------------------------


def trial(part: str, fault: str, seed: int, root: Path, alone: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One run with a fault. alone: what the run left alone ended with, after so many seconds."""
    draw, place = random.Random(f"{part} {fault} {seed}"), root / f"{part}-{fault}-{seed}"
    disk = None
    if fault == "full":
        disk = FullDisk(place)
    else:
        place.mkdir()
    for name in ("corpus", "cache"):
        if (root / name).exists():
            shutil.copytree(root / name, place / name)
    folder, log = place / "run", root / f"{part}-{fault}-{seed}.log"
    folder.mkdir()
    row: dict[str, Any] = {"part": part, "fault": fault, "seed": seed}
    try:
        if disk:
            moment, left = draw.uniform(0.3, 0.9) * seconds, draw.choice([0, 1 << 12, 1 << 14, 1 << 16, 1 << 17])
            for _ in range(5):
                process = start(part, folder, log)
                process.join(moment)
                disk.fill(left)
                row["exit"] = ended(process)
                if row["exit"]:
                    (folder / "finished.json").unlink(missing_ok=True)  # the disk was full for it, too
                disk.empty()
                if named := "No space left" in log.read_text(errors="replace"):
                    break
                shutil.rmtree(folder)  # the run had ended before, or had room enough
                folder.mkdir()
                moment, left = 0.7 * moment, 0
        else:
            process = start(part, folder, log)
            row["alive"] = kill(process, draw.uniform(0.2, 0.95) * seconds)
            named = True
            if fault == "kill" and draw.random() < 0.25:
                kill(start(part, folder, log), draw.uniform(0.2, 0.9) * seconds)
            if fault != "kill":
                (folder / "finished.json").unlink(missing_ok=True)
                if file := damage(folder, fault, draw):
                    row["file"] = str(Path(file).relative_to(folder))
        if "file" in row:
            before = len(log.read_text(errors="replace"))
            row["exit"] = ended(start(part, folder, log))
            said = log.read_text(errors="replace")[before:]
            checkpoint = next(name for name in Path(row["file"]).parts if name != "checkpoints")
            named = Path(checkpoint).stem in said and ("damaged" in said or "skipped" in said)
            named |= (part, fault) == ("rl", "missing")  # whose checkpoints are one file each
        elif not (folder / "finished.json").exists():
            row["exit"] = ended(start(part, folder, log))
        result = json.loads((folder / "finished.json").read_text())
        equal = {name: result[name] == alone[name] for name in alone}
        row |= {"named": named, **equal, "right": named and all(equal.values())}
    except (RuntimeError, FileNotFoundError, json.JSONDecodeError) as error:
        row |= {"right": False, "error": str(error)}
    finally:
        if disk:
            disk.close()
    if row["right"]:
        shutil.rmtree(place, ignore_errors=True)
    else:
        row["said"] = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    return row


def corpus(folder: Path) -> None:
    folder.mkdir()
    draw = random.Random(0)
    for i in range(20):
        words = ("the", "a", "red", "blue", "cat", "dog", "runs", "sings", "tree", "house")
        (folder / f"{i}.py").write_text(" ".join(draw.choice(words) for _ in range(300)) + f" {i}\n")


def run(quick: bool) -> dict[str, Any]:
    trials = 1 if quick else 10
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    corpus(root / "corpus")
    faults = FAULTS if can_mount() else FAULTS[:-1]
    rows, alone = [], {}
    for part in PARTS:
        for name in ("first", "second"):  # the first also fills caches, such as that of tokens
            folder = root / name / "run" if part == "text" else root / part / name
            folder.mkdir(parents=True)
            if part == "text" and not (root / name / "corpus").exists():
                shutil.copytree(root / "corpus", root / name / "corpus")
            begin = time.perf_counter()
            code = ended(start(part, folder, root / f"{part}-{name}.log"))
            if code:
                raise RuntimeError((root / f"{part}-{name}.log").read_text()[-2000:])
            seconds, result = time.perf_counter() - begin, json.loads((folder / "finished.json").read_text())
            if name == "second" and result != alone[part]:
                raise RuntimeError(f"{part}: two runs that were left alone differ")
            alone[part] = result
            harness.say(f"{part} left alone: {seconds:.1f} s")
        for fault in faults:
            for seed in range(trials):
                rows.append(trial(part, fault, seed, root, alone[part], seconds))
                if not rows[-1]["right"]:
                    harness.say(f"WRONG: {rows[-1]}")
            mine = [row for row in rows if (row["part"], row["fault"]) == (part, fault)]
            harness.say(f"{part}, {fault}: {sum(row['right'] for row in mine)} of {len(mine)}")
    right = Counter((row["part"], row["fault"]) for row in rows if row["right"])
    every = Counter((row["part"], row["fault"]) for row in rows)
    if all(row["right"] for row in rows):
        shutil.rmtree(root)
    else:
        harness.say(f"what was left is in {root}")
    return {
        "table": [{"part": part, "fault": fault, "right": right[part, fault], "trials": count}
                  for (part, fault), count in every.items()],
        "right": sum(right.values()), "trials": len(rows), "left_out": [f for f in FAULTS if f not in faults],
        "damaged_files": Counter(Path(row["file"]).name.partition(".")[2] for row in rows if "file" in row),
        "wrong": [row for row in rows if not row["right"]],
    }  # fmt: skip


if __name__ == "__main__":
    harness.main(run, __file__)

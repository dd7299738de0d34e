"""From the start of Python to the first and tenth step and to the end of a run of a Trainer, with empty caches.

Each run is a process of its own (or two, started by torchrun) with an empty cache of compiled code. A BERT of four
layers is fine-tuned. The peer is `transformers.Trainer`, in the same number of processes. All seconds are wall time
from the start of the process, imports included; contenders take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

RUNS = {"short": (18, 1), "long": (150, 1), "longer": (400, 1), "short, two processes": (18, 2)}  # steps, processes
QUICK = {"short": (12, 1)}
CONTENDERS = ("transformers", "tutti auto", "tutti O2")
ROUNDS = 1
SCRIPT = """
import json, sys, time
start = float(sys.argv[4])
name, steps, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
import torch, transformers
from transformers import BertConfig, BertForSequenceClassification
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
model = BertForSequenceClassification(BertConfig(vocab_size=2000, hidden_size=256, num_hidden_layers=4,
                                                 num_attention_heads=4, intermediate_size=1024, num_labels=3))
draw = torch.Generator().manual_seed(0)
rows = [{"input_ids": torch.randint(0, 2000, (64,), generator=draw), "labels": i % 3} for i in range(16 * steps)]
times = {}
class Clock(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        times[state.global_step] = time.time() - start
options = dict(per_device_train_batch_size=16, max_steps=steps, report_to="none", disable_tqdm=True, use_cpu=True,
               save_strategy="no", logging_steps=steps)
if name == "transformers":
    kind, args = transformers.Trainer, transformers.TrainingArguments(out, **options)
else:
    import tutti
    kind, args = tutti.Trainer, tutti.TrainingArguments(out, level=name.split()[1], **options)
trainer = kind(model, args, train_dataset=rows, callbacks=[Clock()])
trainer.train()
if trainer.is_world_process_zero():
    changes = getattr(trainer, "step", None) and trainer.step._executables.level_changes()
    last = [x[-1][1] for x in (changes or {}).values()]
    print(json.dumps({"first": times[1], "tenth": times[10], "total": time.time() - start,
                      "loss": trainer.state.log_history[-1]["train_loss"], "ends_at": last[0] if last else ""}))
"""


def once(name: str, steps: int, processes: int) -> dict[str, Any]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "run.py")
        script.write_text(SCRIPT)
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache", "TUTTI_PLANS": "off"}
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
        arguments = [str(script), name, str(steps), f"{folder}/out", str(time.time())]
        done = subprocess.run([*launcher, *arguments], env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"first"')]
        if not lines:
            raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
        return json.loads(lines[-1])


def run(quick: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for kind, (steps, processes) in (QUICK if quick else RUNS).items():
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
        for turn in range(1 if quick else ROUNDS):
            for name in CONTENDERS[turn % 3 :] + CONTENDERS[: turn % 3]:
                rows[name].append(once(name, steps, processes))
                last = rows[name][-1]
                harness.say(f"{kind}: {name}: tenth step after {last['tenth']:.1f} s, end after {last['total']:.1f} s")
        losses = [row["loss"] for each in rows.values() for row in each]
        figures[kind] = {
            "steps": steps, "processes": processes,
            **{name: {key: statistics.median(row[key] for row in each) for key in ("first", "tenth", "total")}
               | {"runs": each} for name, each in rows.items()},
        }  # fmt: skip
        for key in ("first", "tenth", "total"):
            each = zip(rows["transformers"], rows["tutti auto"], strict=True)
            figures[kind][f"auto_times_faster_{key}"] = statistics.median(a[key] / b[key] for a, b in each)
        figures[kind]["largest_difference_of_mean_losses"] = max(losses) - min(losses)
    return {"case": "BERT, 4 layers of 256, batch 16 x 64 tokens a process, float32", "runs": figures}


if __name__ == "__main__":
    harness.main(run, __file__, ["transformers"])

"""Score a saved model on a file of rows, as `tutti eval FOLDER --task NAME --data FILE` does."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tutti.checkpoint.folder import is_step_checkpoint
from tutti.checkpoint.model import load_model
from tutti.data import open_source
from tutti.exec.stores.weights import check_weights
from tutti.models import register
from tutti.train.scores.compute import METRICS, OF_TEXT, compute_metrics
from tutti.train.scores.text import bleu, rouge
from tutti.train.tasks import Task, get_task
from tutti.train.tasks.language.seq2seq import Seq2Seq
from tutti.train.trainer.arguments import TrainingArguments
from tutti.train.trainer.trainer import Trainer
from tutti.train.values import Outputs, Processor, Rows

SHIFTS = {"causal-lm": 1, "fill-in-the-middle": 1}  # positions that a prediction stands before its label
OF_TOKENS = ("causal-lm", "fill-in-the-middle", "masked-lm", "span-corruption", "seq2seq")


def score_folder(
    folder: str | Path,
    task: str,
    data: Rows,
    metrics: Sequence[str] | None = None,
    *,
    batch: int = 8,
    cluster: str = "auto",
    plan: str = "auto",
    level: str = "O0",
    new_tokens: int = 128,
    **options: Any,
) -> dict[str, float]:
    """The loss and scores of a saved model, distributed by a plan.

        score_folder("out/model", "sequence-classification", "test.jsonl", ["accuracy", "f1"])

    folder: a model that was saved with its tokenizer or image processor; for causal models also a checkpoint of
        `tutti train`.
    task: a name of `tutti.train.tasks.TASKS`. options: options of the task, such as `length`.
    data: whatever `tutti.data.open_source` takes.
    metrics: names of `METRICS`, or of what the task's own `metrics` gives. None: all of the latter. For `bleu` and
        `rouge`, which need the task `seq2seq`, the model writes at most `new_tokens` tokens, one after another.

    Raises ValueError if a metric does not fit the task.
    """
    folder = Path(folder)
    register(folder)
    chosen = get_task(task, **options)
    model, processor = _model(folder, chosen), _processor(folder)
    wanted = list(metrics or ())
    if set(wanted) & set(OF_TEXT) and task != "seq2seq":
        raise ValueError(f"{' and '.join(OF_TEXT)} compare texts that a model wrote: they need the task 'seq2seq'")
    if "perplexity" in wanted and task not in OF_TOKENS:
        raise ValueError(f"perplexity is a score of models of text; {task} has {', '.join(METRICS[:3])}")
    rows = open_source(data)
    extra = [name for name in wanted if name in ("f1", "f1_macro")]
    rest = compute_metrics(extra) if extra and task not in OF_TOKENS else lambda prediction: {}
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out, per_device_eval_batch_size=batch, report_to="none", disable_tqdm=True, cluster=cluster, plan=plan,
            level=level, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trainer = Trainer(
            model, args, eval_dataset=rows, processing_class=processor, task=chosen,
            compute_metrics=lambda p: chosen.metrics(p) | rest(p),
            preprocess_logits_for_metrics=_best if task in OF_TOKENS else None,
        )  # fmt: skip
        evaluated = {k.removeprefix("eval_"): v for k, v in trainer.evaluate().items()}
    measured = {k: v for k, v in evaluated.items() if not k.startswith(("runtime", "samples_", "steps_", "epoch"))}
    if task in OF_TOKENS:
        measured["perplexity"] = math.exp(measured["loss"])
    if set(wanted) & set(OF_TEXT):
        assert isinstance(chosen, Seq2Seq)
        wanted_texts = [row[chosen.target] for row in rows]
        texts = written(model, processor, chosen, rows, batch, new_tokens), wanted_texts
        measured |= {"bleu": bleu(*texts)} if "bleu" in wanted else {}
        measured |= rouge(*texts) if "rouge" in wanted else {}
    if not wanted:
        return measured
    names = ["loss", *(x for name in wanted for x in (("rouge1", "rouge2", "rougeL") if name == "rouge" else (name,)))]
    if missing := [name for name in names[1:] if name not in measured]:
        raise ValueError(f"{task} has no metric {missing[0]!r}; it has {', '.join(measured)}")
    return {name: measured[name] for name in names if name in measured}


@torch.no_grad()
def written(model: Any, tokenizer: Processor, task: Seq2Seq, rows: Rows, batch: int, new_tokens: int) -> list[str]:
    """What an encoder-decoder writes, greedily, for the source of each row."""
    outputs: list[str] = []
    for begin in range(0, len(rows), batch):
        texts = [task.prefix + rows[i][task.source] for i in range(begin, min(begin + batch, len(rows)))]
        encoded = tokenizer(texts, return_tensors="pt", padding=True, truncation=task.length is not None,
                          max_length=task.length).to(model.device)  # fmt: skip
        ids = model.eval().generate(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"],
                                    max_new_tokens=new_tokens, do_sample=False, num_beams=1)  # fmt: skip
        outputs += [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
    return outputs


def _best(logits: Outputs, labels: object) -> Tensor:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def _model(folder: Path, task: Task) -> transformers.PreTrainedModel:
    if is_step_checkpoint(folder):
        return load_model(folder)
    if not task.model_class.startswith("Auto"):
        raise ValueError(f"{task.name} is not scored from a folder; use Trainer.evaluate with its model")
    check_weights(folder)
    return getattr(transformers, task.model_class).from_pretrained(folder, dtype=torch.float32)


def _processor(folder: Path) -> Processor:
    if (folder / "tokenizer_config.json").exists():
        return transformers.AutoTokenizer.from_pretrained(folder)
    if (folder / "preprocessor_config.json").exists():
        return transformers.AutoProcessor.from_pretrained(folder)
    raise ValueError(f"{folder} has no tokenizer and no image processor; save it with the model")

"""The end of a run: generate a sample, write the report, print where the results are."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from tutti.checkpoint.model import load_model, model_folder
from tutti.observe.diagnosis import MONITOR
from tutti.train.export import export
from tutti.train.text import history
from tutti.train.text.config import Config
from tutti.train.text.progress import Display
from tutti.train.text.report import write_report


def finish(config: Config, display: Display) -> None:
    """Generate the sample, write the report unless it exists, and print where the results are."""
    folder, sample = Path(config.out), Path(config.out, "sample.txt")
    newest, model = model_folder(folder), folder / "model"
    if not model.exists() or model.stat().st_mtime < newest.stat().st_mtime:
        with display.stage("model"):
            export(newest, model)
    if not sample.exists() or sample.stat().st_mtime < model.stat().st_mtime:
        asked = config.sample
        with display.stage("sample"):
            text = continue_text(model, asked.prompt, asked.tokens, asked.temperature, config.seed)
            sample.write_text(text)
    with display.stage("report"):
        report = write_report(folder, sample.read_text())
    held_out = history.series(history.read(folder), "held_out_loss")[1]
    display.say(f"\n{sample.read_text()}\n")
    part = f"on {config.eval.batches} batches; on all held-out text: tutti eval {folder}"
    display.say(f"held-out loss {held_out[-1]:.4f} after {config.schedule.steps} steps, {part}")
    for name, path in {
        "report": report,
        "model": model,
        "logs": folder / "tensorboard",
    }.items():
        display.say(f"{name:{11}} {path}")
    if (folder / MONITOR / "rank-0.jsonl").exists():
        display.say(f"speed       tutti diagnose {folder}")
    display.say(f"more text   tutti generate {folder} --prompt 'class '")


def continue_text(folder: Path, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The prompt with its continuation."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder, trust_remote_code=False), load_model(folder)
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    ids = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=tokens,
        use_cache=True,
        **choice,
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)

"""`tutti compress`: compress a model in a folder into another folder, or into a GGUF file."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console

from tutti.compress.folder import checked_folders
from tutti.compress.recipe import Distill, parse
from tutti.compress.verb import compress
from tutti.launch.launch import launch, rank, under_launcher
from tutti.launch.progress import LINE_EVERY, narrated

STDLIB = "stdlib"


def command(
    model: Annotated[Path, tyro.conf.Positional],
    out: Path,
    recipe: str = "int4",
    calibration: str = "",
    samples: int = 128,
    length: int = 512,
    training_samples: int = 2048,
    processes: int = 1,
) -> None:
    """Compress a model. Quantization and rotation go block by block: one is in memory at a time, and a run that is
    interrupted goes on.

    Args:
        model: The folder of a model of transformers.
        out: The folder of the compressed model, in the format compressed-tensors; or a file for llama.cpp whose name
            ends in .gguf. A model that is there is replaced.
        recipe: Such as int4, int4-g128-gptq, w8a8-smooth, rotate+int4-gptq, mixed-3.5-gptq, prune-2:4+int4-gptq or
            shrink-channels0.75+int3+distill-500; or a TOML file.
        calibration: A file with text, or `stdlib`: the source code of Python's library. For all but rtn and hqq.
        samples: Rows of calibration data.
        length: Tokens of a row.
        training_samples: Rows of data for distillation, which reads 8 in a step.
        processes: Processes that share the calibration data and the layers. For several machines: `tutti run -m tutti
            compress ...` on each, with a folder that all of them see.
    """
    steps = parse(recipe)
    if samples < 1 or length < 2:
        raise ValueError(f"{samples} rows of {length} tokens; expected at least 1 row of 2")
    if steps.calibrated and not calibration:
        raise ValueError(f"recipe {recipe} needs data: --calibration FILE, or --calibration {STDLIB}")
    if processes < 1:
        raise ValueError(f"--processes is {processes}; expected 1 or more")
    checked_folders(model, out)
    if processes > 1 and not under_launcher():
        launch(command, processes, model, out, recipe, calibration, samples, length, training_samples, processes)
        return
    console = Console(highlight=False, soft_wrap=True, quiet=rank() > 0)
    data = rows(model, calibration, samples, length) if steps.calibrated and calibration else None
    if calibration and not steps.calibrated:
        console.print(f"recipe {recipe} needs no data: --calibration is not read", markup=False)
    elif data is not None and len(data) < samples:
        console.print(f"{calibration} has {len(data)} rows of {length} tokens, of {samples} asked for", markup=False)
    training = None
    if steps.find(Distill):
        each = [x["input_ids"] for x in rows(model, calibration, training_samples, length)]
        training = [{"input_ids": torch.cat(each[i : i + 8])} for i in range(0, max(1, len(each) - 7), 8)]
    with narrated(console, "compressing", LINE_EVERY) as tell:
        try:
            compressed = compress(model, steps, data, out=out, training=training, progress=tell.count)
        except KeyboardInterrupt:
            if steps.block_by_block:
                console.print("the same command goes on from here", markup=False)
            raise
    console.print(str(compressed.report), markup=False)
    console.print(f"wrote {out}", markup=False)


def rows(model: Path, calibration: str, samples: int, length: int) -> list[dict[str, Any]]:
    """Calibration data: rows of tokens of a text. Raises ValueError if there are too few, or rows are too long."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ValueError(f"rows of {length} tokens; {model} was made for at most {longest}: give --length")
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokens: list[int] = []
    for text in texts(calibration):
        tokens += tokenizer(text, verbose=False)["input_ids"]
        if len(tokens) >= samples * length:
            break
    pieces = torch.tensor(tokens[: samples * length]).split(length)
    whole = [x for x in pieces if len(x) == length]
    if not whole:
        raise ValueError(f"{calibration} has {len(tokens)} tokens, less than one row of {length}: give more text, or "
                         "--length")  # fmt: skip
    return [{"input_ids": x.unsqueeze(0)} for x in whole]


def texts(calibration: str) -> Any:
    """The texts of a file, or of Python's library: every seventh module, so that all parts of it are seen."""
    if calibration == STDLIB:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = [x for x in sorted(library.rglob("*.py")) if "site-packages" not in x.parts and "test" not in x.parts]
        for path in files[::7]:
            yield path.read_text(errors="replace")
        return
    if not (path := Path(calibration)).is_file():
        raise ValueError(f"there is no file {path}; calibration is a file with text, or {STDLIB}")
    yield path.read_text(errors="replace")

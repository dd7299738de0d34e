"""A checkpoint as a model of `transformers`: its config, its weights as safetensors under its names, its tokenizer."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import logging as transformers_logging

from tutti.checkpoint import folder as folders
from tutti.checkpoint.reader import CheckpointReader
from tutti.exec.offload_store import OffloadStore
from tutti.exec.sharded_tensor import ShardedTensor
from tutti.plan.tier import DISK
from tutti.train.generate import model_folder
from tutti.train.progress import Display


def command(
    run: Annotated[Path, tyro.conf.Positional], out: Annotated[Path, tyro.conf.Positional], shard: str = "5GB"
) -> None:
    """Write the model of a checkpoint as `transformers` reads it: config, tokenizer, and weights as safetensors.

    Args:
        run: A checkpoint, or the folder of a run, whose newest one is taken.
        out: Folder that is made, or replaced where it holds a model.
        shard: The largest size of a file of weights, as in 500MB.
    """
    if out.exists() and any(out.iterdir()) and not (out / "config.json").exists():
        raise ValueError(f"{out} is there already, and holds no model: choose another folder")
    display = Display()
    with display.stage("export") as stage:
        if (run / folders.MANIFEST).exists():  # else the newest whole one is found
            folders.check(run)
        export(model_folder(run), out, shard)
        stage.result(str(out))


def export(checkpoint: Path, out: Path, shard: str = "5GB") -> None:
    """Write the model of a checkpoint, in files of at most `shard`; it is there when all of it is.

    Weights pass through files that are mapped, so that they need not fit into memory.
    """
    transformers_logging.disable_progress_bar()
    if not (checkpoint / "config.json").exists():
        raise ValueError(f"{checkpoint} has no config.json of transformers, as checkpoints of `tutti train` have")
    stored = CheckpointReader(checkpoint)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint, trust_remote_code=False))
    made = out.with_name(f".writing-{out.name}")
    shutil.rmtree(made, ignore_errors=True)
    offload_store, weights = OffloadStore(made), {}
    for name in model.state_dict():
        for kind in ("param", "buffer"):
            if (spec := stored.tensors.get(f"{kind}:{name}")) is not None:
                weights[name] = offload_store.take(spec, DISK)
                stored.load({f"{kind}:{name}": ShardedTensor.whole(weights[name])})
    model.to(dtype=next(iter(weights.values())).dtype).save_pretrained(made, state_dict=weights, max_shard_size=shard)
    for path in checkpoint.glob("*token*"):
        shutil.copy(path, made)
    shutil.rmtree(out, ignore_errors=True)
    made.rename(out)

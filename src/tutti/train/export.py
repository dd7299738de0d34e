"""Export a checkpoint as a transformers model: config, safetensors weights under its names, and tokenizer."""

import shutil
from pathlib import Path
from typing import Annotated

import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import logging as transformers_logging

from tutti.checkpoint import folder as folders
from tutti.checkpoint.folder import os_errors
from tutti.checkpoint.model import key_of, model_folder
from tutti.checkpoint.reader import CheckpointReader
from tutti.exec.stores.offload_store import OffloadStore
from tutti.exec.stores.sharded_tensor import ShardedTensor
from tutti.plan.tier import DISK
from tutti.train.text.progress import Display
from tutti.whole_files import whole_folder


def command(
    run: Annotated[Path, tyro.conf.Positional], out: Annotated[Path, tyro.conf.Positional], shard: str = "5GB"
) -> None:
    """Export the model of a checkpoint for transformers: config, tokenizer, and weights as safetensors.

    Args:
        run: A checkpoint, or the folder of a run: its newest checkpoint is exported.
        out: New folder, or the folder of a model to replace.
        shard: Maximum size of a file of weights, such as 500MB.
    """
    if out.exists() and any(out.iterdir()) and not (out / "config.json").exists():
        raise ValueError(f"{out} already exists and is not a model: choose another folder")
    display = Display()
    with display.stage("export") as stage:
        if (run / folders.MANIFEST).exists():  # else the newest complete checkpoint is found
            folders.check(run)
        export(model_folder(run), out, shard)
        stage.result(str(out))


@os_errors()
def export(checkpoint: Path, out: Path, shard: str = "5GB") -> None:
    """Export the model of a checkpoint, in files of at most `shard`. The folder appears when it is complete.

    Weights are written through memory-mapped files, so they need not fit into memory.
    """
    transformers_logging.disable_progress_bar()
    if not (checkpoint / "config.json").exists():
        raise ValueError(
            f"{checkpoint} has no transformers config.json; only checkpoints of `tutti train` can be exported"
        )
    stored = CheckpointReader(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint, trust_remote_code=False))
    with whole_folder(out) as draft:
        offload_store, weights = OffloadStore(draft), {}
        for name in model.state_dict():
            if (key := key_of(stored, name)) is not None:
                weights[name] = offload_store.take(stored.tensors[key], DISK)
                stored.load({key: ShardedTensor.whole(weights[name])})
        model.to(dtype=next(iter(weights.values())).dtype)
        model.save_pretrained(draft, state_dict=weights, max_shard_size=shard)
        for path in checkpoint.glob("*token*"):
            shutil.copy(path, draft)

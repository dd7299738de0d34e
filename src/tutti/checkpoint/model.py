"""Models of `transformers` in the folder of a run, in one of its checkpoints, or as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tutti.checkpoint.folder import CHECKPOINTS, is_step_checkpoint, latest
from tutti.checkpoint.reader import CheckpointReader
from tutti.exec.stores.sharded_tensor import ShardedTensor
from tutti.exec.stores.weights import check_weights
from tutti.tracing.optimizers.marks import EMA


def load_model(folder: Path) -> Any:
    """The model in a folder, ready for inference: on the GPU, or in float32 on the CPU."""
    from transformers import AutoConfig
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    if is_step_checkpoint(folder):
        model = stored_model(folder) if on_gpu else stored_model(folder).float()
    else:
        check_weights(folder)
        model_class = auto_class(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        model = model_class.from_pretrained(folder, dtype="auto" if on_gpu else torch.float32, trust_remote_code=False)
    return model.to("cuda" if on_gpu else "cpu").eval()


def auto_class(config: Any) -> Any:
    """The auto class of `transformers` for the generative model of a config.

    Raises ValueError if there is none.
    """
    import transformers as t

    if config.is_encoder_decoder:
        model_classes = t.AutoModelForSeq2SeqLM, t.AutoModelForSpeechSeq2Seq
    else:
        model_classes = t.AutoModelForImageTextToText, t.AutoModelForCausalLM
    for model_class in model_classes:
        if type(config) in model_class._model_mapping:
            return model_class
    raise ValueError(f"{type(config).__name__} is of a model that does not generate text")


def stored_model(folder: Path) -> Any:
    """The model in a checkpoint, with its own dtypes."""
    stored, model, tensors = CheckpointReader(folder), skeleton(folder), {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if (key := key_of(stored, name)) is not None:
            tensor.data = tensor.data.to(stored.tensors[key].dtype)
            tensors[key] = ShardedTensor.whole(tensor.data)
    stored.load(tensors)
    return model


def skeleton(folder: Path) -> Any:
    """The model of a checkpoint or of a transformers folder without its weights, in their dtypes.

    Its memory is not touched, so it takes none. Raises ValueError if a checkpoint lacks a parameter.
    """
    from transformers import AutoConfig, GenerationConfig
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with no_init_weights():
        model: Any = auto_class(config).from_config(config, dtype=config.dtype or torch.float32)
    model.tie_weights()
    if is_step_checkpoint(folder):
        stored = CheckpointReader(folder)
        for name, p in model.named_parameters():
            if (key := key_of(stored, name)) is None:
                raise ValueError(f"{folder} has no tensor 'param:{name}', which its config.json requires")
            p.data = p.data.to(stored.tensors[key].dtype)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def key_of(stored: CheckpointReader, name: str) -> str | None:
    """The tensor of a checkpoint that a model takes: the average of a parameter if there is one."""
    return next((key for kind in (EMA, "param", "buffer") if (key := f"{kind}:{name}") in stored.tensors), None)


def model_folder(run: str | Path) -> Path:
    """The newest complete checkpoint of a run, or the folder itself if it is a model."""
    folder = Path(run)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    if (folder / "config.json").exists():
        return folder
    newest = latest(folder / CHECKPOINTS, say=print) or latest(folder, say=print)
    if newest is None:
        raise ValueError(
            f"no complete checkpoint in {folder}; give the folder of a run (the `out` of its config), or of a model of "
            "transformers"
        )
    return newest

"""Load a model and a batch by name, on the meta device: from a transformers config or from a function."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutti.tracing.batch import Batch
from tutti.tracing.example import INSTEAD, example

ATTENTION = {"auto": {}, "eager": {"attn_implementation": "eager"}}  # options of a transformers model
EXPECTED = "give a folder with a transformers config.json, such a file, or package.module:function"


def load(
    source: str, batch: int, seq: int, dtype: torch.dtype = torch.bfloat16, attention: str = "auto"
) -> tuple[nn.Module, Batch]:
    """A model in training mode and an example batch. Neither takes memory.

    source: a folder with a transformers `config.json`, such a file, or `package.module:function`. The function takes no
        arguments and returns `(model, batch)`. It is called under `torch.device("meta")`; its batch and dtype are used
        as they are. The module is imported and the function is called, with a note on stderr.
    batch, seq: size of the example batch of a transformers model, with labels: tokens, images or spectrograms, see
        `tutti.tracing.example`.
    attention: implementation of attention of a transformers model. "auto" is its default, a fused kernel where it has
        one; "eager" keeps the scores in memory.

    Raises ValueError for other sources.
    """
    module, colon, function = source.rpartition(":")
    if attention not in ATTENTION:
        raise ValueError(f"unknown attention {attention!r}; expected one of {', '.join(ATTENTION)}")
    if colon and not Path(source).exists():
        if attention != "auto":
            raise ValueError(f"attention {attention!r} is for transformers models; choose it in {source}")
        return _from_function(module, function)
    config = config_of(source)
    if batch < 1 or seq < 2:
        raise ValueError(f"batch {batch}, seq {seq}: at least batch 1 and seq 2 are needed")
    model = _from_config(config, source, dtype, ATTENTION[attention]).train()
    return model, example(model, batch, seq)


def config_of(source: str, expected: str = EXPECTED) -> Any:
    """The config of a folder with a transformers `config.json`, or of such a file.

    Raises ValueError if there is none, which ends in what is `expected`.
    """
    import transformers

    path = Path(source)
    if not path.exists():
        raise ValueError(f"there is no model {source!r}: {expected}")
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise ValueError(f"no such file: {path}; {expected}")
    transformers.logging.set_verbosity_error()  # warnings about the config do not matter here
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a transformers config: {error}") from error


def _from_config(config: Any, source: str, dtype: torch.dtype, attention: dict[str, str]) -> nn.Module:
    """The model of the config's architecture, or a causal language model if it names none, on the meta device.

    Parameters have `dtype`; buffers have it where transformers casts them.
    """
    import transformers

    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0  # labels are shifted right by this token
    named = (config.architectures or [""])[0]
    make: Callable[..., nn.Module] = getattr(getattr(transformers, named, None), "_from_config", None) or (
        transformers.AutoModelForCausalLM.from_config
    )
    try:
        with torch.device("meta"):
            return make(config, dtype=dtype, **attention)
    except ValueError as error:
        raise ValueError(f"{source}: transformers cannot build this model ({error})") from error


@contextmanager
def suiting(model: nn.Module) -> Iterator[None]:
    """Turn errors of a transformers model with its example batch into one ValueError."""
    try:
        yield
    except Exception as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = isinstance(error, ValueError) and Path(__file__).parents[1] in raised_in.parents
        if ours or type(model).__module__.partition(".")[0] != "transformers":
            raise
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ValueError(
            f"{type(model).__name__} does not accept the generated batch ({message}): {INSTEAD}"
        ) from error


def _from_function(module: str, function: str) -> tuple[nn.Module, Batch]:
    print(f"importing {module} and running {function}", file=sys.stderr)
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module in the current folder, as with python -m
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {error.name!r} for {module}:{function}: {EXPECTED}") from None
    make = getattr(imported, function, None)
    if not callable(make):
        near = get_close_matches(function, [n for n in dir(imported) if callable(getattr(imported, n))], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"module {module} has no function {function!r}{hint}")
    with torch.device("meta"):
        result = make()
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise ValueError(f"{module}:{function} returned a {type(result).__name__}; it must return (model, batch)")
    return result

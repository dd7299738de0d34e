"""What engines in different processes send one another: JSON, and the bytes of tensors. Reading it runs no code.

A message is the length of its JSON (8 bytes, little-endian), the JSON, and the tensors' bytes one after the other:

    {"kind": "take_over", "value": ..., "tensors": [["bfloat16", [64, 2, 16]], ...]}

The kind says which type the value has. Dataclasses are objects with a key for each field, mappings are lists of pairs,
bytes are hexadecimal, and a tensor is its number among the tensors. What does not fit the type is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections import abc
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.serve.engine.engine import Carried
from tutti.serve.engine.request import Output
from tutti.serve.values import Json, JsonValue

KINDS: dict[str, object] = {
    "take_over": Carried,
    "cancel": tuple[str, str],
    "outputs": list[Output],
    "close": type(None),
}
LONGEST = 64 << 20  # bytes of the JSON
DTYPES = {str(x).removeprefix("torch."): x for x in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool)}  # fmt: skip
WORD = 8
DIMS, LARGEST = 8, 1 << 40  # of a tensor, and their size


def pack(kind: str, value: JsonValue) -> bytes:
    """A message. Raises ValueError for a value that it cannot hold."""
    tensors: list[Tensor] = []
    header = {"kind": kind, "value": _shown(value, KINDS[kind], tensors)}
    header["tensors"] = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors]
    try:
        text = json.dumps(header).encode()
    except TypeError as error:
        raise ValueError(f"the message {kind!r} has a value that JSON cannot hold: {error}") from error
    if len(text) > LONGEST:
        raise ValueError(f"the message {kind!r} has {len(text)} bytes of JSON; at most {LONGEST} are allowed")
    data = [x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data for x in tensors]
    return b"".join((len(text).to_bytes(WORD, "little"), text, *data))


def unpack(message: bytes, kinds: abc.Collection[str]) -> tuple[str, Any]:
    """The kind and value of a message. Raises ValueError for anything but a message of one of these kinds."""
    size = int.from_bytes(message[:WORD], "little")
    if len(message) < WORD or size > min(LONGEST, len(message) - WORD):
        raise ValueError(f"a message of {len(message)} bytes with {size} bytes of JSON")
    try:
        header = json.loads(message[WORD : WORD + size].decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a message that is not JSON: {error}") from error
    fields = {"kind", "value", "tensors"}
    if not isinstance(header, dict) or header.keys() != fields or header["kind"] not in tuple(kinds):
        raise ValueError(f"a message that is none of {sorted(kinds)}")
    try:
        tensors = _tensors(header["tensors"], memoryview(message)[WORD + size :])
        return header["kind"], _read(header["value"], KINDS[header["kind"]], tensors)
    except (RecursionError, TypeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"a message whose value is none of its kind ({type(error).__name__})") from error


def _tensors(entries: JsonValue, data: memoryview) -> list[Tensor]:
    tensors, at = [], 0
    for entry in _checked(entries, list):
        name, shape = _checked(entry, list, 2)
        sizes = len(_checked(shape, list)) <= DIMS and all(type(n) is int and 0 <= n <= LARGEST for n in shape)
        if name not in DTYPES or not sizes:
            raise ValueError(f"a tensor of {str(name)[:20]!r} and shape {str(shape)[:80]}")
        count = math.prod(shape)
        end = at + count * DTYPES[name].itemsize
        if end > len(data):
            raise ValueError(f"a message that ends within tensor {len(tensors)}")
        x = (
            torch.frombuffer(bytearray(data[at:end]), dtype=DTYPES[name])
            if count
            else torch.empty(0, dtype=DTYPES[name])
        )
        tensors.append(x.reshape(shape))
        at = end
    if at != len(data):
        raise ValueError(f"a message with {len(data) - at} bytes after its tensors")
    return tensors


def _checked(value: JsonValue, kind: type, count: int | None = None) -> Any:
    fits = type(value) is kind and (count is None or len(value) == count)
    if not fits:
        raise ValueError(f"{str(value)[:40]!r} in the place of {kind.__name__}")
    return value


def _parts(hint: object) -> tuple[Any, tuple]:
    """What a type is made of: `list[int]` of list and int."""
    return typing.get_origin(hint) or hint, typing.get_args(hint)


def _member(value: JsonValue, union: tuple) -> Any:
    """The type of a union that a value other than None has: text, or the one other."""
    return str if isinstance(value, str) and str in union else next(x for x in union if x not in (str, type(None)))


@cache
def _fields(kind: type) -> Json:
    """The fields that make a dataclass, with their types."""
    hints = typing.get_type_hints(kind)
    return {x.name: hints[x.name] for x in dataclasses.fields(kind) if x.init}


def _shown(value: JsonValue, hint: object, tensors: list[Tensor]) -> Any:
    """A value as JSON. Its tensors are appended to `tensors`."""
    kind, inner = _parts(hint)
    if kind in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _shown(value, _member(value, inner), tensors)
    if kind in (Tensor, np.ndarray):
        tensors.append(value if isinstance(value, Tensor) else torch.from_numpy(value))
        return len(tensors) - 1
    if kind is bytes:
        return value.hex()
    if dataclasses.is_dataclass(kind):
        return {name: _shown(getattr(value, name), x, tensors) for name, x in _fields(kind).items()}  # pyright: ignore
    if kind in (dict, abc.Mapping):
        return [[_shown(a, inner[0], tensors), _shown(b, inner[1], tensors)] for a, b in value.items()]
    if kind is tuple:
        return [_shown(x, one, tensors) for x, one in zip(value, inner, strict=True)]
    if kind in (list, abc.Sequence):
        return [_shown(x, inner[0], tensors) for x in value]
    if kind in (int, float, str):
        return kind(value)
    return value


def _read(value: JsonValue, hint: object, tensors: list[Tensor]) -> Any:
    """The value of a type that JSON stands for. Raises ValueError if it is none."""
    kind, inner = _parts(hint)
    if kind is Any:
        return value
    if kind in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _read(value, _member(value, inner), tensors)
    if kind in (Tensor, np.ndarray):
        if not 0 <= _checked(value, int) < len(tensors):
            raise ValueError(f"tensor {value} of {len(tensors)}")
        return tensors[value] if kind is Tensor else tensors[value].numpy()
    if kind is bytes:
        return bytes.fromhex(_checked(value, str))
    if dataclasses.is_dataclass(kind):
        fields = _fields(kind)  # pyright: ignore[reportArgumentType]
        if _checked(value, dict).keys() != fields.keys():
            raise ValueError(f"{kind.__name__} with the fields {str(sorted(value))[:80]}")  # pyright: ignore
        return kind(**{name: _read(value[name], x, tensors) for name, x in fields.items()})  # pyright: ignore
    if kind in (dict, abc.Mapping):
        pairs = [_checked(x, list, 2) for x in _checked(value, list)]
        return {_read(a, inner[0], tensors): _read(b, inner[1], tensors) for a, b in pairs}
    if kind is tuple:
        return tuple(_read(x, one, tensors) for x, one in zip(_checked(value, list, len(inner)), inner, strict=True))
    if kind in (list, abc.Sequence):
        return [_read(x, inner[0], tensors) for x in _checked(value, list)]
    if kind is float:
        return float(value if type(value) is int else _checked(value, float))
    return _checked(value, kind)

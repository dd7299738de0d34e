"""What to do to a model: a tuple of steps, written as a name, as TOML or in Python.

parse("int4")                         nearest rounding, groups of 64
parse("int4-g128-zeros-gptq")         scheme and method
parse("rotate+int3-g32-gptq")         steps in order
Recipe((Quantize(Scheme(4, 128), "awq", ignore=("lm_head", "*.down_proj")),))
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from tutti.nn.scheme import Scheme

Method = Literal["rtn", "gptq", "awq", "smooth", "hqq"]
METHODS: tuple[str, ...] = get_args(Method)
CALIBRATED = "gptq", "awq", "smooth"


@dataclass(frozen=True)
class Quantize:
    """Quantize the weights of linear layers, those of experts among them.

    scheme: of all layers but those in `overrides`. method: how codes are found: "rtn" (nearest), "gptq", "awq" (scales
        of channels are searched, then ranges), "smooth" (SmoothQuant, for int8 activations) or "hqq".
    layers, ignore: patterns of paths such as `*.down_proj` or `lm_head`. overrides: patterns and schemes; the first
        that matches holds, None: the layer is not quantized.
    embeddings: the scheme of the input embeddings, and of an output layer that is tied to them; None: they stay.
    damping: of GPTQ, as a share of the mean diagonal. order: whether GPTQ begins with the inputs that are largest.
    strength: of SmoothQuant, the share of the activations' ranges that moves into the weights.
    """

    scheme: Scheme = field(default_factory=Scheme)
    method: Method = "rtn"
    layers: tuple[str, ...] = ("*",)
    ignore: tuple[str, ...] = ("lm_head",)
    overrides: tuple[tuple[str, Scheme | None], ...] = ()
    embeddings: Scheme | None = None
    damping: float = 0.01
    order: bool = True
    strength: float = 0.5

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method {self.method!r}; expected one of {', '.join(METHODS)}")
        if not 0 <= self.strength <= 1 or not self.damping > 0:
            raise ValueError(f"strength {self.strength} and damping {self.damping}; expected 0 to 1, and more than 0")
        schemes = [self.scheme, *(x for _, x in self.overrides if x)]
        if self.method in ("gptq", "awq", "hqq") and any(x.kind == "float8" for x in schemes):
            raise ValueError(f"{self.method} rounds to integers: use float8 with rtn or smooth")

    @property
    def calibrated(self) -> bool:
        """Whether it needs data."""
        schemes = [self.scheme, *(x for _, x in self.overrides if x)]
        return self.method in CALIBRATED or any(x.activations == "int8-static" for x in schemes)


@dataclass(frozen=True)
class Rotate:
    """Rotate what blocks read and write by a random Hadamard matrix, which spreads outliers and changes no result.

    heads: whether the outputs of attention are rotated within each head, too. untie: whether an output layer that is
    tied to the embeddings may become a layer of its own, which a rotation needs. seed: of the signs.
    """

    heads: bool = True
    untie: bool = False
    seed: int = 0

    calibrated = False


Step = Quantize | Rotate
STEPS: dict[str, type] = {"quantize": Quantize, "rotate": Rotate}


@dataclass(frozen=True)
class Recipe:
    """Steps in order. Recipes are joined by `+`."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        kinds = [type(x) for x in self.steps]
        if not kinds:
            raise ValueError("a recipe needs at least one step")
        if kinds.count(Quantize) > 1:
            raise ValueError("a recipe quantizes once: give several schemes as `overrides` of one step")
        if Rotate in kinds and Quantize in kinds and kinds.index(Rotate) > kinds.index(Quantize):
            raise ValueError("a quantized model cannot be rotated: put rotate before")

    def __add__(self, other: Recipe) -> Recipe:
        return Recipe(self.steps + other.steps)

    @property
    def calibrated(self) -> bool:
        """Whether it needs data."""
        return any(x.calibrated for x in self.steps)

    def find(self, kind: type) -> Any:
        """The step of a kind, or None."""
        return next((x for x in self.steps if isinstance(x, kind)), None)


def parse(text: str) -> Recipe:
    """The recipe that a text such as `rotate+int4-g128-gptq` names, or the path of a TOML file.

    A step that quantizes is a scheme and options, joined by `-`: `int2` to `int8` or `float8`; `g32`, `g64`, ...
    or `channel` (groups; int8 has none by default); `zeros`; `a8` or `a8static` (int8 activations); `s16` (scales in
    float16); a method; `e8` or `e4` (embeddings in int8, or in int4 with groups of 32); `head` (the output layer, too).
    `w8a8` is `int8-a8`. Raises ValueError for what it does not know.
    """
    if text.endswith(".toml"):
        return from_toml(text)
    return Recipe(tuple(_step(x.strip()) for x in text.split("+")))


def _step(text: str) -> Step:
    if text in ("rotate", "rotate-untie"):
        return Rotate(untie=text.endswith("untie"))
    first, *options = text.split("-")
    scheme, options = _scheme(first, options)
    made: dict[str, Any] = {}
    for option in options:
        if option in METHODS:
            made["method"] = option
        elif option in ("e4", "e8"):
            made["embeddings"] = Scheme(4, 32, scales=scheme.scales) if option == "e4" else Scheme(8, None)
        elif option == "head":
            made["ignore"] = ()
        else:
            known = [*METHODS, "zeros", "channel", "a8", "a8static", "s16", "head", "e4", "e8", "g64"]
            near = get_close_matches(option, known, 1)
            remedy = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
            raise ValueError(f"{option!r} in recipe {text!r} is not known; {remedy}")
    return Quantize(scheme, **made)


def scheme(text: str) -> Scheme:
    """The scheme that a text such as `int4-g128-zeros` names."""
    first, *options = text.split("-")
    made, rest = _scheme(first, options)
    if rest:
        raise ValueError(f"{rest[0]!r} in scheme {text!r} is not known")
    return made


def _scheme(name: str, options: list[str]) -> tuple[Scheme, list[str]]:
    """A scheme, and the options that are not of schemes."""
    if name == "w8a8":
        name, options = "int8", ["a8", *options]
    match = re.fullmatch(r"int([2-8])", name)
    if not match and name != "float8":
        raise ValueError(f"{name!r} is not a step; expected int2 to int8, w8a8, float8 or rotate")
    bits = int(match[1]) if match else 8
    made, rest = Scheme(bits, 64 if bits < 8 else None, kind="int" if match else "float8"), []
    changed: dict[str, Any] = {}
    for option in options:
        if re.fullmatch(r"g\d+", option):
            changed["group"] = int(option[1:])
        elif option == "channel":
            changed["group"] = None
        elif option == "zeros":
            changed["symmetric"] = False
        elif option in ("a8", "a8static"):
            changed["activations"] = {"a8": "int8", "a8static": "int8-static"}[option]
        elif option == "s16":
            changed["scales"] = "float16"
        else:
            rest.append(option)
    return replace(made, **changed), rest


def from_toml(path: str | Path) -> Recipe:
    """The recipe of a file with a table `[[step]]` for each step.

    kind = "quantize", scheme = "int4-g128" and the fields of `Quantize`, where overrides = [["*.down_proj", "int8"]]
    and "keep" stands for None. Raises ValueError, naming the file.
    """
    try:
        found = tomllib.loads(Path(path).read_text())
        if list(found) != ["step"] or not isinstance(found["step"], list):
            raise ValueError(f"expected tables [[step]], not {', '.join(found) or 'nothing'}")
        return Recipe(tuple(map(_of_table, found["step"])))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _of_table(table: dict[str, Any]) -> Step:
    values = dict(table)
    kind = STEPS.get(name := values.pop("kind", "quantize"))
    if kind is None:
        raise ValueError(f"kind {name!r}; expected one of {', '.join(STEPS)}")
    known = [x.name for x in fields(kind)]
    for key, value in values.items():
        if key not in known:
            near = get_close_matches(key, known, 1)
            raise ValueError(f"{name} has no {key!r}; {f'did you mean {near[0]!r}?' if near else ', '.join(known)}")
        if key in ("scheme", "embeddings"):
            values[key] = scheme(value)
        elif key == "overrides":
            values[key] = tuple((x, None if y == "keep" else scheme(y)) for x, y in value)
        elif isinstance(value, list):
            values[key] = tuple(value)
    return kind(**values)

"""What to do to a model: a tuple of steps, written as a name, as TOML or in Python.

parse("int4")                         nearest rounding, groups of 64
parse("int4-g128-zeros-gptq")         scheme and method
parse("rotate+int3-g32-gptq")         steps in order
Recipe((Quantize(Scheme(4, 128), "awq", ignore=("lm_head", "*.down_proj")),))
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from tutti.nn.quantized.scheme import BITS, Scheme

Method = Literal["rtn", "gptq", "awq", "smooth", "hqq"]
METHODS: tuple[str, ...] = get_args(Method)
CALIBRATED = "gptq", "awq", "smooth"
PRUNED = "magnitude", "wanda", "sparsegpt"
SHORT_SCALES: dict[str, Any] = {"s16": "float16", "s8": "int8"}


@dataclass(frozen=True)
class Quantize:
    """Quantize the weights of linear layers, those of experts among them.

    scheme: scheme of all layers but those in `overrides`. method: how codes are found: "rtn" (nearest), "gptq", "awq"
        (scales of channels are searched, then ranges), "smooth" (SmoothQuant, for int8 activations) or "hqq".
    layers, ignore: patterns of paths such as `*.down_proj` or `lm_head`. overrides: patterns and schemes; the first
        that matches holds, None: the layer is not quantized.
    embeddings: the scheme of the input embeddings, and of an output layer that is tied to them; None: they stay.
    damping: damping of GPTQ, as a share of the mean diagonal. order: whether GPTQ begins with the inputs that are
        largest.
    strength: strength of SmoothQuant, the share of the activations' ranges that moves into the weights.
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
        if (self.damping != 0.01 or not self.order) and self.method != "gptq":
            raise ValueError(f"damping and order are of gptq, and do nothing for {self.method}")
        if self.strength != 0.5 and self.method != "smooth":
            raise ValueError(f"strength is of smooth, and does nothing for {self.method}")
        schemes = self.schemes
        if self.method in ("gptq", "awq", "hqq") and any(x.kind == "float8" for x in schemes):
            raise ValueError(f"{self.method} rounds to integers: use float8 with rtn or smooth")
        if self.method == "hqq" and (few := [x.kind for x in schemes if x.kind in ("ternary", "binary")]):
            raise ValueError(f"hqq does not know {few[0]} weights: use rtn, awq or gptq, and distill")
        if self.embeddings and self.embeddings.activations:
            raise ValueError("embeddings have no activations to round: give their scheme without")

    @property
    def schemes(self) -> list[Scheme]:
        """The schemes of layers."""
        return [self.scheme, *(x for _, x in self.overrides if x)]

    @property
    def calibrated(self) -> bool:
        """Whether it needs data."""
        return self.method in CALIBRATED or any(x.activations == "int8-static" for x in self.schemes)


@dataclass(frozen=True)
class Mixed:
    """Quantize each layer with the scheme that is best for a size of the whole (`compress.mixed`).

    bits: bits per weight of these layers, scales and zeros included. size: in its place, bytes of all tensors of the
    file.
    latency: in its place, seconds of all linear layers for a decoded token, by the planner's model of a device of
    `cluster`, which is a name as for plans or the file of a calibration.
    schemes: schemes to choose from. shares: fractions of numbers that stay, for layers that may have a lower rank as
    well as each scheme. multiple: number that ranks are multiples of. The rest is as for `Quantize`.
    """

    bits: float = 3.0
    schemes: tuple[Scheme, ...] = (Scheme(2, 32), Scheme(3, 64), Scheme(4, 64), Scheme(8, None))
    method: Method = "gptq"
    ignore: tuple[str, ...] = ("lm_head",)
    embeddings: Scheme | None = None
    size: float = 0
    latency: float = 0
    cluster: str = "cpu:1"
    shares: tuple[float, ...] = ()
    multiple: int = 64

    calibrated = True

    def __post_init__(self) -> None:
        if len(self.schemes) < 2 or not self.bits > 0:
            raise ValueError(f"{self}: expected at least two schemes, and a positive number of bits")
        if self.size < 0 or self.latency < 0 or (self.bits != 3.0) + (self.size > 0) + (self.latency > 0) > 1:
            raise ValueError("a search has one target, which is positive: bits, size or latency")
        for share in self.shares:
            LowRank(share, self.multiple)


@dataclass(frozen=True)
class Rotate:
    """Rotate what blocks read and write by a random Hadamard matrix, which spreads outliers and changes no result.

    heads: whether the outputs of attention are rotated within each head, too. untie: whether an output layer that is
    tied to the embeddings may become a layer of its own, which a rotation needs. seed: random seed of the signs.
    """

    heads: bool = True
    untie: bool = False
    seed: int = 0

    calibrated = False


@dataclass(frozen=True)
class Prune:
    """Set weights of linear layers to zero (`compress.methods.sparsity`).

    sparsity: share of each output's weights that become zero. pattern: in its place, "2:4" leaves 2 of each 4 inputs.
    method: "magnitude", "wanda" or "sparsegpt". layers, ignore: as for `Quantize`. damping: damping of sparsegpt, as a
    share of the mean diagonal.
    """

    sparsity: float = 0.5
    pattern: str = ""
    method: Literal["magnitude", "wanda", "sparsegpt"] = "sparsegpt"
    layers: tuple[str, ...] = ("*",)
    ignore: tuple[str, ...] = ("lm_head",)
    damping: float = 0.01

    def __post_init__(self) -> None:
        if self.method not in PRUNED:
            raise ValueError(f"method {self.method!r}; expected one of {', '.join(PRUNED)}")
        if not 0 < self.sparsity < 1 or not self.damping > 0:
            raise ValueError(f"sparsity {self.sparsity} and damping {self.damping}; expected 0 to 1, and more than 0")
        if self.pattern and not (re.fullmatch(r"[1-9]\d*:[1-9]\d*", self.pattern) and self.left < self.period):
            raise ValueError(f"pattern {self.pattern!r}; expected such as 2:4, how many of how many stay")
        if self.pattern and self.sparsity != 0.5:
            raise ValueError(f"a pattern {self.pattern!r} says the share of zeros: give it, or sparsity")
        if self.damping != 0.01 and self.method != "sparsegpt":
            raise ValueError(f"damping is of sparsegpt, and does nothing for {self.method}")

    @property
    def left(self) -> int:
        """How many inputs of a period stay."""
        return int(self.pattern.partition(":")[0])

    @property
    def period(self) -> int:
        """Inputs that a pattern is of."""
        return int(self.pattern.partition(":")[2])

    @property
    def calibrated(self) -> bool:
        """Whether it needs data."""
        return self.method != "magnitude"


@dataclass(frozen=True)
class Shrink:
    """Remove heads, channels of the MLP, experts and whole layers: less is computed (`compress.methods.shrink`).

    heads, channels, experts: the share that stays, 1 for all; heads go with their key and value heads. layers: how many
    are removed.
    """

    heads: float = 1.0
    channels: float = 1.0
    experts: float = 1.0
    layers: int = 0

    calibrated = True

    def __post_init__(self) -> None:
        shares = self.heads, self.channels, self.experts
        if not all(0 < x <= 1 for x in shares) or self.layers < 0:
            raise ValueError(f"{self}: shares are above 0 and at most 1, and layers 0 or more")
        if shares == (1, 1, 1) and not self.layers:
            raise ValueError("the step removes nothing: give heads, channels, experts or layers")


@dataclass(frozen=True)
class LowRank:
    """Make the weights of linear layers products of two smaller ones (`compress.methods.low_rank`).

    share: fraction of the numbers of each weight that stay. multiple: number that ranks are multiples of; groups of
    scales must divide it if the result is quantized. Layers that no such rank makes smaller stay. layers, ignore: as
    for `Quantize`.
    """

    share: float = 0.5
    multiple: int = 64
    layers: tuple[str, ...] = ("*",)
    ignore: tuple[str, ...] = ("lm_head",)

    calibrated = True

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or self.multiple < 1:
            raise ValueError(f"share {self.share} and multiple {self.multiple}; expected 0 to 1, and at least 1")


@dataclass(frozen=True)
class Distill:
    """Train the compressed model to predict what the original model predicts (`compress.methods.distill`).

    steps: number of batches, of the training data or of the calibration data. lr: highest learning rate of AdamW.
    temperature: temperature of both distributions. hidden: weight of the distance of the last hidden states. seed:
    random seed of dropout.
    """

    steps: int = 200
    lr: float = 2e-4
    temperature: float = 1.0
    hidden: float = 0.0
    seed: int = 0

    calibrated = True

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.lr > 0 or not self.temperature > 0 or self.hidden < 0:
            raise ValueError(f"{self}: steps, lr and temperature must be positive, and hidden 0 or more")


Step = Quantize | Mixed | Rotate | Prune | Shrink | LowRank | Distill
STEPS: dict[str, type] = {
    "quantize": Quantize, "mixed": Mixed, "rotate": Rotate, "prune": Prune, "shrink": Shrink, "lowrank": LowRank,
    "distill": Distill,
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Steps in order. Recipes are joined by `+`."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        kinds = [type(x) for x in self.steps]
        if not kinds:
            raise ValueError("a recipe needs at least one step")
        if kinds.count(Quantize) + kinds.count(Mixed) > 1:
            raise ValueError("a recipe quantizes once: give several schemes as `overrides` of one step")
        ends = next((i for i, x in enumerate(kinds) if x in (Quantize, Mixed)), len(kinds))
        if late := [x.__name__.lower() for x in kinds[ends + 1 :] if x is not Distill]:
            raise ValueError(f"a quantized model is only distilled: put {late[0]} before")
        factored = kinds.index(LowRank) if LowRank in kinds else len(kinds)
        for x in self.steps[factored + 1 :]:
            if isinstance(x, Rotate | LowRank) or (isinstance(x, Shrink) and (x.heads < 1 or x.channels < 1)):
                raise ValueError(f"{type(x).__name__.lower()} does not know layers that are products: put it before "
                                 "lowrank, which a recipe has once")  # fmt: skip
        if Prune in kinds and any(x.kind == "binary" for step in self.steps for x in getattr(step, "schemes", ())):
            raise ValueError("binary weights are never 0: a pruned model keeps its zeros as ternary")
        pruned = kinds.index(Prune) if Prune in kinds else len(kinds)
        for x in self.steps[pruned + 1 :]:
            if isinstance(x, Rotate | LowRank) or (isinstance(x, Shrink) and (x.heads < 1 or x.channels < 1)):
                raise ValueError(f"{type(x).__name__.lower()} would fill zeros again: put it before prune")

    def __add__(self, other: Recipe) -> Recipe:
        return Recipe(self.steps + other.steps)

    @property
    def calibrated(self) -> bool:
        """Whether it needs data."""
        return any(x.calibrated for x in self.steps)

    @property
    def block_by_block(self) -> bool:
        """Whether a folder is compressed one block at a time, and goes on where it was interrupted."""
        return all(isinstance(x, Quantize | Rotate) for x in self.steps)

    def find(self, kind: type) -> Any:
        """The step of a kind, or None."""
        return next((x for x in self.steps if isinstance(x, kind)), None)


def parse(text: str) -> Recipe:
    """The recipe that a text such as `rotate+int4-g128-gptq` names, or the path of a TOML file.

    A step that quantizes is a scheme and options, joined by `-`: `int2` to `int8`, `ternary`, `binary` or `float8`;
    `g32`, `g64`, ... or `channel` (groups; int8 has none by default); `zeros`; `a8` or `a8static` (int8 activations);
    `s16` (scales in float16) or `s8` (in int8, with a number for 256 of them); a method; `e8`, `e4` or `e2` (embeddings
    in int8, or with groups of 32); `head` (the output layer, too).
    `w8a8` is `int8-a8`. The others are

        mixed-3.2-s16-gptq-e4                     bits per weight, and options that quantize
        mixed-8MB, mixed-2.5ms, mixed-3-lowrank0.5    bytes of the file; time of a token; layers may have lower ranks
        prune-0.5-wanda, prune-2:4                a share or a pattern, and a method
        shrink-heads0.5-channels0.75-layers2      what stays, and the number of layers that are removed; experts0.5
        lowrank-0.5-multiple32                    the share of numbers that stays, and of what ranks are multiples
        distill-500-lr0.001-hidden1               steps and options
        rotate, rotate-untie

    Raises ValueError for what it does not know.
    """
    if text.endswith(".toml"):
        return from_toml(text)
    return Recipe(tuple(_step(x.strip()) for x in text.split("+")))


def _once(options: dict[str, Any], name: str, value: Any, text: str) -> None:
    """Set an option that has not been set. Raises ValueError if it has."""
    if name in options:
        raise ValueError(f"{text!r} gives {name} twice")
    options[name] = value


def _step(text: str) -> Step:
    name, *options = text.split("-")
    if text in ("rotate", "rotate-untie"):
        return Rotate(untie=text.endswith("untie"))
    if name in READ:
        return READ[name](text, options)
    scheme, options = _scheme(name, options)
    return Quantize(scheme, **_quantizing(text, options, scheme))


def _quantizing(text: str, options: list[str], scheme: Scheme) -> dict[str, Any]:
    """Options of a step that quantizes, but its scheme."""
    fields: dict[str, Any] = {}
    for option in options:
        if option in METHODS:
            _once(fields, "method", option, text)
        elif option in ("e2", "e4", "e8"):
            bits = int(option[1])
            table = Scheme(8, None) if bits == 8 else Scheme(bits, 32, scales=scheme.scales)
            _once(fields, "embeddings", table, text)
        elif option == "head":
            fields["ignore"] = ()
        else:
            raise _unknown(
                text,
                option,
                [*METHODS, "zeros", "channel", "a8", "a8static", "s16", "s8", "head", "e2", "e4", "e8", "g64"],
            )
    return fields


def _mixed(text: str, options: list[str]) -> Mixed:
    fields: dict[str, Any] = {}
    if options and (target := re.fullmatch(r"(\d+(?:\.\d+)?)(MB|ms|)", options[0])):
        name, unit = {"": ("bits", 1), "MB": ("size", 1e6), "ms": ("latency", 1e-3)}[target[2]]
        fields[name], options = float(target[1]) * unit, options[1:]
    elif options and options[0][:1].isdigit():
        raise ValueError(f"{options[0]!r} in recipe {text!r}: expected bits of a weight, MB or ms, such as mixed-3.5, "
                         "mixed-8MB or mixed-2ms")  # fmt: skip
    ranks = [x for x in options if re.fullmatch(r"lowrank0\.\d+", x)]
    if ranks:
        fields["shares"] = tuple(float(x.removeprefix("lowrank")) for x in ranks)
        options = [x for x in options if x not in ranks]
    for option in options:
        if option in SHORT_SCALES:
            _once(fields, "schemes", tuple(replace(x, scales=SHORT_SCALES[option]) for x in Mixed.schemes), text)
    options = [x for x in options if x not in SHORT_SCALES]
    return Mixed(**fields, **_quantizing(text, options, fields.get("schemes", Mixed.schemes)[0]))


def _prune(text: str, options: list[str]) -> Prune:
    fields: dict[str, Any] = {}
    for option in options:
        if option in PRUNED:
            _once(fields, "method", option, text)
        elif ":" in option:
            _once(fields, "pattern", option, text)
        elif (share := _number(option)) is not None:
            _once(fields, "sparsity", share, text)
        else:
            raise _unknown(text, option, [*PRUNED, "2:4", "0.5"])
    return Prune(**fields)


def _named(kind: Callable[..., Step], names: Sequence[str], first: str = "") -> Callable[[str, list[str]], Step]:
    """Reads options that are a name and a number; first: the name of one that is a number alone."""

    def read(text: str, options: list[str]) -> Step:
        fields: dict[str, Any] = {}
        for option in options:
            match = re.fullmatch(r"([a-z]*)([\d.]+(?:e-?\d+)?)", option)
            name = (match[1] or first) if match else ""
            if match is None or name not in names:
                raise _unknown(text, option, [f"{x}1" for x in names])
            whole = name in ("layers", "steps", "multiple")
            try:
                number = int(match[2]) if whole else float(match[2])
            except ValueError:
                raise ValueError(f"{option!r} in recipe {text!r}: expected a {'whole ' * whole}number") from None
            _once(fields, name, number, text)
        return kind(**fields)

    return read


READ: dict[str, Callable[[str, list[str]], Step]] = {
    "mixed": _mixed,
    "prune": _prune,
    "shrink": _named(Shrink, ("heads", "channels", "experts", "layers")),
    "lowrank": _named(LowRank, ("share", "multiple"), "share"),
    "distill": _named(Distill, ("steps", "lr", "temperature", "hidden"), "steps"),
}


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _unknown(text: str, option: str, options: Sequence[str]) -> ValueError:
    near = get_close_matches(option, options, 1)
    remedy = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(options)}"
    return ValueError(f"{option!r} in recipe {text!r} is not known; {remedy}")


def scheme(text: str) -> Scheme:
    """The scheme that a text such as `int4-g128-zeros` names."""
    first, *options = text.split("-")
    named, rest = _scheme(first, options)
    if rest:
        raise ValueError(f"{rest[0]!r} in scheme {text!r} is not known")
    return named


def _scheme(name: str, options: list[str]) -> tuple[Scheme, list[str]]:
    """A scheme, and the options that are not of schemes."""
    if name == "w8a8":
        name, options = "int8", ["a8", *options]
    match = re.fullmatch(r"int([2-8])", name)
    if name == "int1":
        raise ValueError("weights of 1 bit are called 'binary'")
    if not match and name not in BITS:
        raise ValueError(
            f"{name!r} is not a step; expected int2 to int8, ternary, binary, w8a8, float8, mixed, rotate, prune, "
            "shrink, lowrank or distill"
        )
    bits = int(match[1]) if match else BITS[name]
    kind: Any = "int" if match else name
    plain, rest = Scheme(bits, 64 if bits < 8 else None, kind=kind), []
    changed: dict[str, Any] = {}
    for option in options:
        if re.fullmatch(r"g\d+", option):
            _once(changed, "group", int(option[1:]), name)
        elif option == "channel":
            _once(changed, "group", None, name)
        elif option == "zeros":
            changed["symmetric"] = False
        elif option in ("a8", "a8static"):
            _once(changed, "activations", {"a8": "int8", "a8static": "int8-static"}[option], name)
        elif option in SHORT_SCALES:
            _once(changed, "scales", SHORT_SCALES[option], name)
        else:
            rest.append(option)
    return replace(plain, **changed), rest


def from_toml(path: str | Path) -> Recipe:
    """The recipe of a file with a table `[[step]]` for each step.

    kind = "quantize", scheme = "int4-g128" and the fields of `Quantize`, where overrides = [["*.down_proj", "int8"]]
    and "keep" stands for None. Raises ValueError, naming the file.
    """
    try:
        content = tomllib.loads(Path(path).read_text())
        if list(content) != ["step"] or not isinstance(content["step"], list):
            raise ValueError(f"expected tables [[step]], not {', '.join(content) or 'nothing'}")
        return Recipe(tuple(map(_of_table, content["step"])))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}: a recipe is a TOML file, or a name such as int4-gptq") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _of_table(table: dict[str, Any]) -> Step:
    values = dict(table)
    kind = STEPS.get(name := values.pop("kind", "quantize"))
    if kind is None:
        raise ValueError(f"kind {name!r}; expected one of {', '.join(STEPS)}")
    types = {x.name: str(x.type) for x in fields(kind)}
    for key, value in values.items():
        if key not in types:
            near = get_close_matches(key, types, 1)
            raise ValueError(f"{name} has no {key!r}; {f'did you mean {near[0]!r}?' if near else ', '.join(types)}")
        _check_type(key, value, types[key])
        if key in ("scheme", "embeddings"):
            values[key] = scheme(value)
        elif key == "schemes":
            values[key] = tuple(map(scheme, value))
        elif key == "overrides":
            values[key] = tuple((x, None if y == "keep" else scheme(y)) for x, y in value)
        elif isinstance(value, list):
            values[key] = tuple(value)
    return kind(**values)


def _check_type(key: str, value: Any, annotation: str) -> None:
    """Raise ValueError for a value of TOML that a field cannot be. annotation: type of the field, as text."""
    pair = key == "overrides"
    if annotation.startswith("tuple"):
        inside = annotation.removeprefix("tuple[").partition(",")[0]
        if not isinstance(value, list) or (pair and not all(isinstance(x, list) and len(x) == 2 for x in value)):
            raise ValueError(f"{key} is {value!r}; expected a list{' of pairs of a pattern and a scheme' * pair}")
        for x in [y for each in value for y in each] if pair else value:
            _check_type(f"a part of {key}", x, "str" if pair else inside)
        return
    wanted, words = {"float": ((int, float), "a number"), "int": (int, "a whole number"),
                     "bool": (bool, "true or false")}.get(annotation, (str, "a text"))  # fmt: skip
    if not isinstance(value, wanted) or (isinstance(value, bool) and annotation != "bool"):
        raise ValueError(f"{key} is {value!r}; expected {words}")

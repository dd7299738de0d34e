"""The format `compressed-tensors`, which transformers and `tutti serve` read.

config.json has a "quantization_config", and the files of tensors have for a layer X

| format | tensors | |
|---|---|---|
| pack-quantized | X.weight_packed (n, ceil(k bits / 32)) int32 | codes, as a stream of bits for each row |
| | X.weight_scale (n, groups), X.weight_shape (2) int64 | |
| | X.weight_zero_point (ceil(n bits / 32), groups) int32 | packed along n |
| int-quantized | X.weight (n, k) int8, X.weight_scale (n, 1) | with activations in int8 |
| | X.input_scale (1) | where they are static |
| float-quantized | X.weight (n, k) float8_e4m3fn, X.weight_scale (n, 1) or (n, groups) | |

What that format cannot say makes the entry one of our own, which has no "quant_method", so that `transformers` refuses
the folder and does not draw random weights; `tutti.compress.load` and `tutti serve` read it:

- weights of "type" ternary, X.weight_packed (n, ceil(k / 5)) uint8, or binary, (n, ceil(k / 32)) int32
- weights with "scales" int8: X.weight_scale (n, groups) int8, X.weight_scale_scale (ceil(n groups / 256)) float32
- "low_rank": {path: rank} of layers with two weights, X.a and X.b (`LowRankLinear`), which may be quantized
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from tutti.compress.experts import ExpertLayers, is_experts
from tutti.compress.modules import shapes
from tutti.nn.linear.low_rank_linear import LowRankLinear, low_rank_layers
from tutti.nn.quantized.quantized_embedding import QuantizedEmbedding, factor_of
from tutti.nn.quantized.quantized_linear import QuantizedLinear
from tutti.nn.quantized.scheme import (
    BITS,
    SCALES,
    SHARED,
    TRITS,
    Parts,
    Scheme,
    of_scale_codes,
    pack_bits,
    pack_ternary,
    scale_codes,
    unpack_bits,
    unpack_ternary,
)  # fmt: skip
from tutti.whole_files import whole_file, whole_folder

METHOD = "compressed-tensors"
VERSION = "0.15.0"  # of the package that reads what is written
READERS = "tutti.compress.load and tutti serve"
OWN = "tutti"  # the "format" of entries that only we read
QuantizedModule = QuantizedLinear | QuantizedEmbedding


def format_of(scheme: Scheme) -> str:
    """The name of the format of a layer."""
    return "float-quantized" if scheme.kind == "float8" else "int-quantized" if scheme.activations else "pack-quantized"


def tensors_of(layer: QuantizedModule) -> dict[str, Tensor]:
    """What a layer is in a file, by the ends of the names."""
    codes, scales, zeros = layer.parts()
    scheme, (n, k) = layer.scheme, layer.weight.shape
    tensors: dict[str, Tensor] = {}
    if scheme.scales == "int8":
        tensors["weight_scale"], tensors["weight_scale_scale"] = scale_codes(scales)
    else:
        tensors["weight_scale"] = scales.to(SCALES.get(scheme.scales, layer.dtype))
    if scheme.kind == "float8":
        tensors["weight"] = codes
    elif scheme.activations:
        tensors["weight"] = (codes.to(torch.int16) - 128).to(torch.int8)
        if (scale := getattr(layer, "input_scale", None)) is not None:
            tensors["input_scale"] = scale.data.reshape(1).to(layer.dtype)
    else:
        tensors["weight_packed"] = _packed(codes, scheme)
        tensors["weight_shape"] = torch.tensor([n, k])
        if zeros is not None:
            tensors["weight_zero_point"] = _words(zeros.T, scheme.bits).T.contiguous()
    return tensors


def _packed(codes: Tensor, scheme: Scheme) -> Tensor:
    if scheme.kind == "ternary":
        return pack_ternary(codes)
    return _words(codes >> 1, 1) if scheme.kind == "binary" else _words(codes, scheme.bits)


def _unpacked(get: Callable[[str], Tensor], scheme: Scheme, n: int, k: int) -> Tensor:
    if scheme.kind == "ternary":
        return unpack_ternary(_of(get, "weight_packed", (n, -(-k // TRITS)), torch.uint8), k)
    bits = 1 if scheme.kind == "binary" else scheme.bits
    packed = _of(get, "weight_packed", (n, -(-k * bits // 32)), torch.int32)
    codes = unpack_bits(packed.contiguous().view(torch.uint8), bits, k)
    return codes << 1 | 1 if scheme.kind == "binary" else codes


def _words(codes: Tensor, bits: int) -> Tensor:
    return pack_bits(codes, bits).view(torch.int32)


def read_parts(get: Callable[[str], Tensor], scheme: Scheme, n: int, k: int) -> tuple[Parts, Tensor | None]:
    """The quantized weight (n, k) of a layer and the scale of its inputs. get: gives a tensor by the end of its name.

    Raises ValueError for tensors of other shapes or dtypes.
    """
    groups, static = scheme.groups(k), None
    if scheme.scales == "int8":
        units = _of(get, "weight_scale_scale", (-(-n * groups // SHARED),), torch.float32)
        scales = of_scale_codes(_of(get, "weight_scale", (n, groups), torch.int8), units)
    else:
        scales = _of(get, "weight_scale", (n, groups)).float()
    if scheme.kind == "float8":
        return Parts(_of(get, "weight", (n, k), torch.float8_e4m3fn), scales), None
    if scheme.activations:
        if scheme.activations == "int8-static":
            static = _of(get, "input_scale", (1,)).float().squeeze(0)
        return Parts((_of(get, "weight", (n, k), torch.int8).to(torch.int16) + 128).to(torch.uint8), scales), static
    codes, zeros = _unpacked(get, scheme, n, k), None
    if not scheme.symmetric:
        words = _of(get, "weight_zero_point", (-(-n * scheme.bits // 32), groups), torch.int32)
        zeros = unpack_bits(words.T.contiguous().view(torch.uint8), scheme.bits, n).T.contiguous()
    return Parts(codes, scales, zeros), None


def _of(get: Callable[[str], Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    x = get(name)
    if tuple(x.shape) != shape or (dtype or x.dtype) != x.dtype or (dtype is None and not x.is_floating_point()):
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; expected {dtype or 'floats'} {shape}")
    return x


# -- the entry of config.json -----------------------------------------------------------------------------------------


def config_of(
    schemes: Mapping[str, tuple[Scheme, str]],
    others: Iterable[str],
    experts: bool = False,
    ranks: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The "quantization_config" of a model.

    schemes: and the class ("Linear" or "Embedding"), by path. others: paths of linear layers that are not quantized.
    experts: whether there are quantized experts of a mixture, which transformers must dequantize as it loads. ranks:
    of layers of lower rank, by path.
    """
    groups: dict[tuple[Scheme, str, bool], list[str]] = {}
    for path, key in schemes.items():
        groups.setdefault((*key, ".experts." in path), []).append(path)
    entries, formats = {}, {format_of(scheme) for scheme, _, _ in groups}
    most = max((x for (_, kind, _), x in groups.items() if kind == "Linear"), key=len, default=[])
    for (scheme, kind, inside), paths in sorted(groups.items(), key=lambda x: x[1] is most):  # the first match holds
        targets = [r"re:.*\.experts\..*"] if inside else [kind] if paths is most and not experts else paths
        entries[f"group_{len(entries)}"] = {
            "targets": targets,
            "weights": {
                "num_bits": scheme.bits,
                "type": "float" if scheme.kind == "float8" else scheme.kind,
                "symmetric": scheme.symmetric,
                "strategy": "group" if scheme.group else "channel",
                "group_size": scheme.group,
                "dynamic": False,
                **({"scales": "int8"} if scheme.scales == "int8" else {}),
            },
            "input_activations": _activations(scheme),
            "output_activations": None,
            "format": format_of(scheme),
        }
    entry = {
        "quant_method": METHOD,
        "version": VERSION,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": entries,
        "ignore": list(others),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    if own(schemes, ranks):
        return {**own_entry(entry), "low_rank": dict(ranks or {})}
    return {**entry, "dequantize": True} if widened(schemes) else entry


def own(schemes: Mapping[str, tuple[Scheme, str]], ranks: Mapping[str, int] | None = None) -> list[str]:
    """What of a model only our own entry can say."""
    return (["layers of low rank"] if ranks else []) + sorted(
        {f"{x.kind} weights" for x, _ in schemes.values() if x.kind in ("ternary", "binary")}
        | {"scales in int8" for x, _ in schemes.values() if x.scales == "int8"}
    )


def own_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry that `transformers` refuses to read."""
    return {**{key: x for key, x in entry.items() if key != "quant_method"}, "format": OWN,
            "read_by": READERS}  # fmt: skip


def widened(schemes: Mapping[str, tuple[Scheme, str]]) -> bool:
    """Whether transformers must dequantize a model as it loads: it keeps neither packed zeros, nor embeddings nor
    experts quantized. It can do so where all layers besides experts have one scheme."""
    needed = any(not x.symmetric or kind == "Embedding" or ".experts." in path for path, (x, kind) in schemes.items())
    return needed and len({x for path, (x, _) in schemes.items() if ".experts." not in path}) <= 1


def check(model: Any, schemes: Mapping[str, Scheme]) -> None:
    """Raise ValueError if transformers would load a model wrongly. schemes: schemes of its layers, by path.

    transformers knows experts of a mixture apart only for some models, packed and without zeros, and with one scheme.
    """
    inside = {x for path, x in schemes.items() if ".experts." in path}
    if not inside:
        return
    outside = {x for path, x in schemes.items() if ".experts." not in path}
    if len(inside) > 1 or len(outside) > 1 or any(not x.symmetric or x.activations for x in inside):
        raise ValueError("compressed-tensors holds a mixture with one scheme for experts, without zeros and "
                         "activations, and one for other layers: give Quantize(overrides=(('*.experts.*', scheme),))"
                         )  # fmt: skip
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    conversions = get_checkpoint_conversion_mapping(model.config.model_type) or []
    if not any("experts.*." in str(source) for x in conversions for source in x.source_patterns):
        raise ValueError(f"transformers has no names for the experts of {type(model).__name__} one by one, and would "
                         "load random numbers in their place: ignore '*.experts.*'")  # fmt: skip


def unread(schemes: Mapping[str, tuple[Scheme, str]]) -> bool:
    """Whether transformers cannot load a model, and refuses it; the engine and other formats can."""
    needed = any(not x.symmetric or kind == "Embedding" for x, kind in schemes.values())
    return needed and not widened(schemes)


def _activations(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.activations is None:
        return None
    static = scheme.activations == "int8-static"
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor" if static else "token",
            "group_size": None, "dynamic": not static}  # fmt: skip


def schemes_of(config: Mapping[str, Any], layers: Mapping[str, str]) -> dict[str, Scheme]:
    """The schemes of layers by a "quantization_config". layers: path -> "Linear" or "Embedding".

    Raises ValueError, with a remedy, for what is not supported.
    """
    if config.get("quant_method") != METHOD and config.get("format") != OWN:
        raise ValueError(f"the model is quantized by {config.get('quant_method')!r}; only {METHOD} is read: load it "
                         "with transformers, dequantize and save it, and compress that")  # fmt: skip

    def targeted(path: str, kind: str, target: str) -> bool:
        return bool(re.match(target[3:], path)) if target.startswith("re:") else target in (path, kind)

    try:
        groups = [(x["targets"], _scheme_of(x)) for x in config["config_groups"].values()]
        ignored = list(config.get("ignore") or ())
        schemes = {}
        for path, kind in layers.items():
            if any(targeted(path, "", x) for x in ignored):
                continue
            for targets, scheme in groups:
                if any(targeted(path, kind, x) for x in targets):
                    schemes[path] = scheme
                    break
    except (KeyError, TypeError, AttributeError, re.error) as error:
        raise ValueError(f"the quantization_config is damaged: {type(error).__name__} {error}") from None
    return schemes


def _scheme_of(group: Mapping[str, Any]) -> Scheme:
    weights, activations = group["weights"], group.get("input_activations")
    kind = {"int": "int", "float": "float8", "ternary": "ternary", "binary": "binary"}.get(weights["type"])
    strategy, size = weights["strategy"], weights.get("group_size")
    bits = weights["num_bits"]
    supported = (kind and strategy in ("group", "channel") and not weights.get("dynamic")
             and not group.get("output_activations") and bits == BITS.get(kind, bits))  # fmt: skip
    if activations is not None:
        supported = supported and (activations["num_bits"], activations["type"], activations.get("symmetric")) == (
            8,
            "int",
            True,
        )
    if not supported:
        raise ValueError(f"weights of {weights['num_bits']} bits of kind {weights['type']!r} by {strategy!r} with "
                         f"{'no' if activations is None else 'such'} activations are not supported: compress the model "
                         "again with int2 to int8, w8a8 or float8")  # fmt: skip
    of_inputs = None
    if activations is not None:
        of_inputs = "int8" if activations.get("dynamic") else "int8-static"
    return Scheme(weights["num_bits"], size if strategy == "group" else None, weights.get("symmetric", True),
                  of_inputs, kind, weights.get("scales", ""))  # pyright: ignore[reportArgumentType]  # fmt: skip


# -- folders ----------------------------------------------------------------------------------------------------------


def file_tensors(model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """The tensors of a model as files have them, by name; tied ones are there once. wanted: whether to take a name of
    the model."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    taken: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            taken |= {f"{path}.{name}" for name in ("q", "scales", "zeros", "input_scale")}
            if wanted(f"{path}.q") and id(module.q) not in seen:
                tensors |= {f"{path}.{name}": x for name, x in tensors_of(module).items()}
            seen.add(id(module.q))
    for name, x in model.state_dict(keep_vars=True).items():
        if name not in taken and id(x) not in seen and wanted(name):
            seen.add(id(x))
            tensors[name] = x.detach().contiguous()
    return {_file_name(name, model): x for name, x in tensors.items()}


def _file_name(name: str, model: nn.Module) -> str:
    """The name of a tensor in a file: experts of Mixtral have names of their own there."""
    if getattr(getattr(model, "config", None), "model_type", "") == "mixtral" and ".experts." in name:
        for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(f".{ours}.", f".{theirs}.")
    return name


def known_name(name: str) -> str:
    """The name in a model of a tensor in a file."""
    if ".experts." in name:
        name = name.replace(".block_sparse_moe.", ".mlp.")
        for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(f".{theirs}.", f".{ours}.")
    return name.replace(".block_sparse_moe.gate.", ".mlp.gate.")


def factor(model: Any) -> None:
    """Put layers of lower rank, whose memory is not touched, in the place of a model's layers, as its config says."""
    config = getattr(model.config, "quantization_config", None) or {}
    ranks = config.get("low_rank", {}) if isinstance(config, Mapping) else {}
    if not isinstance(ranks, Mapping):
        raise ValueError(f"the quantization_config is damaged: low_rank is {ranks!r}")
    layers = dict(model.named_modules())
    for path, rank in ranks.items():
        if type(layer := layers.get(path)) is not nn.Linear:
            raise ValueError(f"the quantization_config is damaged: there is no linear layer {path!r}")
        if type(rank) is not int or not 0 < rank < min(layer.weight.shape):
            raise ValueError(f"the quantization_config is damaged: {path} has the rank {rank!r}")
        model.set_submodule(path, LowRankLinear.like(layer, rank))


def prepare(model: Any, schemes: Mapping[str, Scheme]) -> None:
    """Put quantized modules, whose memory is not touched, in the place of a model's layers."""
    for path, x in list(model.named_modules()):
        if is_experts(x) and any(p.startswith(f"{path}.") for p in schemes):
            model.set_submodule(path, ExpertLayers(x))
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    shared = [
        path for path in schemes if getattr(model.get_submodule(path), "weight", None) is getattr(head, "weight", 0)
    ]
    for path, scheme in schemes.items():
        layer: Any = model.get_submodule(path)
        tied = path in shared and len(shared) > 1
        if tied and layer is head:
            continue
        if isinstance(layer, nn.Embedding):
            table = QuantizedLinear(layer.embedding_dim, layer.num_embeddings, scheme, head.bias if tied else None,
                                    layer.weight.dtype, layer.weight.device)  # fmt: skip
            model.set_submodule(path, QuantizedEmbedding(table, factor_of(layer)))
            if tied:
                model.set_submodule(next(name for name, x in model.named_modules() if x is head), table)
        else:
            model.set_submodule(path, QuantizedLinear.like(layer, scheme))


def quantizable(model: nn.Module) -> dict[str, str]:
    """The layers of a model that may be quantized, "Linear" or "Embedding", by path."""
    layers = {path: "Linear" for path in shapes(model)}
    layers |= {path: "Embedding" for path, x in model.named_modules() if isinstance(x, nn.Embedding)}
    return layers


def load_layer(module: QuantizedModule, path: str, get: Callable[[str], Tensor]) -> None:
    """Read a quantized module. get: gives a tensor by its name in the model. Raises ValueError, naming the layer."""
    try:
        parts, scale = read_parts(lambda end: get(f"{path}.{end}"), module.scheme, *module.weight.shape)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    table = module.table() if isinstance(module, QuantizedEmbedding) else module
    table.load_parts(parts, scale)


def config_json(model: Any) -> dict[str, Any]:
    """What config.json says of a compressed model."""
    schemes, others = {}, []
    for path, x in model.named_modules():
        if isinstance(x, QuantizedModule):
            schemes[path] = x.scheme, "Embedding" if isinstance(x, QuantizedEmbedding) else "Linear"
        elif type(x) is nn.Linear:
            others.append(path)
        elif is_experts(x):
            others.append(rf"re:{re.escape(path)}\..*")
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    ranks = {path: x.rank for path, x in low_rank_layers(model).items()}
    if schemes or ranks:
        experts = any(".experts." in path for path in schemes)
        if reasons := own(schemes, ranks):
            warnings.warn(f"transformers cannot load {', '.join(reasons)}; {READERS} can", stacklevel=2)
        elif unread(schemes):
            warnings.warn(
                "transformers cannot load embeddings or zeros with several schemes; tutti serve can", stacklevel=2
            )
        config["quantization_config"] = config_of(schemes, others, experts, ranks)
    return config


def save(model: Any, folder: Path, shard: int = 5 << 30, files: Path | None = None) -> Path:
    """Write a compressed model as a folder, which appears when it is complete. files: as for `finish`."""
    folder = folder.resolve()
    check_out(folder)
    modules = {path: x for path, x in model.named_modules() if isinstance(x, QuantizedModule)}
    check(model, {path: x.scheme for path, x in modules.items()})
    shards: list[dict[str, Tensor]] = [{}]
    for name, x in file_tensors(model).items():
        if shards[-1] and sum(y.nbytes for y in shards[-1].values()) + x.nbytes > shard:
            shards.append({})
        shards[-1][name] = x
    names = {}
    with whole_folder(folder) as draft:
        for i, tensors in enumerate(shards):
            file = "model.safetensors" if len(shards) == 1 else shard_name(i, len(shards))
            write(tensors, draft / file)
            names |= dict.fromkeys(tensors, file)
        finish(model, draft, names, files)
    return folder


def shard_name(i: int, count: int) -> str:
    """The name of file i of several."""
    return f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def check_out(folder: Path) -> None:
    """Raise ValueError for a folder that has something else than a model, or a file; OSError if nothing can be written
    there: before anything is computed."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: choose a folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise ValueError(f"{folder} already exists and is not a model: choose another folder")
    if folder.exists() and (inner := [x.name for x in folder.iterdir() if x.is_dir()]):
        raise ValueError(f"{folder} has folders besides a model, such as {inner[0]}: choose another folder")
    check_place(folder)


def check_place(path: Path) -> None:
    """Raise OSError if nothing can be written in the folder where a path will be."""
    beside = next(x for x in path.absolute().parents if x.exists())
    try:
        with TemporaryDirectory(prefix=".writing-", dir=beside):
            pass
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): choose another folder") from None


def write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file, which appears when it is complete. Raises OSError if the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with whole_file(path) as draft:
            save_file({name: x.detach().contiguous() for name, x in tensors.items()}, draft, {"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise OSError(f"could not save {path}: {error}") from error


def finish(model: Any, folder: Path, names: Mapping[str, str], files: Path | None = None) -> None:
    """Write what stands beside the tensors. names: file of each tensor. files: a folder whose tokenizer is copied."""
    (folder / "config.json").write_text(json.dumps(config_json(model), indent=2, sort_keys=True, default=str) + "\n")
    if len({*names.values()}) > 1 or "model.safetensors" not in names.values():
        total = sum((folder / file).stat().st_size for file in {*names.values()})
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    if files is not None:
        for path in (*files.glob("*token*"), *files.glob("generation_config.json"), *files.glob("*.jinja"),
                     *files.glob("vocab.json"), *files.glob("merges.txt")):  # fmt: skip
            shutil.copy(path, folder)
    elif getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)

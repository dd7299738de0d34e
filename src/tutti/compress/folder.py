"""Models in folders, compressed block by block: the weights of one block are in memory at a time.

Each block is written when it is finished. What an interrupted run has finished is read back, if the recipe, the data
and the files are the same.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tutti.compress import parallel
from tutti.compress.compressor import Compressed, Compression, LayerReport, check_plain
from tutti.compress.formats import compressed_tensors as written
from tutti.compress.recipe import Recipe
from tutti.nn.quantized.quantized_embedding import QuantizedEmbedding
from tutti.nn.quantized.quantized_linear import QuantizedLinear
from tutti.nn.quantized.scheme import Scheme
from tutti.progress import Count
from tutti.weight_files import files_of, opened
from tutti.whole_files import UNFINISHED, replace_folder, write_text

STATE = "compress.json"  # in the folder that is being written


class Reader:
    """The tensors of a folder by their names in the model, of which none is held."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, tuple[Path, str]] = {}
        for path in files_of(folder):
            with opened(path) as file:
                self.files |= {written.known_name(name): (path, name) for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def get(self, name: str) -> Tensor:
        """A tensor of its own memory. Raises ValueError if there is none."""
        return next(iter(self.several([name]).values()))

    def several(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by name. Each file is opened once."""
        tensors: dict[str, Tensor] = {}
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for name in names:
                if name not in self.files:
                    raise ValueError(f"{self.folder} has no tensor {name!r}")
                path, own = self.files[name]
                if path not in files:
                    files[path] = stack.enter_context(opened(path))
                tensors[name] = files[path].get_tensor(own).clone()
        return tensors


def skeleton(folder: Path) -> Any:
    """The model of a folder of `transformers` without its weights, whose memory is not touched."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json: give the folder of a model of transformers")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{folder} has a {type(config).__name__}, of a model that is no causal language model: "
                         "load it and give the model")  # fmt: skip
    with no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    model.tie_weights()
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def load(folder: str | Path) -> Any:
    """The model of a folder that was compressed, with quantized layers and layers of low rank.

    Raises ValueError for a scheme that is not supported, and for a tensor that is missing or has another shape.
    """
    reader = Reader(Path(folder))
    model = skeleton(Path(folder))
    written.factor(model)
    schemes = stored_schemes(model)
    written.prepare(model, schemes)
    _fill(model, reader, "")
    return model


def stored_schemes(model: Any) -> dict[str, Scheme]:
    """The schemes of the layers of a model by its config, by path."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return {}
    config = config if isinstance(config, Mapping) else config.to_dict()
    return written.schemes_of(config, written.quantizable(model))


def _fill(model: nn.Module, reader: Reader, prefix: str) -> None:
    """Read all tensors of a part of a model. prefix: beginning of its names in the model."""
    taken: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
            if id(module.q) not in taken:
                written.load_layer(module, f"{prefix}{path}", reader.get)
            taken |= {id(x) for x in (module.q, module.scales, module.zeros, getattr(module, "input_scale", None))}
    _copy(model, reader, prefix, taken)


def _copy(model: nn.Module, reader: Reader, prefix: str, taken: set[int]) -> None:
    own = {name: x for name, x in model.named_parameters() if id(x) not in taken}
    with torch.no_grad():
        for name, x in own.items():
            x.copy_(_whole(reader, f"{prefix}{name}", x))
        persistent = model.state_dict(keep_vars=True)
        for name, x in model.named_buffers():
            if name in persistent and f"{prefix}{name}" in reader:
                x.copy_(reader.get(f"{prefix}{name}"))


def _whole(reader: Reader, name: str, like: Tensor) -> Tensor:
    """A parameter, put together from the experts' own where the files have those. Raises ValueError, naming it."""
    if name in reader or (parts := _expert_names(reader, name, len(like))) is None:
        tensor = reader.get(name)
    else:
        tensors = reader.several(x for names in parts for x in names)
        tensor = torch.stack([torch.cat([tensors[x] for x in names]) for names in parts])
    if tensor.shape != like.shape:
        raise ValueError(f"{name} has {tuple(tensor.shape)} in {reader.folder}; {tuple(like.shape)} is wanted")
    return tensor


def _expert_names(reader: Reader, name: str, count: int) -> list[list[str]] | None:
    """The names of the experts' weights that a parameter of three dims is made of."""
    stem, _, last = name.rpartition(".")
    kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
    if kinds is None or not stem.endswith("experts"):
        return None
    expected = [[f"{stem}.{e}.{kind}.weight" for kind in kinds] for e in range(count)]
    return expected if all(x in reader for names in expected for x in names) else None


class Files:
    """A model in a folder, of which one block is in memory at a time. See `compressor.InMemory`."""

    def __init__(self, folder: Path, out: Path, recipe: Recipe, data: str):
        self.folder, self.out = folder, out
        self.draft = out.with_name(f".writing-{out.name}")
        self.reader, self.model = Reader(folder), skeleton(folder)
        self.walks = True
        check_plain(self.model)
        for name, x in self.model.named_parameters():
            if name not in self.reader and _expert_names(self.reader, name, len(x)) is None:
                raise ValueError(f"{folder} has no tensor {name!r}, which its config.json requires")
        stamps = [
            [path.name, path.stat().st_size, path.stat().st_mtime_ns]
            for path in (*files_of(folder), folder / "config.json")
        ]
        self.state: dict[str, Any] = {"recipe": repr(recipe), "data": data, "files": stamps, "blocks": {}}

    def begin(self, stack: str) -> None:
        """Read what stands outside of blocks, and what an earlier run has finished."""
        self.stack = stack
        blocks = self.model.get_submodule(stack) if stack else []
        self.count = len(blocks)  # pyright: ignore
        for block in blocks:  # pyright: ignore
            _to_meta(block)
        outside = nn.Module()
        for name, x in self.model.named_parameters():
            if not self._inside(name):
                outside.register_parameter(name.replace(".", "/"), x)
        with torch.no_grad():
            for name, x in outside.named_parameters():
                x.copy_(_whole(self.reader, name.replace("/", "."), x))
        self.state = parallel.by_first(self._begun)

    def _begun(self) -> dict[str, Any]:
        """The state of an earlier run if it was the same, otherwise of one that begins; the draft is ready for it."""
        state = self.state
        try:
            before = json.loads((self.draft / STATE).read_text())
            if {**before, "blocks": {}} == state:
                state = before
        except (OSError, ValueError, TypeError):
            pass
        if not state["blocks"]:
            shutil.rmtree(self.draft, ignore_errors=True)
        self.draft.mkdir(parents=True, exist_ok=True)
        for file in self.draft.glob(f"*{UNFINISHED}"):
            file.unlink()
        return state

    def _inside(self, name: str) -> bool:
        return bool(self.stack) and name.startswith(f"{self.stack}.")

    def _file(self, path: str) -> Path:
        """The file of a block."""
        return self.draft / written.shard_name(int(path.rpartition(".")[2]) + 1, self.count + 1)

    def outside(self) -> None:
        """Parameters outside of blocks are the run's own."""

    def block(self, path: str, schemes: Mapping[str, Scheme], reports: list[LayerReport]) -> bool:
        """Read a block. Whether it is finished already."""
        block = self.model.get_submodule(path)
        done = self.state["blocks"].get(path)
        if done is not None:
            written.prepare(
                block, {p.removeprefix(f"{path}."): x for p, x in schemes.items() if p.startswith(f"{path}.")}
            )
            reports.extend(LayerReport(*x) for x in done)
        if done is None or self.walks:
            _from_meta(block)
            if done is None:
                _copy(block, self.reader, f"{path}.", set())
            else:
                _fill(block, Shard(self._file(path)), f"{path}.")  # pyright: ignore[reportArgumentType]
        return done is not None

    def done(self, path: str, reports: list[LayerReport]) -> None:
        """Write a block, and forget its weights."""
        block = self.model.get_submodule(path)
        if path not in self.state["blocks"]:
            self.state["blocks"][path] = reports
            parallel.by_first(lambda: self._write(path))
        _to_meta(block)

    def _write(self, path: str) -> None:
        """Write a block, and that it is finished."""
        tensors = written.file_tensors(self.model, lambda name: name.startswith(f"{path}."))
        written.write(tensors, self._file(path))
        write_text(self.draft / STATE, json.dumps(self.state))

    def end(self) -> None:
        """Write what stands outside of blocks, and put the folder in its place."""
        self.bytes = parallel.by_first(self._end)

    def _end(self) -> int:
        """Returns the bytes of the files."""
        file = written.shard_name(0, self.count + 1)
        tensors = written.file_tensors(self.model, lambda name: not self._inside(name))
        written.write(tensors, self.draft / file)
        names = dict.fromkeys(tensors, file)
        for i in range(self.count):
            with opened(path := self._file(f"{self.stack}.{i}")) as block:
                names |= dict.fromkeys(block.keys(), path.name)
        written.finish(self.model, self.draft, names, self.folder)
        size = sum((self.draft / x).stat().st_size for x in {*names.values()})
        (self.draft / STATE).unlink()
        replace_folder(self.draft, self.out)
        return size


class Shard(Reader):
    """One file of a folder."""

    def __init__(self, path: Path):
        self.folder = path.parent
        with opened(path) as file:
            self.files = {written.known_name(name): (path, name) for name in file.keys()}  # noqa: SIM118


def _to_meta(module: nn.Module) -> None:
    """Forget the parameters of a module."""
    for part in module.modules():
        for name, x in part._parameters.items():
            if x is not None:
                part._parameters[name] = nn.Parameter(x.detach().to("meta"), requires_grad=False)


def _from_meta(module: nn.Module) -> None:
    """Give parameters memory again."""
    for part in module.modules():
        for name, x in part._parameters.items():
            if x is not None and x.device.type == "meta":
                part._parameters[name] = nn.Parameter(torch.empty_like(x, device="cpu"), requires_grad=False)


GGUF = ".gguf"  # of the names of files in this format


def checked_folders(folder: str | Path, out: str | Path | None) -> tuple[Path, Path]:
    """The folders of a model and of what is made of it. Raises ValueError if there is no model, if `out` holds it or
    is no model's, and OSError if nothing can be written there."""
    if out is None:
        raise ValueError("a model in a folder is compressed into another one: give out=")
    folder, out = Path(folder), Path(out).resolve()  # what a link leads to is replaced, not the link
    if out == folder.resolve():
        raise ValueError(f"{out} is the model itself: choose another folder for out")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give the folder of a model of transformers")
    if folder.resolve().is_relative_to(out):
        raise ValueError(f"{out} would be replaced, with the model in it: choose another folder for out")
    if out.suffix == GGUF:
        if out.is_dir():
            raise ValueError(f"{out} is a folder: choose another file")
        written.check_place(out)
    else:
        written.check_out(out)
    return folder, out


def compress_folder(
    folder: Path,
    recipe: Recipe,
    calibration: Iterable[Any] | None,
    out: str | Path | None,
    tokenizer: Any = None,
    progress: Count | None = None,
) -> Compressed:
    """Compress a model in a folder into another folder: see `tutti.compress`."""
    folder, out = checked_folders(folder, out)
    data = list(calibration) if calibration is not None else None
    source = Files(folder, out, recipe, _digest(data))
    run = Compression(source, recipe, data, tokenizer, progress)
    written.check(source.model, run.schemes)
    source.walks = bool(run.batches)
    compressed = run.run()
    return Compressed(None, compressed.report, recipe, out)


def _digest(data: list[Any] | None) -> str:
    """A digest of calibration data."""
    digest = hashlib.sha256()
    for batch in data or []:
        parts = batch.items() if hasattr(batch, "items") else [("", batch)]
        for name, x in parts:
            digest.update(f"{name} {getattr(x, 'dtype', '')} {list(getattr(x, 'shape', ''))}:".encode())
            digest.update(x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if isinstance(x, Tensor)
                        else str(x).encode())  # fmt: skip
    return digest.hexdigest()

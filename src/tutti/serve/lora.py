"""LoRA adapters of `peft`, several at once: each token uses the adapter of its request.

The low-rank factors of all adapters stand side by side: z = x A^T has a column for each of their ranks, columns of
other adapters than a token's own become zero, and z B^T is added to the layer's output (Hu et al., "LoRA", 2021).
Layers may be quantized: the factors are not (Dettmers et al., "QLoRA", 2023).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from tutti.nn.quantized.quantized_linear import QuantizedLinear
from tutti.weight_files import opened

KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.\w+)?\.weight")
FACTORS = ("lora_A", "lora_B")


class Adapters:
    """Adapters of a model.

    folders: by name, as `peft` saves them. down, up: factors of each layer, (ranks, in) and (out, ranks), in the dtype
    of the model. Raises ValueError for adapters that are not LoRA of linear layers.
    """

    def __init__(self, model: nn.Module, folders: Mapping[str, str | Path]):
        self.names = list(folders)
        all_factors = [_read(Path(x)) for x in folders.values()]
        layers = dict(model.named_modules())
        self.down: dict[str, Tensor] = {}
        self.up: dict[str, Tensor] = {}
        self.owners: dict[str, Tensor] = {}  # the number of the adapter that each rank belongs to, from 1
        for path in sorted({path for factors in all_factors for path in factors}):
            layer = layers.get(path)
            if not isinstance(layer, nn.Linear | QuantizedLinear):
                raise ValueError(f"an adapter changes {path!r}, which is {type(layer).__name__}, not a Linear layer")
            own = [(i, *factors[path]) for i, factors in enumerate(all_factors, 1) if path in factors]
            for i, a, b in own:
                if (a.shape[1], b.shape[0]) != (layer.in_features, layer.out_features):
                    raise ValueError(f"adapter {self.names[i - 1]!r} is of another model: {path} is "
                                     f"{layer.in_features} x {layer.out_features}")  # fmt: skip
            weight = layer.q if isinstance(layer, QuantizedLinear) else layer.weight
            device, dtype = weight.device, layer.weight.dtype
            self.down[path] = torch.cat([a for _, a, _ in own]).to(device, dtype)
            self.up[path] = torch.cat([b for _, _, b in own], 1).to(device, dtype)
            self.owners[path] = torch.cat([torch.full((len(a),), i) for i, a, _ in own]).to(device)

    def number(self, name: str) -> int:
        """The number that tokens of a request have; 0 without an adapter. Raises ValueError if it is unknown."""
        if not name:
            return 0
        if name not in self.names:
            raise ValueError(f"there is no adapter {name!r}; there is {', '.join(self.names) or 'none'}")
        return self.names.index(name) + 1

    @contextmanager
    def added(self, model: nn.Module, numbers: Tensor) -> Iterator[None]:
        """Within the block, layers add what the adapters say. numbers (tokens,): the adapter of each token."""
        layers = dict(model.named_modules())
        hooks = [layers[path].register_forward_hook(self._hook(path, numbers)) for path in self.down]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, path: str, numbers: Tensor) -> Callable:
        def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            active = numbers[:, None] == self.owners[path]
            z = (inputs[0] @ self.down[path].t()) * active.to(output.dtype)
            return output + z @ self.up[path].t()

        return add


def _read(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors of an adapter by layer; B is scaled."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        with opened(folder / "adapter_model.safetensors") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder} is no adapter of peft: {error}") from error
    refused = [key for key in ("use_dora", "lora_bias", "rank_pattern", "alpha_pattern") if config.get(key)]
    if config.get("peft_type") != "LORA" or refused:
        kind = ", ".join([str(config.get("peft_type")), *refused])
        raise ValueError(f"{folder} is {kind}; served adapters are plain LoRA: merge it into the model instead")
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    factors: dict[str, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        match = KEY.fullmatch(key)
        if match is None:
            raise ValueError(f"{folder} has {key!r}; served adapters have only lora_A and lora_B")
        factors.setdefault(match[1], {})[match[2]] = x.float()
    return {path: (x["A"], x["B"] * scale) for path, x in factors.items()}

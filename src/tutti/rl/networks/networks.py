"""Neural networks whose parameters are one vector, so that algorithms treat parameters as a tensor.

    actor = Network(lambda: mlp([4, 64, 64, 2]))
    weights = actor.init(seed)  # float32 (actor.size,)
    logits = actor(weights, obs)

An optimizer step, a target network's average, a message to other processes and a population of agents are then
operations on one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from tutti.rl.networks.pixels import scaled

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}


class Network:
    """A pure function of a vector of weights and of inputs.

    make: returns the `nn.Module`, with its first weights drawn by torch's random numbers. Modules have no buffers.
    """

    def __init__(self, make: Callable[[], nn.Module]):
        self.make, self.module = make, make()
        if buffers := [name for name, _ in self.module.named_buffers()]:
            raise ValueError(f"a network of a vector of weights cannot have buffers, this one has {buffers}")
        self.shapes = {name: p.shape for name, p in self.module.named_parameters()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.size, self.dtype = sum(self.sizes), torch.float32

    def compute_in(self, dtype: torch.dtype) -> None:
        """Let the module compute in another dtype. Weights, inputs and outputs stay float32."""
        self.dtype = dtype

    def init(self, seed: int) -> Tensor:
        """First weights, float32 (size,). They depend on the seed only."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return torch.cat([p.detach().flatten() for p in self.make().parameters()])

    def __call__(self, weights: Tensor, *args: Any) -> Any:
        """The module's outputs with these weights, (size,). Inputs of uint8 are pixels, and become numbers up to 1."""
        args = pytree.tree_map_only(torch.Tensor, scaled, args)
        if self.dtype == torch.float32:
            return functional_call(self.module, self.named(weights), args)
        weights, args = pytree.tree_map_only(torch.Tensor, self._cast, (weights, args))
        return pytree.tree_map_only(
            torch.Tensor, torch.Tensor.float, functional_call(self.module, self.named(weights), args)
        )

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """The vector as parameters by name."""
        parts = weights.split(self.sizes)
        return {name: x.view(shape) for (name, shape), x in zip(self.shapes.items(), parts, strict=True)}


class Ensemble:
    """Several networks of one architecture. weights: (count, size); outputs have a leading dim `count`."""

    def __init__(self, make: Callable[[], nn.Module], count: int):
        self.one, self.count, self.size = Network(make), count, 0
        self.size = self.one.size

    def compute_in(self, dtype: torch.dtype) -> None:
        self.one.compute_in(dtype)

    def init(self, seed: int) -> Tensor:
        return torch.stack([self.one.init(seed * self.count + i) for i in range(self.count)])

    def __call__(self, weights: Tensor, *args: Any) -> Any:
        """All networks on the same inputs."""
        return torch.vmap(lambda w: self.one(w, *args))(weights)


def mlp(
    sizes: Sequence[int], activation: str = "tanh", gain: float | None = None, last: float = 1.0, norm: bool = False
) -> nn.Sequential:
    """A perceptron with layers of these sizes, input and output included.

    gain: gain of the orthogonal first weights of hidden layers, `last` that of the output layer, biases 0 (as on-policy
        algorithms have them); without it PyTorch's own. norm: whether each hidden layer is followed by a LayerNorm.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        linear, at_end = nn.Linear(a, b), i == len(sizes) - 2
        if gain is not None:
            nn.init.orthogonal_(linear.weight, last if at_end else gain)
            nn.init.zeros_(linear.bias)
        layers.append(linear)
        if not at_end:
            layers += [nn.LayerNorm(b)] * norm + [ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


GAIN = math.sqrt(2)  # of orthogonal weights before tanh and relu

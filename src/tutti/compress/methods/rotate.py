"""Rotation before quantizing (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456): no channel is an outlier any more.

RMSNorm commutes with rotations once its weight is folded into the layers that read it. So what blocks read and write
is multiplied by an orthogonal R (h, h): R turns the embeddings, the inputs of layers that read it (W R) and the
outputs of layers that write it (R^T W). R is a Hadamard matrix with random signs, divided by sqrt(h); where h is no
power of two, its odd factor has a random orthogonal matrix. Within each head, what v_proj makes and o_proj reads is
rotated, too. Nothing is computed at run time: the inputs of down_proj, which would need that, stay as they are.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tutti.compress.blocks import Walk, _replaced, first
from tutti.compress.experts import Expert, ExpertLayers, is_experts
from tutti.compress.folds import close, find, is_norm, offset_of, outputs
from tutti.compress.recipe import Rotate


def hadamard(n: int) -> Tensor:
    """The Hadamard matrix (n, n) of a power of two, float64, orthogonal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / n**0.5


def rotation(n: int, seed: int = 0) -> Tensor:
    """R (n, n), float64. Its random numbers are those of the CPU on every device."""
    draw, default = torch.Generator().manual_seed(seed), torch.get_default_device()
    even = n & -n
    matrix = hadamard(even)
    if n > even:
        draws = torch.randn(n // even, n // even, generator=draw, dtype=torch.float64, device="cpu")
        odd = torch.linalg.qr(draws)[0].contiguous()
        matrix = torch.kron(odd.to(default), matrix)
    signs = torch.randint(0, 2, (n,), generator=draw, dtype=torch.float64, device="cpu").to(default) * 2 - 1
    return signs.unsqueeze(1) * matrix


def reads(layer: nn.Module, turn: Tensor) -> None:
    """Turn the inputs of a layer: W R."""
    weight: Tensor = layer.weight.data  # pyright: ignore
    weight.copy_(weight.double() @ turn)


def writes(layer: nn.Module, turn: Tensor) -> None:
    """Turn the outputs of a layer: R^T W, and its bias."""
    weight: Tensor = layer.weight.data  # pyright: ignore
    weight.copy_(turn.T @ weight.double())
    if (bias := getattr(layer, "bias", None)) is not None:
        bias.data.copy_(bias.data.double() @ turn)


def fold_norm(norm: nn.Module, readers: list[nn.Module]) -> None:
    """Move the weight of an RMSNorm into the layers that read its outputs."""
    weight: Tensor = norm.weight.data  # pyright: ignore
    offset = offset_of(norm)
    for reader in readers:
        reader.weight.data.copy_(reader.weight.data.double() * (weight.double() + offset))  # pyright: ignore
    weight.fill_(1 - offset)


def check(model: Any, step: Rotate) -> None:
    """Raise ValueError for an output layer that is tied to the embeddings, unless a step unties it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is embedding.weight and not step.untie:
        raise ValueError("the output layer is tied to the embeddings, and a rotation changes them in two ways: use "
                         "'rotate-untie', which makes it a layer of its own, or do not rotate")  # fmt: skip


class Turn:
    """One rotation of a model, block by block. Raises ValueError where it cannot be folded."""

    def __init__(self, model: Any, step: Rotate):
        self.model, self.step = model, step
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.turn = rotation(self.embedding.weight.shape[1], step.seed)

    def begin(self, walk: Walk) -> None:
        """Turn the embeddings."""
        if self.head is not None and self.head.weight is self.embedding.weight:
            self.head.weight = nn.Parameter(self.head.weight.detach().clone(), requires_grad=False)
            self.model.config.tie_word_embeddings = False
            self.model.config.get_text_config().tie_word_embeddings = False
        walk.begin()
        expected = walk.hidden[0].double() @ self.turn
        reads(self.embedding, self.turn)
        walk.begin()
        if not close(walk.hidden[0], expected.to(walk.hidden[0].dtype)):
            self._refuse("what the first block reads is no linear function of the embeddings alone")

    def block(self, walk: Walk, i: int) -> None:
        """Turn block i, whose inputs are turned already."""
        block, turned = walk.blocks[i], walk.hidden[0]
        for name, x in list(block.named_modules()):
            if is_experts(x):
                block.set_submodule(name, ExpertLayers(x))
        layers = {path: x for path, x in block.named_modules() if type(x) is nn.Linear}
        walk.hidden[0] = (turned.double() @ self.turn.T).to(turned.dtype)
        expected, folds = outputs(walk, i).double() @ self.turn, find(walk, i, layers)
        norms = [x for x in folds if x.is_norm]
        readers = {id(y) for x in norms for y in x.readers}
        inner = {id(y) for x in block.modules() if isinstance(x, Expert) for y in (x.gate_proj, x.up_proj)}
        for x in norms:
            fold_norm(x.producer, x.readers)
            for y in x.readers:
                reads(y, self.turn)
        for path, x in layers.items():
            last = path.rpartition(".")[2]
            if id(x) not in readers | inner and x.out_features == len(self.turn) and last not in ("v_proj", "up_proj"):
                writes(x, self.turn)
        if self.step.heads:
            self._heads(block)
        walk.hidden[0] = turned
        if not close(outputs(walk, i), expected.to(turned.dtype)):
            self._refuse(
                f"{type(block).__name__} has norms that are no RMSNorm of what it reads, or norms of what it writes"
            )

    def _heads(self, block: nn.Module) -> None:
        for parent in block.modules():
            children, width = dict(parent.named_children()), int(getattr(parent, "head_dim", 0) or 0)
            one, two = children.get("v_proj"), children.get("o_proj")
            if type(one) is nn.Linear and type(two) is nn.Linear and width and width & (width - 1) == 0:
                turn = hadamard(width)
                weight = one.weight.data.double().unflatten(0, (-1, width))
                one.weight.data.copy_(torch.einsum("gdk,de->gek", weight, turn).flatten(0, 1))
                if one.bias is not None:
                    one.bias.data.copy_((one.bias.data.double().unflatten(0, (-1, width)) @ turn).flatten())
                read = two.weight.data.double().unflatten(1, (-1, width))
                two.weight.data.copy_((read @ turn).flatten(1))

    def end(self, walk: Walk) -> None:
        """Turn the output layer. The data has passed all blocks."""
        turned = walk.hidden[0]
        walk.hidden[0] = (turned.double() @ self.turn.T).to(turned.dtype)
        norms: list[nn.Module] = []
        expected = self._logits(walk, norms)
        head = self.head
        if head is None or len(norms) != 1:
            self._refuse("one RMSNorm should stand between its blocks and its output layer")
        fold_norm(norms[0], [head])
        reads(head, self.turn)
        walk.hidden[0] = turned
        if not close(self._logits(walk, norms), expected):
            self._refuse("its output layer does not read what a single RMSNorm makes")

    def _logits(self, walk: Walk, norms: list[nn.Module]) -> Tensor:
        inside = {x for block in walk.blocks for x in block.modules()}
        called: list[nn.Module] = []
        hooks = [x.register_forward_pre_hook(lambda module, args: called.append(module))
                 for x in self.model.modules() if is_norm(x) and x not in inside]  # fmt: skip

        def passed(i: int, block: nn.Module) -> Any:
            return lambda x, *args, **kwargs: walk.hidden[0] if walk.plain else (walk.hidden[0],)

        try:
            with _replaced(walk.blocks, passed):
                output = self.model(**walk.batches[0], use_cache=False)
        finally:
            for x in hooks:
                x.remove()
        norms[:] = called
        return first(output.logits if hasattr(output, "logits") else output)

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{type(self.model).__name__} cannot be rotated: {why}")

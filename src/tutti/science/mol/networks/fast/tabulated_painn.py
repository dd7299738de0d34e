"""PaiNN with tabulated filters: painn.cpp."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from tutti.science.mol.networks.fast.tabulated import Tabulated, padded, panels, stacked


class TabulatedPaiNN(Tabulated):
    name = "painn"

    def layout(self, state: dict[str, Tensor], tables: Tensor) -> list[Tensor]:
        one, two = (stacked(state, "messages", f"context.{k}.weight") for k in (0, 2))
        one_bias, two_bias = (stacked(state, "messages", f"context.{k}.bias") for k in (0, 2))
        vectors, enter, leave = (
            stacked(state, "mixings", f"{name}.weight") for name in ("vectors", "context.0", "context.2")
        )
        enter_bias, leave_bias = (stacked(state, "mixings", f"context.{k}.bias") for k in (0, 2))
        embedding, half = state["embedding.weight"], state["readout.0.weight"]
        first = silu(embedding @ one[0].T + one_bias[0]) @ two[0].T + two_bias[0]
        two, leave, vectors = _rows(two, 3), _rows(leave, 3), _rows(vectors, 2)
        enter = _chunks(enter, 2)
        return [
            padded(embedding), _chunks(first, 3), _chunks(tables, 3),
            panels(one), padded(one_bias), panels(one.mT),
            panels(two), _chunks(two_bias, 3), panels(two.mT),
            panels(vectors), panels(vectors.mT),
            panels(enter), padded(enter_bias), panels(enter.mT),
            panels(leave), _chunks(leave_bias, 3), panels(leave.mT),
            panels(half), padded(state["readout.0.bias"]), panels(half.mT), padded(state["readout.2.weight"][0]),
        ]  # fmt: skip


def _chunks(x: Tensor, count: int) -> Tensor:
    """Each of `count` chunks of the last dim padded."""
    return padded(x.unflatten(-1, (count, -1))).flatten(-2)


def _rows(weight: Tensor, count: int) -> Tensor:
    """Weights (L, n, k) with each of `count` chunks of n padded."""
    return _chunks(weight.mT, count).mT

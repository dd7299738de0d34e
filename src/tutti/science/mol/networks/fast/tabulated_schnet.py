"""SchNet with tabulated filters: schnet.cpp."""

from __future__ import annotations

from torch import Tensor

from tutti.science.mol.networks.fast.tabulated import Tabulated, padded, panels, stacked


class TabulatedSchNet(Tabulated):
    name = "schnet"

    def layout(self, state: dict[str, Tensor], tables: Tensor) -> list[Tensor]:
        inward = stacked(state, "interactions", "inward.weight")
        one, two = (stacked(state, "interactions", f"outward.{k}.weight") for k in (0, 2))
        one_bias, two_bias = (stacked(state, "interactions", f"outward.{k}.bias") for k in (0, 2))
        embedding, half = state["embedding.weight"], state["readout.0.weight"]
        return [
            padded(embedding), padded(embedding @ inward[0].T), padded(tables),
            panels(inward), panels(inward.mT),
            panels(one), padded(one_bias), panels(one.mT),
            panels(two), padded(two_bias), panels(two.mT),
            panels(half), padded(state["readout.0.bias"]), panels(half.mT), padded(state["readout.2.weight"][0]),
        ]  # fmt: skip

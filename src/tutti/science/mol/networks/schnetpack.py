"""Weights of SchNetPack 2: its SchNet and PaiNN with the same weights give the same energies here.

    network.load_state_dict(from_schnetpack(network, model.state_dict()))

SchNetPack's readout must have the hidden layer of its default, half the features, and SchNet's the activation
`shifted_softplus`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from tutti.science.mol.networks.network import Network
from tutti.science.mol.networks.painn import PaiNN
from tutti.science.mol.networks.schnet import SchNet

READOUT = (
    (r"output_modules\.\d+\.outnet\.0\.(.*)", r"readout.0.\1"),
    (r"output_modules\.\d+\.outnet\.1\.(.*)", r"readout.2.\1"),
)
NAMES = {
    SchNet: (
        (r"representation\.embedding\.weight", "embedding.weight"),
        (r"representation\.interactions\.(\d+)\.in2f\.weight", r"interactions.\1.inward.weight"),
        (r"representation\.interactions\.(\d+)\.f2out\.0\.(.*)", r"interactions.\1.outward.0.\2"),
        (r"representation\.interactions\.(\d+)\.f2out\.1\.(.*)", r"interactions.\1.outward.2.\2"),
        (r"representation\.interactions\.(\d+)\.filter_network\.0\.(.*)", r"interactions.\1.filter.0.\2"),
        (r"representation\.interactions\.(\d+)\.filter_network\.1\.(.*)", r"interactions.\1.filter.2.\2"),
        *READOUT,
    ),
    PaiNN: (
        (r"representation\.embedding\.weight", "embedding.weight"),
        (r"representation\.filter_net\.(.*)", r"filter.\1"),
        (r"representation\.interactions\.(\d+)\.interatomic_context_net\.0\.(.*)", r"messages.\1.context.0.\2"),
        (r"representation\.interactions\.(\d+)\.interatomic_context_net\.1\.(.*)", r"messages.\1.context.2.\2"),
        (r"representation\.mixing\.(\d+)\.mu_channel_mix\.weight", r"mixings.\1.vectors.weight"),
        (r"representation\.mixing\.(\d+)\.intraatomic_context_net\.0\.(.*)", r"mixings.\1.context.0.\2"),
        (r"representation\.mixing\.(\d+)\.intraatomic_context_net\.1\.(.*)", r"mixings.\1.context.2.\2"),
        *READOUT,
    ),
}
IGNORED = r"representation\.(radial_basis|cutoff_fn)\..*|postprocessors\..*"


def from_schnetpack(network: Network, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state of `network` with the weights of a SchNetPack model. Raises ValueError for weights that do not fit."""
    if type(network) not in NAMES:
        raise ValueError(f"SchNetPack has no {type(network).__name__}: give a SchNet or a PaiNN")
    buffers = {name: x for name, x in network.named_buffers()}
    for name, x in state.items():
        rules = ((pattern, to) for pattern, to in NAMES[type(network)] if re.fullmatch(pattern, name))
        if (rule := next(rules, None)) is not None:
            buffers[re.sub(*rule, name)] = x
        elif not re.fullmatch(IGNORED, name):
            raise ValueError(f"the SchNetPack model has {name}, which {type(network).__name__} has no place for")
    for end in ("weight", "bias"):  # one layer has the filters of all interactions
        if (whole := buffers.pop(f"filter.{end}", None)) is not None:
            for k, part in enumerate(whole.chunk(len(network.messages))):  # pyright: ignore
                buffers[f"messages.{k}.filter.{end}"] = part
    ours = network.state_dict()
    embedding = buffers.get("embedding.weight")
    whole = ours["embedding.weight"]
    if embedding is not None and embedding.shape[1:] == whole.shape[1:] and len(embedding) < len(whole):
        rest = whole[len(embedding) :].to(embedding)  # SchNetPack knows fewer elements
        buffers["embedding.weight"] = torch.cat([embedding, rest])
    for name, x in ours.items():
        if name not in buffers or buffers[name].shape != x.shape:
            there = tuple(buffers[name].shape) if name in buffers else "missing"
            raise ValueError(f"{name} of {type(network).__name__} has the shape {tuple(x.shape)}; in the SchNetPack "
                             f"model it is {there}: build the network with its sizes")  # fmt: skip
    return buffers

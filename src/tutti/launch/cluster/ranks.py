"""Places of the ranks of a job, and the environment variables of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RankPlace:
    """The place of a rank. node: an identifier of its machine. address: address of the machine, for the others.
    gpus: GPUs that the cluster gave it there."""

    node: str
    address: str
    gpus: tuple[str, ...] = ()


def order(places: Sequence[RankPlace]) -> list[int]:
    """Indices of the places in the order of ranks: those of a node follow one another, nodes as they come first."""
    nodes = list(dict.fromkeys(x.node for x in places))
    return sorted(range(len(places)), key=lambda i: (nodes.index(places[i].node), i))


def environments(
    places: Sequence[RankPlace], port: int, restart: int, restarts: int, name: str
) -> list[dict[str, str]]:
    """The variables of torch.distributed for each rank, whose places are in the order of ranks. They meet at `port` of
    rank 0's machine. restart: how often they were started before, of at most `restarts`.

    A rank sees all GPUs of its job on its machine, so that its local rank chooses its own, as torchrun has it.
    """
    nodes: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place.node, []).append(rank)
    environments_of_ranks = []
    for rank, place in enumerate(places):
        here = nodes[place.node]
        variables = {
            "RANK": rank,
            "WORLD_SIZE": len(places),
            "LOCAL_RANK": here.index(rank),
            "LOCAL_WORLD_SIZE": len(here),
            "GROUP_RANK": list(nodes).index(place.node),
            "GROUP_WORLD_SIZE": len(nodes),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": restart,
            "TORCHELASTIC_MAX_RESTARTS": restarts,
            "TORCHELASTIC_RUN_ID": name,
        }
        if gpus := [gpu for index in here for gpu in places[index].gpus]:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        environments_of_ranks.append({key: str(value) for key, value in variables.items()})
    return environments_of_ranks


def on_one_machine(places: Sequence[RankPlace]) -> list[RankPlace]:
    """The places, with the loopback address if all are on the same machine: its name need not resolve then."""
    alone = len({x.node for x in places}) == 1
    return [replace(x, address="127.0.0.1") for x in places] if alone else list(places)

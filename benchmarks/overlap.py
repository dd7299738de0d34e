"""Communication hidden behind computation: how much of it, simulated, and whether a measured step gets as much shorter.

Simulated: a step of Llama-2 13B with 10 of its 40 layers (sequences of 4096, bfloat16 with float32 masters, AdamW,
level O2) on eight A100s, by NVLink and by links of 25 GB/s. Of each plan: the share of communication that is hidden in
the forward and in the backward pass when collectives are waited for where they stand (`waits`), when they are begun
early (`begun`), with the batch in two copies besides (`copies`), where a device has several sequences, and, instead,
with what lies between communications in two parts (`regions`), also where it has one. `bound` is the most that could
be: seconds of computation over those of communication, or 1. The order is found by the list scheduler; nothing about
the model is told to it.

Measured: a small Llama under tensor parallelism on two Gloo processes, whose links are made slow: a collective is not
over before it would be on links of the cluster that the simulator is given, one after the other. The device's speed is
one number, fitted on the steps that wait. Two steps of the same plan take turns, one that waits for collectives where
they stand, one that hides them. `shorter` is how many seconds that saves, measured and as the simulator says, `ratio`
the one over the other.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
import transformers

sys.path.insert(0, str(Path(__file__).parent))

import harness
import tutti
from tutti.api import step as module
from tutti.exec.kernels.codegen import Request
from tutti.exec.runtimes.runtime import Distributed, join_job
from tutti.exec.runtimes.underway import UnderWay
from tutti.hardware import Cluster
from tutti.hardware.device import Device, Link
from tutti.hardware.local import local
from tutti.hardware.presets import PRESETS, RING_ONLY
from tutti.lower.variants.vary import vary
from tutti.plan.layouts.reshard import sent_bytes
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.plan.textbook import parse_name
from tutti.sim.dryrun import dry_run
from tutti.sim.simulate import simulate
from tutti.sim.step import DryRun

LLAMA_13B = dict(hidden_size=5120, num_attention_heads=40, intermediate_size=13824, vocab_size=32000)
SLOW = Link(25e9, 5e-6, source="25 GB/s a device", ways=RING_ONLY)
CASES = (("nvlink", "tp8", 2), ("25 GB/s", "tp8", 2), ("25 GB/s", "tp4xdp2", 8), ("25 GB/s", "tp2xdp4", 32),
         ("nvlink", "tp8", 1), ("25 GB/s", "tp8", 1), ("25 GB/s", "tp4xdp2", 2), ("25 GB/s", "tp2xdp4", 4))  # fmt: skip
KINDS = {"waits": "", "begun": "", "copies": "xsplits2", "regions": "xoverlap2"}


def cluster_of(links: str) -> Cluster:
    device = PRESETS["a100-80"].device
    return Cluster.parse("a100-80:8") if links == "nvlink" else Cluster(device, ((8, SLOW),))


def shares(prediction: DryRun) -> dict[str, Any]:
    """The hidden share of the forward and backward pass, and seconds of computation over those of communication."""
    computing, sending, waiting = defaultdict(float), defaultdict(float), defaultdict(float)
    for part in prediction.parts:
        played = part.simulation
        for span in played.spans:
            task = played.task(span)
            (sending if task.kind else computing)[task.phase] += span.end - span.begin
        for stall in played.stalls:
            waiting[played.task(stall).phase] += stall.end - stall.begin
    figures: dict[str, Any] = {"seconds": prediction.seconds, "gib": prediction.memory.peak / 2**30}
    for phase in ("forward", "backward"):
        figures[phase] = 1 - waiting[phase] / sending[phase]
        figures[f"{phase}_bound"] = min(1.0, computing[phase] / sending[phase])
    return figures


def simulated(layers: int) -> list[dict[str, Any]]:
    rows = []
    for links, name, batch in CASES:
        config = transformers.LlamaConfig(num_hidden_layers=layers, max_position_embeddings=4096, **LLAMA_13B)
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
            ids = torch.empty(batch, 4096, dtype=torch.long)
        whole = tutti.capture(
            model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters()), fp32_master_weights=True
        )
        cluster, row = cluster_of(links), {"links": links, "plan": name, "layers": layers, "batch": batch}
        for kind, more in KINDS.items():
            book = parse_name(name + more, 8)
            if book.batch_splits > 1 and batch // book.dp == 1:
                continue
            graph = vary(whole, book.variant)
            plan = Planner(graph, cluster, variant=book.variant).named(name + more)
            begin = time.perf_counter()
            row[kind] = shares(dry_run(graph, plan, cluster, "O2", overlaps=kind != "waits"))
            row[kind] |= {"calls": len(graph.calls), "simulation_seconds": time.perf_counter() - begin}
            harness.say(f"{links}, {name}, {kind}: {row[kind]}")
        rows.append(row)
    return rows


class Slowed(Distributed):
    """Links that take as long as those of a cluster, one collective after the other."""

    def __init__(self, mesh, cluster: Cluster):
        super().__init__(mesh)
        self.cluster, self.free = cluster, 0.0

    def begin(self, request: Request) -> UnderWay:
        begun, k = super().begin(request), self.mesh[request.axis]
        sent = sent_bytes(request.kind, request.tensor.nbytes, k)
        self.free = max(self.free, time.perf_counter()) + self.cluster.time(request.kind, sent, 1, k)
        return replace(begun, works=(*begun.works, Until(self.free)))


class Until:
    """Work that is over at a time."""

    def __init__(self, when: float):
        self.when = when

    def wait(self) -> None:
        time.sleep(max(0.0, self.when - time.perf_counter()))


def rank_of_two(rank: int, port: int, steps: int, layers: int, queue) -> None:
    import os

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"TUTTI_PLANS": "off"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    join_job(torch.device("cpu"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=384, num_hidden_layers=layers, num_attention_heads=6, intermediate_size=1024, vocab_size=512
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 512, (16, 128))
    batch = {"input_ids": ids, "labels": ids}
    here = Cluster.from_json(queue.get()) if rank else local(2)
    if not rank:
        queue.put(here.to_json())
    link = Link(0.03e9, 1e-3, source="made slow", ways=RING_ONLY)

    def step(device: Device, overlaps: bool, plan: Plan | str = "tp2xsplits2") -> tutti.Step:
        cluster = Cluster(replace(device, overlaps=overlaps), ((2, link),))
        module.runtime_for = lambda mesh: Slowed(mesh, cluster)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return tutti.parallelize(model, optimizer, batch, cluster=cluster, plan=plan, level="O0")

    plain = replace(here.device, products={}, transposed={}, streams={})  # figures that one number can scale
    first = step(plain, False)
    device = slowed(plain, timed(first, batch, steps) / first.plan.predicted.compute_seconds,
                    first.plan.predicted.communication_seconds / first.plan.predicted.compute_seconds)  # fmt: skip
    plan = first.plan.replace(prediction=None)
    variants = {"waits": step(device, False, plan), "begun": step(device, True, plan)}
    losses = {kind: [one(batch).item()] for kind, one in variants.items()}
    took: dict[str, list[float]] = {kind: [] for kind in variants}
    for _ in range(steps):
        for kind, one in variants.items():
            torch.distributed.barrier()
            begin = time.perf_counter()
            losses[kind].append(one(batch).item())
            took[kind].append(time.perf_counter() - begin)
    if not rank:
        usual = first.plan.predicted  # by the figures of the device, which has been slower in these rounds
        now = sorted(took["waits"])[steps // 2] / usual.compute_seconds
        fitted = slowed(plain, now, usual.communication_seconds / usual.compute_seconds)
        said = {}
        for kind, one in variants.items():
            played = simulate([one.program], Cluster(fitted, ((2, link),)))
            computing, waiting = played.busy(0)["compute"], sum(played.exposed(0).values())
            said[kind] = played.seconds, computing, waiting, played.busy(0)["tp"] - waiting
        queue.put((took, losses, said))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def timed(step: tutti.Step, batch: dict[str, torch.Tensor], steps: int) -> float:
    """The median seconds of a step, the same on both ranks."""
    took = []
    for _ in range(1 + steps):
        begin = time.perf_counter()
        step(batch)
        took.append(time.perf_counter() - begin)
    mean = torch.tensor(sorted(took[1:])[steps // 2])
    torch.distributed.all_reduce(mean)
    return mean.item() / 2


def slowed(device: Device, longer: float, sending: float) -> Device:
    """The device as slow as it is now, among other programs: a step takes `longer` than it computes by the device's
    figures, of which `sending` is communication."""
    factor = longer - sending
    return replace(device, peak={dtype: peak / factor for dtype, peak in device.peak.items()},
                   bandwidth=device.bandwidth / factor, overhead=device.overhead * factor)  # fmt: skip


def measured(steps: int, layers: int) -> dict[str, Any]:
    import socket

    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=rank_of_two, args=(r, port, steps, layers, queue)) for r in range(2)]
    for process in processes:
        process.start()
    answer = queue.get()
    while isinstance(answer, str):  # the cluster, on its way from rank 0 to rank 1
        queue.put(answer)
        time.sleep(0.5)
        answer = queue.get()
    for process in processes:
        process.join()
    took, losses, said = answer
    assert losses["waits"] == losses["begun"], "the same numbers, bit for bit"
    seconds = {kind: sorted(times)[len(times) // 2] for kind, times in took.items()}
    each = sorted(a - b for a, b in zip(took["waits"], took["begun"], strict=True))
    shorter = {"measured": each[len(each) // 2], "simulated": said["waits"][0] - said["begun"][0]}
    names = ("step", "computing", "waiting", "hidden")
    return {
        "seconds": seconds,
        "simulated": {kind: dict(zip(names, numbers, strict=True)) for kind, numbers in said.items()},
        "shorter": shorter,
        "quartiles": [each[len(each) // 4], each[3 * len(each) // 4]],
        "ratio": shorter["measured"] / shorter["simulated"],
    }


def run(quick: bool) -> dict[str, Any]:
    gloo = measured(8, 2) if quick else measured(12, 2)
    harness.say(f"measured: {gloo}")
    return {"measured": gloo, "simulated": simulated(2 if quick else 10)}


if __name__ == "__main__":
    harness.main(run, __file__)

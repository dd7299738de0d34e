"""What a restart on 2,048 devices reads, and how long it takes, by a dry run.

A T5 of 200 billion parameters (48 + 48 layers, hidden 12288; float16 with float32 masters and AdamW: 14 bytes for each)
on V100s in nodes of 8, under a pipeline of 16 stages with tensor parallelism over each node and ZeRO-1: from a
checkpoint of the same plan, of one without a pipeline, and of one on half as many devices; on the storage that
`tutti dryrun --restart` takes. Beside them the two hours that the published training of such models took to restart.
`--quick` has a T5 of 4 + 4 layers on four nodes.
"""

from __future__ import annotations

import time
from typing import Any

import harness
from pipelines import t5
from tutti.hardware import Cluster
from tutti.ir.step_graph import StepGraph
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.plan.textbook import parse_name
from tutti.sim.dryrun import dry_run
from tutti.sim.restart import restart

PUBLISHED = 7200  # seconds
NODE = 8


def run(quick: bool) -> dict[str, Any]:
    layers, hidden, nodes, stages = (4, 1024, 4, 2) if quick else (48, 12288, 256, 16)
    start = time.perf_counter()
    cluster, count = Cluster.parse(f"v100-32:{nodes}x{NODE}"), 4 * stages
    graph = t5(layers, hidden, 2 * nodes // stages, 512, 512)  # a microbatch
    captured = time.perf_counter() - start
    harness.say(f"captured in {captured:.0f} s")

    def named(name: str, devices: Cluster, graph: StepGraph = graph) -> Plan:
        return Planner(graph, devices, (), count, parse_name(name, devices.size).variant).named(name)

    name = f"pp{stages}xtp{NODE}xzero1"
    plan = named(name, cluster)
    harness.say(f"planned after {time.perf_counter() - start:.0f} s")
    step = dry_run(graph, plan, cluster, "O2").seconds
    planned = time.perf_counter() - start
    harness.say(f"simulated after {planned:.0f} s: {step:.1f} s a step")
    befores = {
        "same": plan,
        "without_pipeline": named(f"tp{NODE}xzero1", cluster, t5(layers, hidden, nodes, 512, 512)),
        "half_the_devices": named(name, Cluster.parse(f"v100-32:{nodes // 2}x{NODE}")),
    }
    figures: dict[str, Any] = {}
    for what, before in befores.items():
        begun = time.perf_counter()
        forecast = restart(graph, plan, NODE, before)
        disk, memory = forecast.checking + forecast.reading, forecast.checking_memory + forecast.receiving
        figures[what] = {
            "plan": before.name, "predicted_in_seconds": round(time.perf_counter() - begun, 2),
            "bytes_of_a_device": {"least": min(forecast.devices), "most": max(forecast.devices)},
            "bytes_of_a_machine": {"least": min(forecast.machines), "most": max(forecast.machines)},
            "bytes_sent_to_a_machine": {"least": min(forecast.sent), "most": max(forecast.sent)},
            "times_each_byte_is_read": round(forecast.times, 3),
            "seconds_from_disk": round(disk, 1), "seconds_from_memory": round(memory, 1),
            "first_step_after_seconds": round(disk + planned + step, 1),
            "published_over_first_step": round(PUBLISHED / (disk + planned + step), 1),
        }  # fmt: skip
        harness.say(f"{what}: {figures[what]}")
    parameters = sum(graph.spec(f"param:{n}").numel for n in graph.names("param"))
    return {
        "parameters": parameters, "devices": cluster.size, "plan": plan.name, "state_bytes": forecast.state,
        "step_seconds": round(step, 2), "captured_and_lowered_in_seconds": round(planned, 1), "from": figures,
    }  # fmt: skip


if __name__ == "__main__":
    harness.main(run, __file__)

"""The tables of `tutti dryrun --restart`: bytes that each device and machine reads, and seconds to the first step."""

from __future__ import annotations

from rich.console import Console

from tutti.cli.tables import table
from tutti.hardware import Cluster
from tutti.hardware.presets import PRESETS
from tutti.plan.explain import seconds, size
from tutti.sim.restart import Restart


def machine_width(cluster: Cluster) -> int:
    """Devices per machine."""
    preset = PRESETS.get(cluster.device.name)
    return min(cluster.size, preset.node if preset else cluster.levels[0][0])


def show_restart(restart: Restart, step: float, planned: float, console: Console) -> None:
    """step: seconds of one step. planned: seconds of capture and lowering on this machine."""
    console.print(f"restart    {size(restart.state)} of state, on {len(restart.machines):,} machines")
    shown = table("bytes read", "least", "median", "most")
    rows = {"per device": restart.devices, "per machine, without duplicates": restart.machines}
    if len(restart.machines) > 1:
        rows["received by a replaced machine, with in-memory copies"] = restart.sent
    for name, counts in rows.items():
        ordered = sorted(counts)
        shown.add_row(name, *(size(ordered[i]) for i in (0, len(ordered) // 2, -1)))
    console.print(shown)
    ways = {"from disk": (restart.checking, restart.reading)}
    if len(restart.machines) > 1:
        ways["from memory"] = restart.checking_memory, restart.receiving
    for name, (checking, reading) in ways.items():
        console.print(
            f"{name:11}{seconds(checking + reading)}: {seconds(checking)} for checksums, {seconds(reading)} to read; "
            f"with {seconds(planned)} for capture and lowering, the first step is done after "
            f"{seconds(checking + reading + planned + step)}"
        )
    console.print(f"storage    {size(sum(restart.machines))} read, each byte {restart.times:.2f} times, "
                  "and once more for checksums")  # fmt: skip

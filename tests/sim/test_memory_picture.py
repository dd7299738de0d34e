"""Memory over a step: the highest point of the course is the peak, and the picture is written."""

import pytest
import torch

import tutti
import zoo
from cases import crossed
from tutti.plan.planner import Planner
from tutti.sim.dryrun import dry_run
from tutti.sim.memory_picture import courses, save_memory

CASES = [("zero3", 1), ("zero1", 2), ("pp2xdp2", 4)]


@pytest.fixture(scope="module")
def graph():
    model = zoo.llama()
    return tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("name, count, level", crossed(CASES, ["O0", "O2"]))
def test_the_highest_point_is_the_peak(graph, name, count, level, tmp_path):
    cluster = tutti.Cluster.parse("h100:4")
    run = dry_run(graph, Planner(graph, cluster, accumulate=count).named(name), cluster, level)
    panels = courses(run)
    highest = max(sum(now.values()) for _, _, course in panels for _, now in course)
    assert highest == pytest.approx(run.memory.peak, rel=0.01 if "pp" in name else 0)  # of parts only their peaks
    for _, seconds, course in panels:
        times = [begin for begin, _ in course]
        assert times == sorted(times) and times[-1] <= seconds
    save_memory(run, tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    assert "optimizer state" in drawn and drawn.count("GiB") == len(panels)
    save_memory(run, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == drawn, "the same bytes for the same step"
    with pytest.raises(ValueError, match="must end in"):
        save_memory(run, tmp_path / "memory.gif")

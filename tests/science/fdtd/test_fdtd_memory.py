"""What is predicted of the memory of gradients, and schedules of checkpoints."""

from __future__ import annotations

import pytest
import torch

from tutti.science.em.fdtd import CPML, Current, Grid, Probe, Simulation, gaussian_up_to
from tutti.science.em.fdtd.stepping import march


def simulation():
    return Simulation(Grid((24, 22, 20), 0.01), CPML(4), [Current("Ez", (12, 12, 12), gaussian_up_to(2e9))],
                      [Probe("x", "Ez", [(6, 6, 6)])])  # fmt: skip


def test_schedules():
    eps = torch.ones(24, 22, 20, requires_grad=True)
    problem, _, _, _ = simulation().prepare(eps, 400, None, 1.0, None, (), None)
    needs = march.Needs(b=True)
    everything, root = (march.schedule(problem, needs, 400, checkpoints=x) for x in (1, 20))
    assert everything.length == 400 and root.length == 20 and root.bytes < everything.bytes / 4
    assert sum(n for _, n in root.segments) == 400
    bounded = march.schedule(problem, needs, 400, memory=root.bytes * 1.2)
    assert bounded.bytes <= root.bytes * 1.2 and bounded.length > 20
    with pytest.raises(ValueError, match="needs at least"):
        march.schedule(problem, needs, 400, memory=1000)
    with pytest.raises(ValueError, match="either checkpoints or memory"):
        march.schedule(problem, needs, 400, 2, 1e9)
    assert sum(x.numel() * 4 for x in problem.state()) == problem.state_bytes()


@pytest.mark.starts
@pytest.mark.filterwarnings("ignore:monitor .*nothing arrives")
def test_predicted_memory_is_what_is_allocated():
    """Bytes of the tensors of checkpoints, history, states and gradients at the peak, within 5 %."""
    eps = torch.ones(24, 22, 20, requires_grad=True)
    for options in ({"checkpoints": 10}, {"checkpoints": 1}):
        scene = simulation()
        scene.run(eps, 2)["x"].sum().backward()
        predicted = scene.adjoint_memory(eps, 100, **options)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            scene.run(eps, 100, **options)["x"].square().sum().backward()
        now = most = 0
        for event in sorted((x for x in profile.profiler.kineto_results.events() if x.name() == "[memory]"),
                            key=lambda x: x.start_ns()):  # fmt: skip
            now += event.nbytes()
            most = max(most, now)
        inputs = 3 * eps.numel() * 4  # coefficients
        assert most == pytest.approx(predicted + inputs, rel=0.05)

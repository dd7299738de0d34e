"""The time loop of other devices, as far as it runs on a CPU, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fdtd_cases import case

from tutti.science.em.fdtd.stepping.elsewhere import Sources
from tutti.science.em.fdtd.stepping.reference import Reference

pytestmark = [pytest.mark.starts, pytest.mark.filterwarnings("ignore:.*")]


@pytest.mark.parametrize("mode", ["TM", "3D"])
def test_sources_of_each_kind_are_added_as_the_reference_adds_them(mode):
    """From rest, a source of H alone and sources of E alone make all that there is after a step."""
    simulation, medium, _ = case(mode)
    for electric in (False, True):
        own = [x for x in simulation.sources if x.component.startswith("E") == electric]
        problem, waves, *_ = replace(simulation, sources=own, monitors=[]).prepare(
            medium["eps_r"].detach(), 40, medium["sigma"].detach(), 1.0, None, (), None
        )
        waves = waves.detach()
        wanted, state = Reference(problem).step(problem.state(), waves[7]), problem.state()
        Sources(problem).add(state, not electric, waves[7])
        assert not any(x.any() for x in state), "these are added at the other half of the step"
        Sources(problem).add(state, electric, waves[7])
        fields = slice(0, 3) if electric else slice(3, 6)
        assert sum(int(x.count_nonzero()) for x in state[fields]) >= 1 + electric
        for x, y in zip(state[fields], wanted[fields], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=0)


def test_a_hard_source_replaces_what_there_is_and_a_soft_one_adds_to_it():
    simulation, medium, _ = case("TM")
    (hard,) = (x for x in simulation.sources if x.hard)
    changes = []
    for one in (hard, replace(hard, hard=False)):
        problem, waves, *_ = replace(simulation, sources=[one], monitors=[]).prepare(
            medium["eps_r"].detach(), 40, None, 1.0, None, (), None
        )
        rest, risen = problem.state(), problem.state()
        for x in risen[:3]:
            x.fill_(3.0)
        for state in (rest, risen):
            Sources(problem).add(state, True, waves[int(waves.abs().argmax())])
        (field,) = (i for i in range(3) if rest[i].any())
        at = rest[field] != 0
        changes.append((risen[field] - rest[field])[at].tolist())
    assert changes == [[0.0], [pytest.approx(3.0)]]

"""Predictions of placements: pure arithmetic of measured costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tutti import cli
from tutti.cli.plan import rl as plan_rl
from tutti.hardware import Cluster
from tutti.rl.placement import fragments, links
from tutti.rl.placement.exchange import size_of
from tutti.rl.placement.forecast import HOSTED, Costs, Line, Machine, chosen, forecast, forecasts, on_device, places
from tutti.rl.placement.job import RunPlacement
from tutti.rl.placement.placement import Placed

ACTING = Costs(
    n_envs=64, n_steps=10, act=Line(0.0, 1e-3), learn=Line(2e-3), share=Line(2e-3), host=Line(1e-2), step=Line(0, 1e-3),
    chunk=Line(0, 1e3), policy=1e4, weights=1e4, means=1, push=1e-4, serial=1.0, spread=1.0, level="eager",
)  # fmt: skip
FREE = Machine(
    cores=64, most=64, message=Line(0.0), mean={2: Line(0.0)}, meet={2: Line(0.0)}, pipe=0.0, name="free messages"
)
TWO = replace(FREE, cores=2, most=4)


def seconds(costs: Costs, machine: Machine, *place) -> float:
    return forecast(RunPlacement(*place), costs, machine).seconds


def test_acting_scales_with_ranks_and_learning_does_not():
    assert seconds(ACTING, FREE) == pytest.approx(64e-3 + 2e-3)
    for ranks in (2, 8, 64):
        assert seconds(ACTING, FREE, "actors", ranks, ranks) == pytest.approx(64e-3 / ranks + 2e-3)
    best = chosen(forecasts(ACTING, FREE))
    assert best.place.ranks >= 16 and best.rate == pytest.approx(640 / best.seconds)


def test_ranks_share_the_cores_of_a_machine():
    four, two = (seconds(ACTING, TWO, "actors", r, r) for r in (4, 2))
    assert four == pytest.approx(two), "four ranks on two cores do not run four at a time"
    slowed = replace(TWO, stretch={1: 1.0, 2: 1.5})
    assert seconds(ACTING, slowed, "actors", 2, 2) == pytest.approx(1.5 * 32e-3 + 2e-3)


@pytest.mark.parametrize("placement", ["learners", "actors", "async", "server"])
def test_threads_that_exclude_one_another_are_no_faster_than_one(placement):
    apart = seconds(ACTING, TWO, placement, 2, 2)
    assert seconds(ACTING, TWO, placement, 2, 1) >= seconds(ACTING, TWO) > apart
    assert seconds(replace(ACTING, serial=0.5), TWO, placement, 2, 1) == pytest.approx(apart, rel=0.2)


def test_messages_are_paid_for_by_those_who_send_them():
    slow = replace(FREE, message=Line(1e-3), mean={2: Line(2e-3)})
    assert seconds(ACTING, slow, "actors", 4, 4) == pytest.approx(16e-3 + 2e-3 + 3 * 2e-3)
    many = replace(ACTING, means=10)
    assert seconds(many, slow, "learners", 2, 2) == pytest.approx(32e-3 + 2e-3 + 10 * 2e-3)
    assert seconds(many, slow, "learners", 2, 1) < seconds(many, FREE, "learners", 2, 1) + 1e-9
    dear = replace(FREE, message=Line(1.0), mean={2: Line(1.0)}, pipe=1.0)
    candidates = [x for x in forecasts(ACTING, dear) if x.place.processes > 1 or x.place.placement == "fused"]
    assert chosen(candidates).place == RunPlacement() and candidates[-1].bottleneck == "messages"


def test_async_hides_acting_behind_learning():
    even = replace(ACTING, learn=Line(0, 1e-3), act=Line(0, 1e-3), serial=0.5)
    assert seconds(even, FREE) == pytest.approx(128e-3)
    assert seconds(even, FREE, "async", 8, 8) < seconds(even, FREE, "actors", 8, 8)


def test_the_simplest_of_those_as_fast_is_chosen():
    learning = replace(ACTING, learn=Line(3.0), share=Line(3.0))
    ranked = forecasts(learning, FREE)
    assert ranked[0].place.ranks > 1 and chosen(ranked).place == RunPlacement()


def test_places_that_are_not_possible_are_left_out():
    refused = replace(ACTING, n_envs=12, refused={"async": f"X is {HOSTED}", "server": "a replay"})
    options = list(places(refused, replace(FREE, most=8)))
    assert (
        RunPlacement() in options
        and RunPlacement("learners", 4, 4) in options
        and RunPlacement("learners", 2, 1) in options
    )
    assert RunPlacement("environments", 4) in options and RunPlacement("actors", 4, 1) not in options
    assert {p.ranks for p in options} == {1, 2, 4} and {p.placement for p in options} >= {"environments", "actors"}
    assert not {p.placement for p in options} & {"async", "server"}


def test_learners_need_batches_that_they_can_share():
    placements = places(replace(ACTING, batch=6), replace(FREE, most=8))
    assert {p.ranks for p in placements if p.placement == "learners"} == {2}


def test_lines_do_not_fall_and_do_not_begin_below_zero():
    assert Line.through(2, 3.0, 4, 5.0) == Line(1.0, 1.0)
    assert Line.through(2, 5.0, 4, 4.0) == Line(4.0, 0.0)
    assert Line.through(2, 1.0, 4, 8.0) == Line(0.0, 2.0)
    assert Line.through(4, 8.0, 4, 8.0)(2) == 4.0


def test_other_devices_scale_programs_but_not_environments_of_the_host():
    moved = on_device(replace(ACTING, act=Line(1e-2, 1e-3)), 2.0, 0.1)
    assert moved.act == Line(2e-2, 1e-4) and moved.step == ACTING.step
    hosted = replace(ACTING, act=Line(3e-2, 1e-3), refused={"async": f"X is {HOSTED}"})
    assert on_device(hosted, 0.5, 0.1).act == Line(pytest.approx(3e-2 - 5e-3), 1e-3)


def test_links_of_clusters_are_those_of_their_presets():
    there = links.of_cluster(Cluster.parse("cpu:8x8"), TWO)
    assert there.cores == there.most == 64 and there.pipe == TWO.pipe and sorted(there.mean) == [2, 4, 8, 16, 32, 64]
    assert there.message(0) == pytest.approx(1e-4) and there.mean[64](1e6) > there.mean[2](1e6)


def test_other_programs_delay_several_processes_and_their_messages():
    busy = replace(TWO, stretch={1: 1.0, 2: 2.5, 4: 5.0}, message=Line(1e-3))
    assert seconds(ACTING, busy, "actors", 2, 2) == pytest.approx(2.5 * 32e-3 + 2e-3 + 2.5 * 2e-3)
    assert busy.hindered(4) == 2.5 and FREE.hindered(4) == 1.0
    assert chosen(forecasts(ACTING, busy)).place.processes == 1


def test_older_policies_are_chosen_only_if_they_are_worth_it():
    predictions = [
        forecast(place, ACTING, FREE) for place in (RunPlacement("actors", 8, 8), RunPlacement("async", 8, 8))
    ]
    for faster, kind in ((0.95, "actors"), (0.8, "async")):
        moved = [replace(predictions[0], seconds=1.0), replace(predictions[1], seconds=faster)]
        assert chosen(moved).place.placement == kind


@pytest.mark.starts
def test_the_stretch_of_work_is_measured():
    stretches = links.stretch((1, 2), 1)
    assert stretches.keys() == {1, 2} and min(stretches.values()) >= 1.0


@pytest.fixture
def quickly(monkeypatch, tmp_path):
    """Fragments run twice, and no figures are kept outside of the test."""
    monkeypatch.setattr(fragments, "FOLDER", tmp_path / "costs")
    monkeypatch.setattr(fragments, "SECONDS", 0.0)
    monkeypatch.setattr(fragments, "FEWEST", 1)
    monkeypatch.setattr(links, "this_machine", lambda *_: replace(TWO, most=4))


PPO = {"n_envs": 4, "n_steps": 8, "batch_size": 16, "n_epochs": 3, "hidden": (8,)}


def test_fragments_are_measured_and_kept(quickly):
    said = []
    costs = fragments.costs("PPO", "CartPole-v1", PPO, "eager", said.append)
    assert (
        costs.refused == {}
        and costs.limits == {"async": 2, "server": 2}
        and costs.pure
        and "learning as one of 4" in said
    )
    assert costs.means == 3 * 2, "as many gradients as one learner computes"
    assert fragments.costs("PPO", "CartPole-v1", PPO, "eager") == costs, "not measured again"
    placed = Placed("PPO", "CartPole-v1", "actors", 2, level="eager", **PPO)
    weights = placed.agent.program.state()["learner"]["weights"]
    assert costs.weights == weights.numel() * 4
    chunk = placed.actors[0].act(placed._policy(), placed.agent)
    assert costs.chunk(2) == pytest.approx(size_of(chunk), rel=0.5), (costs.chunk, size_of(chunk))


@pytest.mark.parametrize(
    ("algorithm", "env", "options", "refused"),
    [("SAC", "Pendulum-v1", {"n_envs": 2, "n_steps": 2, "batch_size": 8, "learning_starts": 4, "hidden": (8,)},
      {"async": "SAC has a replay", "server": "SAC has a replay"}),
     ("A2C", "gymnasium:CartPole-v1", {"n_envs": 2, "n_steps": 4, "hidden": (8,)},
      {"async": f"CartPole-v1 is {HOSTED}"}),
     ("PPO", "CartPole-v1", {**PPO, "n_steps": 18, "batch_size": 9},
      {"learners": "batch_size is 9, which 2 learners cannot share equally"}),
     ("PPO", "CartPole-v1", {**PPO, "batch_size": 32},
      dict.fromkeys(("async", "server"), "batch_size is 32, which does not divide the 16 rows of a rollout "
                    "(n_envs 2 x n_steps 8 x 1 agents); use batch_size=16"))],
)  # fmt: skip
def test_placements_that_an_algorithm_cannot_have(quickly, algorithm, env, options, refused):
    costs = fragments.costs(algorithm, env, options, "eager")
    assert costs.refused == refused
    assert min(x.seconds for x in forecasts(costs, TWO)) > 0


CONFIG = """
algorithm = "PPO"
env = "CartPole-v1"
steps = 128
level = "eager"
evaluate = 64
checkpoint = 64
[options]
n_envs = 4
n_steps = 8
batch_size = 16
n_epochs = 1
hidden = [8]
"""


def test_the_command_ranks_explains_and_saves(quickly, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan_rl, "costs", lambda *_, **__: replace(ACTING, refused={"server": "a reason"}))
    config, file, picture = (tmp_path / name for name in ("run.toml", "plan.json", "scaling.svg"))
    config.write_text(CONFIG)
    assert cli.main(["plan", "--rl", str(config), "--save", str(file)]) == 0
    said = capsys.readouterr().out
    assert "chosen: " in said and "runner-up: " in said and "not possible: server: a reason" in said
    plan = json.loads(file.read_text())
    assert (
        RunPlacement.load(file) == RunPlacement(**plan["place"])
        and plan["place"]["ranks"] == 2
        and len(plan["predicted"]) > 8
    )
    words = ["plan", "--rl", str(config), "--cluster", "cpu:8x8", "--picture", str(picture)]
    assert cli.main(words) == 0
    assert "fragments: measured on a core of this machine" in capsys.readouterr().out and "<svg" in picture.read_text()
    assert cli.main(["plan", "--rl", str(config), "--cluster", "h100:8"]) == 0
    assert "extrapolated, not measured" in capsys.readouterr().out
    assert cli.main(["plan", "--rl", str(config), "--ranks", "0"]) == 2
    assert "--ranks 0" in capsys.readouterr().err


def test_train_runs_a_saved_placement(tmp_path, capsys):
    config, file, out = (tmp_path / name for name in ("run.toml", "plan.json", "out"))
    config.write_text(CONFIG)
    file.write_text(json.dumps({"place": {"placement": "learners", "ranks": 2, "processes": 1}, "cluster": "auto"}))
    assert cli.main(["rl", "train", str(config), "--plan", str(file), "--out", str(out)]) == 0
    assert "128 steps  return" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["placement"] == "learners"
    assert cli.main(["rl", "train", str(config), "--plan", str(file), "--ranks", "2"]) == 2
    assert "leave out those options" in capsys.readouterr().err
    assert cli.main(["rl", "train", str(config), "--placement", "actors", "--ranks", "2", "--out", str(out)]) == 2
    assert "has another run: placement was learners and is actors; choose" in capsys.readouterr().err

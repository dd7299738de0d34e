"""gymnasium's MuJoCo tasks of version 5 as a table: what they observe, how they reward and how they begin.

Formulas are those of gymnasium's documentation (https://gymnasium.farama.org/environments/mujoco/), for n instances at
once. The operations have gymnasium's order and dtypes, so that the numbers are equal to the last bit, or to the last
but one where numpy computes a scalar and an array differently (powers, norms).

A function of a row gets q, the fields of mjData after a step with a dim of instances before their own, and c, the
constants: the row's parameters with those that the user changed, `model`, `dt` (s), and `qpos` and `qvel` of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

Array = np.ndarray
Fields = SimpleNamespace


@dataclass(frozen=True)
class Task:
    """A row of the table.

    reads: the fields of mjData that the functions use.
    observe(q, c): observations, float64 (n, features).
    judge(q, moved, action, c): reward, float64 (n,), and whether the task ended, bool (n,). moved: the difference of
        `place` before and after the step, (n,) m. action: float32 (n, actuators).
    begin(rng, c): qpos and qvel of a new episode, drawn as gymnasium draws them.
    place(q, c): the position whose change is rewarded, (n,) m, or None.
    parameters: gymnasium's arguments that users may change, with their defaults.
    forces: whether contact forces are read, which MuJoCo computes on demand only.
    """

    reads: tuple[str, ...]
    observe: Callable[[Fields, Any], Array]
    judge: Callable[[Fields, Any, Array, Any], tuple[Array, Array]]
    begin: Callable[[np.random.Generator, Any], tuple[Array, Array]]
    place: Callable[[Fields, Any], Array] | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    forces: bool = False


def uniform(rng: np.random.Generator, c: Any) -> tuple[Array, Array]:
    s = c.reset_noise_scale
    return c.qpos + rng.uniform(-s, s, len(c.qpos)), c.qvel + rng.uniform(-s, s, len(c.qvel))


def normal(rng: np.random.Generator, c: Any) -> tuple[Array, Array]:
    s = c.reset_noise_scale
    return c.qpos + rng.uniform(-s, s, len(c.qpos)), c.qvel + s * rng.standard_normal(len(c.qvel))


# Bodies that are rewarded for moving along x


def observe_body(q: Fields, c: Any) -> Array:
    hidden = c.hidden if c.exclude_current_positions_from_observation else 0
    parts = [q.qpos[:, hidden:], np.clip(q.qvel, -c.fastest, c.fastest)]
    parts += [part(q, c) for option, part in c.extra.items() if getattr(c, f"include_{option}_in_observation")]
    return np.concatenate(parts, axis=1)


def judge_body(q: Fields, moved: Array, action: Array, c: Any) -> tuple[Array, Array]:
    healthy = c.healthy(q, c)
    gain = c.forward_reward_weight * (moved / c.dt) + healthy * c.healthy_reward
    effort = c.ctrl_cost_weight * np.square(action.astype(c.effort_dtype)).sum(axis=1)
    return gain - (effort + c.contact_cost(q, c)), ~healthy & c.terminate_when_unhealthy


def root(q: Fields, c: Any) -> Array:
    return q.qpos[:, 0].copy()


def torso(q: Fields, c: Any) -> Array:
    return q.xpos[:, c.model.body(c.main_body).id, 0].copy()


def center_of_mass(q: Fields, c: Any) -> Array:
    mass = c.model.body_mass
    return np.einsum("b,nbj->nj", mass, q.xipos)[:, 0] / mass.sum()


def always(q: Fields, c: Any) -> Array:
    return np.ones(len(q.qpos), bool)


def within(x: Array, bounds: tuple[float, float]) -> Array:
    return (bounds[0] < x) & (x < bounds[1])


def upright(q: Fields, c: Any) -> Array:
    return within(q.qpos[:, 1], c.healthy_z_range) & within(q.qpos[:, 2], c.healthy_angle_range)


def hopping(q: Fields, c: Any) -> Array:
    state = np.concatenate([q.qpos[:, 2:], q.qvel], axis=1)
    return within(state, c.healthy_state_range).all(axis=1) & upright(q, c)


def crawling(q: Fields, c: Any) -> Array:
    low, high = c.healthy_z_range
    finite = np.isfinite(q.qpos).all(axis=1) & np.isfinite(q.qvel).all(axis=1)
    return finite & (low <= q.qpos[:, 2]) & (q.qpos[:, 2] <= high)


def standing(q: Fields, c: Any) -> Array:
    return within(q.qpos[:, 2], c.healthy_z_range)


def no_cost(q: Fields, c: Any) -> float:
    return 0.0


def ant_forces(q: Fields) -> Array:
    return q.cfrc_ext.reshape(len(q.cfrc_ext), -1)


def ant_contact(q: Fields, c: Any) -> Array:
    return c.contact_cost_weight * np.square(np.clip(ant_forces(q), *c.contact_force_range)).sum(axis=1)


def humanoid_contact(q: Fields, c: Any) -> Array:
    return np.clip(c.contact_cost_weight * np.square(ant_forces(q)).sum(axis=1), *c.contact_cost_range)


def bodies(name: str) -> Callable[[Fields, Any], Array]:
    """A field of all bodies but the world."""
    return lambda q, c: getattr(q, name)[:, 1:].reshape(len(q.qpos), -1)


def body(
    noise: Callable, scale: float, effort: float, hidden: int, *, forward: float = 1.0, fastest: float = np.inf,
    healthy: Callable = always, place: Callable = root, contact: Callable = no_cost, extra: dict | None = None,
    reads: tuple[str, ...] = (), effort_dtype: type = np.float32, **parameters: Any,
) -> Task:  # fmt: skip
    """A row for a body that is rewarded for moving along x.

    noise: function that draws the first state. scale: size of its noise. effort, forward: weights of the action's
    square and of the speed. hidden: number of leading positions that are not observed. fastest: bound of observed
    speeds. extra: further parts of an observation.
    """
    extra = extra or {}
    common = {
        "forward_reward_weight": forward, "ctrl_cost_weight": effort, "reset_noise_scale": scale,
        "exclude_current_positions_from_observation": True,
    }  # fmt: skip
    options = {f"include_{option}_in_observation": True for option in extra}
    unhealthy = {} if healthy is not always else {"healthy_reward": 0.0, "terminate_when_unhealthy": False}
    fixed = {
        "hidden": hidden, "fastest": fastest, "healthy": healthy, "contact_cost": contact, "extra": extra,
        "effort_dtype": effort_dtype, **unhealthy,
    }  # fmt: skip
    if healthy is not always:
        parameters = {"healthy_reward": 1.0, "terminate_when_unhealthy": True, **parameters}
    reads = ("qpos", "qvel", *reads)
    return Task(
        reads, observe_body, judge_body, noise, place, common | options | parameters, fixed, "cfrc_ext" in reads
    )


# Pendulums and arms


def observe_pendulum(q: Fields, c: Any) -> Array:
    return np.concatenate([q.qpos, q.qvel], axis=1)


def judge_pendulum(q: Fields, moved: Any, action: Array, c: Any) -> tuple[Array, Array]:
    fell = ~np.isfinite(observe_pendulum(q, c)).all(axis=1) | (np.abs(q.qpos[:, 1]) > 0.2)
    return 1.0 - fell, fell


def observe_double(q: Fields, c: Any) -> Array:
    angle, force = q.qpos[:, 1:], np.clip(q.qfrc_constraint, -10, 10)[:, :1]
    return np.concatenate([q.qpos[:, :1], np.sin(angle), np.cos(angle), np.clip(q.qvel, -10, 10), force], axis=1)


def judge_double(q: Fields, moved: Any, action: Array, c: Any) -> tuple[Array, Array]:
    x, y = q.site_xpos[:, 0, 0], q.site_xpos[:, 0, 2]
    fell = y <= 1
    distance = 0.01 * x**2 + (y - 2) ** 2
    speed = 1e-3 * q.qvel[:, 1] ** 2 + 5e-3 * q.qvel[:, 2] ** 2
    return c.healthy_reward * ~fell - distance - speed, fell


def between(q: Fields, c: Any, a: str, b: str) -> Array:
    return q.xpos[:, c.model.body(a).id] - q.xpos[:, c.model.body(b).id]


def length(x: Array) -> Array:
    return np.sqrt(np.matmul(x[:, None, :], x[:, :, None])[:, 0, 0])


def effort(action: Array, c: Any) -> Array:
    return -np.square(action).sum(axis=1) * c.reward_control_weight


def never(q: Fields) -> Array:
    return np.zeros(len(q.qpos), bool)


def observe_reacher(q: Fields, c: Any) -> Array:
    angle, gap = q.qpos[:, :2], between(q, c, "fingertip", "target")[:, :2]
    return np.concatenate([np.cos(angle), np.sin(angle), q.qpos[:, 2:], q.qvel[:, :2], gap], axis=1)


def judge_reacher(q: Fields, moved: Any, action: Array, c: Any) -> tuple[Array, Array]:
    distance = -length(between(q, c, "fingertip", "target")) * c.reward_dist_weight
    return distance + effort(action, c), never(q)


def begin_reacher(rng: np.random.Generator, c: Any) -> tuple[Array, Array]:
    qpos = rng.uniform(-0.1, 0.1, len(c.qpos)) + c.qpos
    goal = rng.uniform(-0.2, 0.2, 2)
    while np.linalg.norm(goal) >= 0.2:
        goal = rng.uniform(-0.2, 0.2, 2)
    qpos[-2:] = goal
    qvel = c.qvel + rng.uniform(-0.005, 0.005, len(c.qvel))
    qvel[-2:] = 0
    return qpos, qvel


def observe_pusher(q: Fields, c: Any) -> Array:
    places = [q.xpos[:, c.model.body(name).id] for name in ("tips_arm", "object", "goal")]
    return np.concatenate([q.qpos[:, :7], q.qvel[:, :7], *places], axis=1)


def judge_pusher(q: Fields, moved: Any, action: Array, c: Any) -> tuple[Array, Array]:
    near = -length(between(q, c, "object", "tips_arm")) * c.reward_near_weight
    distance = -length(between(q, c, "object", "goal")) * c.reward_dist_weight
    return distance + effort(action, c) + near, never(q)


def begin_pusher(rng: np.random.Generator, c: Any) -> tuple[Array, Array]:
    qpos, cylinder = c.qpos.copy(), np.zeros(2)
    while np.linalg.norm(cylinder) <= 0.17:
        cylinder = np.concatenate([rng.uniform(-0.3, 0, 1), rng.uniform(-0.2, 0.2, 1)])
    qpos[-4:-2], qpos[-2:] = cylinder, 0
    qvel = c.qvel + rng.uniform(-0.005, 0.005, len(c.qvel))
    qvel[-4:] = 0
    return qpos, qvel


def arm(observe: Callable, judge: Callable, begin: Callable, **weights: float) -> Task:
    parameters = {"reward_dist_weight": 1.0, "reward_control_weight": 1.0, **weights}
    return Task(("qpos", "qvel", "xpos"), observe, judge, begin, parameters=parameters)


HUMANOID_PARTS = {
    "cinert": bodies("cinert"), "cvel": bodies("cvel"), "qfrc_actuator": lambda q, c: q.qfrc_actuator[:, 6:],
    "cfrc_ext": bodies("cfrc_ext"),
}  # fmt: skip

TASKS = {
    "HalfCheetah-v5": body(normal, 0.1, 0.1, 1),
    "Swimmer-v5": body(uniform, 0.1, 1e-4, 2),
    "Hopper-v5": body(
        uniform, 5e-3, 1e-3, 1, fastest=10, healthy=hopping,
        healthy_z_range=(0.7, np.inf), healthy_angle_range=(-0.2, 0.2), healthy_state_range=(-100.0, 100.0),
    ),
    "Walker2d-v5": body(
        uniform, 5e-3, 1e-3, 1, fastest=10, healthy=upright, healthy_z_range=(0.8, 2.0), healthy_angle_range=(-1.0, 1.0)
    ),
    "Ant-v5": body(
        normal, 0.1, 0.5, 2, healthy=crawling, place=torso, contact=ant_contact, reads=("xpos", "cfrc_ext"),
        extra={"cfrc_ext": lambda q, c: np.clip(bodies("cfrc_ext")(q, c), *c.contact_force_range)},
        healthy_z_range=(0.2, 1.0), contact_cost_weight=5e-4, contact_force_range=(-1.0, 1.0), main_body=1,
    ),
    "Humanoid-v5": body(
        uniform, 1e-2, 0.1, 2, forward=1.25, healthy=standing, place=center_of_mass, contact=humanoid_contact,
        reads=("xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext"), extra=HUMANOID_PARTS, effort_dtype=np.float64,
        healthy_reward=5.0, healthy_z_range=(1.0, 2.0), contact_cost_weight=5e-7, contact_cost_range=(-np.inf, 10.0),
    ),
    "InvertedPendulum-v5": Task(
        ("qpos", "qvel"), observe_pendulum, judge_pendulum, uniform, parameters={"reset_noise_scale": 0.01}
    ),
    "InvertedDoublePendulum-v5": Task(
        ("qpos", "qvel", "site_xpos", "qfrc_constraint"), observe_double, judge_double, normal,
        parameters={"healthy_reward": 10.0, "reset_noise_scale": 0.1},
    ),
    "Reacher-v5": arm(observe_reacher, judge_reacher, begin_reacher),
    "Pusher-v5": arm(
        observe_pusher, judge_pusher, begin_pusher, reward_near_weight=0.5, reward_control_weight=0.1
    ),
}  # fmt: skip

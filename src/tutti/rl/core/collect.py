"""Rollouts: a policy acts in environments, and what happens becomes a chunk of experience.

A chunk is a dict of tensors (time, n, ...):

| key | what |
|---|---|
| `obs`, `action`, `reward`, `terminated`, `truncated` | of each step; observations are features, before normalization |
| `last` | the observation after the step, of the same episode |
| `mask`, `overview`, `last_mask`, `last_overview` | where the environment has them |
| `valid`, `last_valid` | whether the agent took part in the step, and does after it: where agents may leave |
| `agent_terminated`, `agent_truncated` | of each agent, where agents end one by one |
| `return`, `length` | of an episode that ended in this step, else 0 |
| others | what the algorithm's `act` adds, such as `log_prob` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tutti
from tutti.rl.core import keys
from tutti.rl.core.env import Env, begun_again, where

if TYPE_CHECKING:
    from tutti.rl.core.agent import Agent

Tree = dict[str, Any]


def begin(agent: Agent, env: Env, key: Tensor, n: int) -> Tree:
    """An actor before its first step."""
    state, obs = env.reset(key, n)
    return {"env": state, "obs": agent.features(obs), **_fresh(agent, n)}


def _fresh(agent: Agent, n: int) -> Tree:
    shape = agent.rows(n)
    return {"carry": agent.carry(n), "return": torch.zeros(shape), "length": torch.zeros(n)}


def rollout(agent: Agent, env: Env, policy: Tree, actor: Tree, key: Tensor, steps: int, explore: bool = True,
            act: Any = None) -> tuple[Tree, Tree]:  # fmt: skip
    """Act for `steps` steps. act: replaces the agent's. Returns (next state of the actor, chunk)."""
    act = act or agent.act

    def body(actor: Tree, t: Tensor) -> tuple[Tree, Tree]:
        of_act, of_step, of_reset = keys.split(keys.fold(key, t), 3)
        seen = seen_by(actor["obs"], env.masks(actor["env"]), env.overview(actor["env"]))
        action, extra, carry = act(policy, agent.normalized(policy, seen), actor["carry"], of_act, explore)
        alive = env.alive(actor["env"])
        state, last, reward, terminated, truncated = env.step(actor["env"], agent.to_env(action), of_step)
        own = {} if alive is None else {"valid": alive, "last_valid": alive & _or_all(env.alive(state), alive)}
        if env.ends_by_agent:
            own |= {"agent_terminated": terminated, "agent_truncated": truncated}
            terminated, truncated = of_episode(_or_all(alive, terminated), terminated, truncated)
        after = {f"last_{k}": x for k, x in seen_by(None, env.masks(state), env.overview(state)).items() if k != "obs"}
        done = terminated | truncated
        state, obs = begun_again(env, done, state, last, of_reset)
        moved, episode_stats = _episodes(actor, reward, done)
        next_actor = {
            "env": state,
            "obs": agent.features(obs),
            "carry": pytree.tree_map(lambda x: where(done, torch.zeros_like(x), x), rewarded(carry, reward)),
            **moved,
        }
        row = {**seen, **after, "action": action, "reward": reward, "terminated": terminated, "truncated": truncated,
               "last": agent.features(last), **own, **episode_stats, **extra}  # fmt: skip
        return next_actor, row

    return tutti.scan(body, actor, torch.arange(steps))


def _or_all(alive: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool) if alive is None else alive


def of_episode(alive: Tensor, terminated: Tensor, truncated: Tensor) -> tuple[Tensor, Tensor]:
    """(terminated, truncated) (n,) of episodes whose agents end one by one, (n, agents). An episode ends with its last
    agent, and is truncated where one of the last was only truncated. alive: who had not ended before."""
    over = (terminated | truncated | ~alive).all(-1)
    cut = over & (truncated & ~terminated & alive).any(-1)
    return over & ~cut, cut


def seen_by(obs: Any, mask: Tensor | None, overview: Tensor | None) -> Tree:
    """Observations, masks and overviews as a dict, without entries that are None."""
    return (
        {"obs": obs} | ({} if mask is None else {"mask": mask}) | ({} if overview is None else {"overview": overview})
    )


def rewarded(carry: Tree, reward: Tensor) -> Tree:
    """A policy's memory after a step. Its entry "reward", if any, is set to the reward of the step."""
    return {**carry, "reward": reward} if "reward" in carry else carry


def _episodes(actor: Tree, reward: Tensor, done: Tensor) -> tuple[Tree, Tree]:
    """Return and length of episodes: (running sums, totals of those that end)."""
    total, length = actor["return"] + reward, actor["length"] + 1
    zero = torch.zeros_like
    ended = {"return": where(done, total, zero(total)), "length": torch.where(done, length, zero(length))}
    return {"return": total - ended["return"], "length": length - ended["length"]}, ended

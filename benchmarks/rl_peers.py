"""Peers of `rl.py`: one library trains one case, in a virtual environment of its own (`harness.Peer`).

    python rl_peers.py LIBRARY CASE

CASE is a row of `rl.CASES` as JSON. Reads a number of environment steps for each turn, a line of JSON, and answers with
[steps, seconds, CPU seconds, mean return of the last episodes or null]. Every library gets the same numbers of
environments, steps, updates and rows, the same networks and optimizers, and one thread.
"""

import json
import os
import sys
import time
from functools import partial
from itertools import pairwise
from statistics import mean as average


def main(library: str, case: dict) -> None:
    answers = os.fdopen(os.dup(1), "w")  # libraries print to stdout
    os.dup2(2, 1)
    train, returns = LIBRARIES[library](case)
    train(1)  # compiles
    for line in sys.stdin:
        begin, cpu = time.perf_counter(), time.process_time()
        steps = train(json.loads(line))
        took = time.perf_counter() - begin, time.process_time() - cpu
        print(json.dumps([steps, *took, returns()]), file=answers, flush=True)


def mean(returns: list[float]) -> float | None:
    return average(returns) if returns else None


def unknown() -> None:
    """Returns of libraries that are measured for their speed only."""


# -- ours ---------------------------------------------------------------------------------------------------------


def tutti(case: dict, level: str = "O2"):
    from tutti.rl.algorithms import algorithm

    options = {name: tuple(x) if isinstance(x, list) else x for name, x in case["tutti"].items()}
    agent = algorithm(case["algorithm"])(case["env"], seed=case.get("seed", 0), level=level, **options)
    agent.total = case.get("total", 10**8)
    agent.prepare()
    while agent.num_timesteps <= case.get("warm", 0):
        agent.step()

    def train(steps: int) -> int:
        first = agent.num_timesteps
        while agent.num_timesteps < first + steps:
            agent.step()
        return agent.num_timesteps - first

    return train, lambda: mean([x for x, _ in agent.episodes])


# -- Stable-Baselines3 --------------------------------------------------------------------------------------------


def sb3(case: dict):
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    seed = case.get("seed", 0)
    env = make_vec_env(case["env"], case["n_envs"], seed=seed)
    if case.get("normalize"):
        env = VecNormalize(env, gamma=case["gamma"])
    kind = getattr(stable_baselines3, case["algorithm"])
    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[case["activation"]]
    networks = {"net_arch": case["hidden"], "activation_fn": activation}
    agent = kind("MlpPolicy", env, policy_kwargs=networks, device="cpu", seed=seed, gamma=case["gamma"],
                 learning_rate=case["lr"], batch_size=case["batch"], **case["sb3"])  # fmt: skip
    agent.learn(max(case.get("warm", 0), 1))

    def train(steps: int) -> int:
        first = agent.num_timesteps
        agent.learn(steps, reset_num_timesteps=False)
        return agent.num_timesteps - first

    return train, lambda: mean([x["r"] for x in agent.ep_info_buffer])


# -- TorchRL ------------------------------------------------------------------------------------------------------


def torchrl(case: dict):
    """PPO as in TorchRL's examples: its collector, GAE and ClipPPOLoss."""
    import torch
    from tensordict.nn import TensorDictModule
    from torch import nn
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.envs import Compose, DoubleToFloat, GymEnv, SerialEnv, StepCounter, TransformedEnv
    from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    torch.set_num_threads(1)
    options, activation = case["sb3"], {"tanh": nn.Tanh, "relu": nn.ReLU}[case["activation"]]
    env = TransformedEnv(SerialEnv(case["n_envs"], lambda: GymEnv(case["env"], categorical_action_encoding=True)),
                         Compose(DoubleToFloat(), StepCounter()))  # fmt: skip
    size = env.observation_spec["observation"].shape[-1]
    net = {"num_cells": case["hidden"], "activation_class": activation}
    discrete = case["env"].startswith("CartPole")
    if discrete:
        module = TensorDictModule(MLP(size, 2, **net), ["observation"], ["logits"])
        kinds = {"in_keys": ["logits"], "distribution_class": torch.distributions.Categorical}
    else:
        width = env.action_spec.shape[-1]
        both = nn.Sequential(MLP(size, 2 * width, **net), NormalParamExtractor())
        module = TensorDictModule(both, ["observation"], ["loc", "scale"])
        kinds = {"in_keys": ["loc", "scale"], "distribution_class": TanhNormal}
    actor = ProbabilisticActor(module, spec=env.action_spec, return_log_prob=True, **kinds)
    critic = ValueOperator(MLP(size, 1, **net), in_keys=["observation"])
    advantage = GAE(gamma=case["gamma"], lmbda=options["gae_lambda"], value_network=critic, average_gae=False)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.0, critic_coeff=0.5, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss.parameters(), lr=case["lr"], eps=1e-5)
    rows = case["n_envs"] * options["n_steps"]
    collector = Collector(env, actor, frames_per_batch=rows, total_frames=-1)
    replay = ReplayBuffer(storage=LazyTensorStorage(rows), sampler=SamplerWithoutReplacement(),
                          batch_size=case["batch"])  # fmt: skip
    batches = iter(collector)

    def train(steps: int) -> int:
        done = 0
        while done < steps:
            data = next(batches)
            done += data.numel()
            with torch.no_grad():
                data = advantage(data)
            replay.empty()
            replay.extend(data.reshape(-1))
            for _ in range(options["n_epochs"]):
                for batch in replay:
                    losses = loss(batch)
                    total = losses["loss_objective"] + losses["loss_critic"]
                    optimizer.zero_grad()
                    total.backward()
                    nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                    optimizer.step()
        return done

    return train, unknown


# -- a single file ------------------------------------------------------------------------------------------------


def single(case: dict):
    """PPO as CleanRL writes it: one loop in plain PyTorch; MuJoCo's tasks are stepped by EnvPool."""
    import gymnasium
    import numpy as np
    import torch
    from torch import nn

    torch.set_num_threads(1)
    options, n, gamma = case["sb3"], case["n_envs"], case["gamma"]
    discrete = case["env"].startswith("CartPole")
    if discrete:
        env = gymnasium.make_vec(case["env"], n, vectorization_mode="sync")
        size, width = env.single_observation_space.shape[0], 2
    else:
        import envpool

        env = envpool.make(case["env"].replace("-v5", "-v4"), env_type="gymnasium", num_envs=n, num_threads=1)
        size, width = env.observation_space.shape[0], env.action_space.shape[0]
    activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[case["activation"]]

    def network(out: int) -> nn.Module:
        sizes, modules = [size, *case["hidden"]], []
        for a, b in pairwise(sizes):
            modules += [nn.Linear(a, b), activation()]
        return nn.Sequential(*modules, nn.Linear(sizes[-1], out))

    actor, critic, log_std = network(width), network(1), nn.Parameter(torch.zeros(width))
    parameters = [*actor.parameters(), *critic.parameters(), *([] if discrete else [log_std])]
    optimizer = torch.optim.Adam(parameters, lr=case["lr"], eps=1e-5)

    def policy(obs):
        out = actor(obs)
        return (
            torch.distributions.Categorical(logits=out) if discrete else torch.distributions.Normal(out, log_std.exp())
        )

    def summed(x):
        return x if discrete else x.sum(-1)

    obs = torch.as_tensor(np.asarray(env.reset()[0]), dtype=torch.float32)

    def train(steps: int) -> int:
        nonlocal obs
        done, T = 0, options["n_steps"]
        while done < steps:
            rows = [[] for _ in range(6)]
            with torch.no_grad():
                for _ in range(T):
                    d = policy(obs)
                    action = d.sample()
                    step = action.numpy() if discrete else action.numpy().clip(-1, 1)
                    after, reward, terminated, truncated, _ = env.step(step)
                    ends = torch.as_tensor(terminated | truncated)
                    row = (obs, action, summed(d.log_prob(action)), critic(obs).squeeze(-1),
                           torch.as_tensor(reward, dtype=torch.float32), ends)  # fmt: skip
                    for column, x in zip(rows, row, strict=True):
                        column.append(x)
                    obs = torch.as_tensor(np.asarray(after), dtype=torch.float32)
                states, actions, log_probs, values, rewards, ended = map(torch.stack, rows)
                last, advantage, advantages = critic(obs).squeeze(-1), 0.0, torch.zeros_like(rewards)
                for t in reversed(range(T)):
                    going = 1 - ended[t].float()
                    delta = rewards[t] + gamma * going * last - values[t]
                    advantages[t] = advantage = delta + gamma * options["gae_lambda"] * going * advantage
                    last = values[t]
            flat = [x.flatten(0, 1) for x in (states, actions, log_probs, advantages, advantages + values)]
            for _ in range(options["n_epochs"]):
                for index in torch.randperm(T * n).split(case["batch"]):
                    s, a, old, adv, target = (x[index] for x in flat)
                    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                    ratio = (summed(policy(s).log_prob(a)) - old).exp()
                    gain = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
                    total = 0.5 * (critic(s).squeeze(-1) - target).square().mean() - gain
                    optimizer.zero_grad()
                    total.backward()
                    nn.utils.clip_grad_norm_(parameters, 0.5)
                    optimizer.step()
            done += T * n
        return done

    return train, unknown


# -- JAX ----------------------------------------------------------------------------------------------------------


def jax(case: dict):
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    import rl_jax

    return getattr(rl_jax, case["algorithm"])(case), unknown


# -- environments alone -------------------------------------------------------------------------------------------


def mpe2(case: dict):
    """mpe2's environment with random actions: no library that steps it can be faster."""
    from mpe2 import simple_spread_v3

    env = simple_spread_v3.parallel_env()
    env.reset(seed=0)

    def step(steps: int) -> int:
        for _ in range(steps):
            if not env.agents:
                env.reset()
            env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        return steps

    return step, unknown


LIBRARIES = {
    "tutti": tutti,
    "tutti-eager": partial(tutti, level="eager"),
    "sb3": sb3,
    "jax": jax,
    "torchrl": torchrl,
    "single": single,
    "mpe2": mpe2,
}

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))

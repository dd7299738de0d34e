"""Peers of `rl.py`: one library trains one case, in a virtual environment of its own (`harness.Peer`).

    python rl_peers.py LIBRARY CASE

CASE is a row of `rl.CASES` as JSON. Reads a number of environment steps for each turn, a line of JSON, and answers with
[steps, seconds, CPU seconds]. Every library gets the same numbers of environments, steps, updates and rows, the same
networks and optimizers, and one thread.
"""

import json
import os
import sys
import time
from functools import partial


def main(library: str, case: dict) -> None:
    answers = os.fdopen(os.dup(1), "w")  # libraries print to stdout
    os.dup2(2, 1)
    train = LIBRARIES[library](case)
    train(1)  # compiles, and fills the replay
    for line in sys.stdin:
        begin, cpu = time.perf_counter(), time.process_time()
        steps = train(json.loads(line))
        print(json.dumps([steps, time.perf_counter() - begin, time.process_time() - cpu]), file=answers, flush=True)


# -- ours ---------------------------------------------------------------------------------------------------------


def tutti(case: dict, level: str = "O2"):
    from tutti.rl.algorithms import algorithm

    options = {name: tuple(x) if isinstance(x, list) else x for name, x in case["tutti"].items()}
    agent = algorithm(case["algorithm"])(case["env"], level=level, **options)
    agent.total = 10**8
    agent.prepare()
    while agent.num_timesteps <= case.get("warm", 0):
        agent.step()

    def train(steps: int) -> int:
        first = agent.num_timesteps
        while agent.num_timesteps < first + steps:
            agent.step()
        return agent.num_timesteps - first

    return train


# -- Stable-Baselines3 --------------------------------------------------------------------------------------------


def sb3(case: dict):
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    env = make_vec_env(case["env"], case["n_envs"], seed=0)
    if case.get("normalize"):
        env = VecNormalize(env, gamma=case["gamma"])
    kind = getattr(stable_baselines3, case["algorithm"])
    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[case["activation"]]
    agent = kind("MlpPolicy", env, policy_kwargs={"net_arch": case["hidden"], "activation_fn": activation}, device="cpu",
                 gamma=case["gamma"], learning_rate=case["lr"], batch_size=case["batch"], **case["sb3"])  # fmt: skip
    agent.learn(max(case.get("warm", 0), 1))

    def train(steps: int) -> int:
        first = agent.num_timesteps
        agent.learn(steps, reset_num_timesteps=False)
        return agent.num_timesteps - first

    return train


LIBRARIES = {"tutti": tutti, "tutti-eager": partial(tutti, level="eager"), "sb3": sb3}

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))

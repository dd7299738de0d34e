"""Every option of every algorithm changes what it does, or is refused."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from rl_cases import CASES, agent_of, steps
from tutti.rl.algorithms import ALGORITHMS, algorithm
from tutti.rl.core import keys
from tutti.rl.core.program import leaves

# Other values of options, where they are not found by arithmetic.
OTHERS = {"precision": ["bfloat16"], "activation": ["elu"],
          "cell": ["lstm"], "reward": ["airl"], "ent_coef": [0.3], "target_entropy": [-3.0],
          "target_kl": [1e-9], "target_return": [1.0], "scale": [7.0], "play_simulations": [12], "channels": [(2,)],
          "depth": [1], "heads": [4], "gradient_steps": [5], "log_std": [-1.0], "decay": [0.1],
          "exploration_initial_eps": [0.3], "max_grad_norm": [1e-3], "rho": [0.1], "c": [0.1],
          "v_max": [1.0], "v_min": [-1.0], "clip_range": [1e-6], "clip_range_vf": [1e-6], "gamma": [0.01],
          "exploration_final_eps": [1.0]}  # fmt: skip


def outcome(name, env="", **options):
    """All that some iterations of an algorithm leave, and its actions, as tensors by name."""
    agent = agent_of(name, env, **options).learn(steps(name))
    state = leaves(agent.program.state())
    tensors = {k: x for k, x in state.items() if k.startswith(("learner", "replay")) and "_norm." not in k}
    _, obs = agent.env.reset(keys.make(0), 16)
    for best in (True, False):
        action, _ = agent.predict(pytree.tree_map(lambda x: x.numpy(), obs), deterministic=best)
        tensors[f"action{best}"] = torch.from_numpy(np.asarray(action))
    return tensors


def others(name, value):
    """Values besides this one."""
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, value // 2]
    if isinstance(value, float):
        return [0.7 * value if value else 0.3]
    if isinstance(value, tuple):
        return [(*value[:-1], value[-1] + 1)]
    raise AssertionError(f"no other values of {name} {value!r} are known")


def differ(a, b):
    return a.keys() != b.keys() or any(x.shape != b[k].shape or not torch.equal(x, b[k]) for k, x in a.items())


def without_effect(name):
    """The options of an algorithm that change nothing and are not refused."""
    kind, base = algorithm(name), outcome(name)
    config = {**{f.name: f.default for f in fields(kind.Config)}, **CASES[name][1]}
    unused = []
    for option, value in config.items():
        if option == "hindsight" and option not in kind.unused:  # for environments with goals
            goals = "BitFlip" if CASES[name][0] == "CartPole-v1" else "Reach"
            one, two = (outcome(name, goals, hindsight=later, n_step=1) for later in (0, 1))
            unused += [] if differ(one, two) else [option]
            continue
        for other in others(option, value):
            try:
                effect = differ(base, outcome(name, **{option: other}))
            except ValueError as error:
                if "has no effect" not in str(error) and "not normalize" not in str(error):
                    continue  # it does not fit the others
                effect = True
            if effect:
                break
        else:
            unused.append(option)
    return unused


def test_all_algorithms_have_a_case():
    assert CASES.keys() == ALGORITHMS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_option_has_an_effect_or_is_refused(name):
    assert without_effect(name) == [], (
        "choose values in tests/rl_cases.py or in OTHERS above with which it matters, or refuse it (`unused`)"
    )


def test_options_without_effect_are_refused():
    for name, option, value in (("IMPALA", "gae_lambda", 0.9), ("TRPO", "ent_coef", 0.1), ("CrossQ", "tau", 0.1)):
        with pytest.raises(ValueError, match=f"{option} has no effect on {name}; leave it out"):
            algorithm(name)(CASES[name][0], level="eager", **{option: value})
    with pytest.raises(ValueError, match="log_std has no effect on PPO with discrete actions"):
        algorithm("PPO")("CartPole-v1", log_std=-1.0)
    default = {"tau": algorithm("CrossQ").Config().tau}
    assert outcome("CrossQ", **default)  # as from a file


def test_unused_options_exist():
    for name in ALGORITHMS:
        kind = algorithm(name)
        assert set(kind.unused) <= {f.name for f in fields(kind.Config)}, name

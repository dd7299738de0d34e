"""Names of Stable-Baselines3: those that mean the same here are translated, others are errors that name ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.rl.core.agent import Agent

POLICIES = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy", "MlpLstmPolicy")
# Option -> (values that are without effect there and so can be left out, what says it here).
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_sde": ((False,), "noise that depends on the state is not made here"),
    "sde_sample_freq": ((-1,), "noise that depends on the state is not made here"),
    "use_sde_at_warmup": ((False,), "noise that depends on the state is not made here"),
    "stats_window_size": ((100,), "Agent.episodes holds the last 100"),
    "optimize_memory_usage": ((False,), "replay_buffer holds what it must: pictures as uint8"),
    "replay_buffer_class": ((None,), "hindsight=4 learns from goals that were reached; PrioritizedDQN has priorities"),
    "replay_buffer_kwargs": ((None,), "the options of the algorithm say it: buffer_size, n_step, hindsight"),
    "rollout_buffer_class": ((None,), "n_steps and n_envs say the size of a rollout"),
    "rollout_buffer_kwargs": ((None,), "n_steps and n_envs say the size of a rollout"),
    "action_noise": ((None,), "noise= is the standard deviation of exploration, as in noise=0.1"),
    "use_rms_prop": ((True,), "A2C has RMSProp; PPO has Adam"),
    "rms_prop_eps": ((1e-5,), "it is 1e-5"),
    "_init_setup_model": ((True,), "networks are made with the agent"),
    "monitor_wrapper": ((True, False), ""),
}
POLICY_OPTIONS = {
    "optimizer_class": "optimizers are those of the algorithms", "optimizer_kwargs": "learning_rate is an option",
    "features_extractor_class": "'CnnPolicy' has convolutions", "features_extractor_kwargs": "hidden is the option",
    "ortho_init": "on-policy networks begin orthogonal", "share_features_extractor": "on-policy networks share it",
    "normalize_images": "pictures are scaled by 1/255",
}  # fmt: skip
HINTS = {
    "save_replay_buffer": "Agent.save(path, replay=True) holds the replay",
    "load_replay_buffer": "Agent.load reads the replay of the file",
    "get_parameters": "Agent.program.state()['learner'] holds all weights",
    "set_parameters": "Agent.load reads weights; Agent.program.put replaces them",
    "set_logger": "tensorboard_log= and tutti.rl.TensorBoard write metrics",
    "logger": "Agent.metrics holds what the last iteration reported",
    "set_random_seed": "seed= of the constructor is the seed of everything",
    "get_vec_normalize_env": "normalize_obs= and normalize_reward= normalize",
    "ep_info_buffer": "Agent.episodes holds (return, length) of the last 100",
    "replay_buffer": "Agent.program.state()['replay'] is the replay",
    "rollout_buffer": "tutti.rl.core.collect makes chunks of experience",
}
SEVERAL = "`adapt.make(function, n=4)` makes 4 environments with a function that returns one"
NOISE = "`TD3(env, noise=0.1)` explores with normal noise"
# Names to import there -> what does it here, as expressions between backticks.
ABSENT = {
    "evaluate_policy": "`agent.evaluate(episodes=10)`",
    "make_vec_env": f"`PPO(env, n_envs=4)` for an environment by name; {SEVERAL}",
    "make_atari_env": f"`PPO(env, n_envs=4)` for an environment by name; {SEVERAL}",
    "DummyVecEnv": SEVERAL,
    "SubprocVecEnv": "`adapt.make(function, n=4, processes=4)` steps environments in worker processes",
    "VecEnv": "`VectorEnv`",
    "VecEnvWrapper": "`VectorEnv`; wrap each environment with gymnasium's wrappers",
    "VecNormalize": "`PPO(env, normalize_obs=True, normalize_reward=True)`",
    "VecMonitor": "`agent.episodes`, the (return, length) of the last 100, without a wrapper",
    "Monitor": "`agent.episodes`, the (return, length) of the last 100, without a wrapper",
    "VecFrameStack": "gymnasium.wrappers.FrameStackObservation around each environment, or `RecurrentPPO(env)`",
    "VecTransposeImage": "nothing: pictures have their channels first or last",
    "VecCheckNan": "nothing: observations and rewards that are not finite are errors",
    "VecVideoRecorder": "the command tutti rl play",
    "check_env": "`adapt.make(function, n=1, check=True)` checks each observation",
    "set_random_seed": "`PPO(env, seed=0)` seeds everything",
    "get_linear_fn": "`PPO(env, learning_rate=function)` with a function of the remaining progress",
    "configure": "`PPO(env, tensorboard_log=folder, verbose=1)`",
    "Logger": "`agent.metrics`, `TensorBoard` and `Curve`",
    "load_results": "`Curve` writes the returns of a run",
    "BaseAlgorithm": "`Agent`",
    "OnPolicyAlgorithm": "`Agent`",
    "OffPolicyAlgorithm": "`Agent`",
    "ActorCriticPolicy": "`PPO(env, hidden=hidden, activation=activation)` says what networks are",
    "BaseFeaturesExtractor": "`PPO(policy, env)` with 'CnnPolicy' has convolutions",
    "NatureCNN": "`PPO(policy, env)` with 'CnnPolicy' has these convolutions",
    "MlpPolicy": "`PPO(policy, env)` with the text 'MlpPolicy'",
    "CnnPolicy": "`PPO(policy, env)` with the text 'CnnPolicy'",
    "MultiInputPolicy": "`PPO(policy, env)` with the text 'MultiInputPolicy'",
    "ActionNoise": NOISE,
    "NormalActionNoise": NOISE,
    "OrnsteinUhlenbeckActionNoise": NOISE,
    "ReplayBuffer": "`DQN(env, buffer_size=100_000)`",
    "DictReplayBuffer": "`DQN(env, buffer_size=100_000)`",
    "HerReplayBuffer": "`SAC(env, hindsight=4)`",
    "RolloutBuffer": "`PPO(env, n_envs=4, n_steps=256)`",
    "MaskablePPO": "`PPO(env)`, which keeps to masks that environments give",
    "ActionMasker": "`PPO(env)` keeps to what action_masks() or info['action_mask'] of the environment says",
    "BaseCallback": "any function of the agent",
    "CallbackList": "`agent.learn(steps, callback=callbacks)` takes a list of callbacks",
    "EveryNTimesteps": "a function of the agent that reads `agent.num_timesteps`",
    "ProgressBarCallback": "`agent.learn(steps, progress_bar=True)`",
    "StopTrainingOnRewardThreshold": "`StopOnReturn`, or `EvalCallback(threshold=threshold)`",
    "StopTrainingOnMaxEpisodes": "a function of the agent that returns False, and reads `agent.episodes_done`",
    "StopTrainingOnNoModelImprovement": "a function of the agent that returns False",
}


def policy_and_env(kind: str, first: tuple[Any, ...], policy: Any, env: Any) -> tuple[str | None, Any]:
    """Split the positional arguments `(env)` or `(policy, env)`: returns (policy or None, env)."""
    args = list(first)
    if len(args) > 2:
        raise ValueError(f"{kind} takes (env) or (policy, env); name other options, as in learning_rate={args[2]!r}")
    if policy is None and (len(args) == 2 or (args and env is not None)):
        policy = args.pop(0)
    if args and env is not None:
        raise ValueError(f"{kind} was given env twice")
    env = args[0] if args else env
    if env is None and isinstance(policy, str) and policy not in POLICIES:
        policy, env = None, policy
    if env is None or (isinstance(env, str) and env in POLICIES):
        raise ValueError(f'{kind} needs an environment, as in {kind}("CartPole-v1") or {kind}("MlpPolicy", env)')
    if policy is not None and policy not in POLICIES:
        name = policy if isinstance(policy, str) else getattr(policy, "__name__", policy)
        raise ValueError(f"policy {name!r} is not one of {', '.join(POLICIES)}; hidden=(64, 64) and activation='tanh' "
                         "say what networks are")  # fmt: skip
    return policy, env


def options(kind: type[Agent], arguments: dict[str, Any], policy_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Translate options to our names. Raises ValueError for those without a counterpart here."""
    ours = {f.name: str(f.type) for f in fields(kind.Config)}
    translated = dict(arguments)
    for name in [name for name in translated if name in NEUTRAL and name not in ours]:
        values, remedy = NEUTRAL[name]
        x = translated.pop(name)
        if not any(x is value or x == value for value in values):
            raise ValueError(f"{name} is {x!r}, which {kind.__name__} does not know here: {remedy}")
    if "train_freq" in translated and "train_freq" not in ours:
        translated["n_steps"] = _train_freq(kind, translated.pop("train_freq"), translated)
    for name in ("ent_coef", "target_entropy"):
        x = translated.get(name)
        if isinstance(x, str) and "None" in ours.get(name, ""):
            if x != "auto":
                raise ValueError(
                    f"{name} is {x!r}; it must be a number, or None (there 'auto'), which learns it from 1"
                )
            translated[name] = None
    return {**translated, **_of_policy(kind, policy_kwargs or {}, translated)}


def _train_freq(kind: type[Agent], x: Any, arguments: dict[str, Any]) -> int:
    if "replay" not in getattr(kind, "__annotations__", {}) and not hasattr(kind, "make_replay"):
        raise ValueError(f"train_freq has no effect on {kind.__name__}; n_steps says how long rollouts are")
    if "n_steps" in arguments:
        raise ValueError("train_freq is n_steps here; leave one of them out")
    count, unit = x if isinstance(x, tuple | list) and len(x) == 2 else (x, "step")
    if unit != "step" or not isinstance(count, int):
        raise ValueError(f"train_freq is {x!r}; it must be a number of steps of each environment, n_steps here")
    return count


def _of_policy(kind: type[Agent], policy_kwargs: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Translate `policy_kwargs` to options."""
    if not isinstance(policy_kwargs, dict):
        raise ValueError(f"policy_kwargs is {policy_kwargs!r}; it must be a dict such as dict(net_arch=[64, 64])")
    translated: dict[str, Any] = {}
    for name, x in policy_kwargs.items():
        if name == "net_arch":
            translated["hidden"] = _layers(x)
        elif name == "activation_fn":
            translated["activation"] = _activation(x)
        elif name == "log_std_init":
            translated["log_std"] = x
        elif name in ("n_quantiles", "n_critics") and any(f.name == name for f in fields(kind.Config)):
            translated[name] = x
        elif name == "normalize_images" and x is True:
            continue
        else:
            why = POLICY_OPTIONS.get(name, "the options hidden and activation say what networks are")
            raise ValueError(f"policy_kwargs has {name!r}, which is not known here: {why}")
    if both := sorted(translated.keys() & arguments.keys()):
        raise ValueError(f"{both[0]} is given as an option and in policy_kwargs; leave one of them out")
    return translated


def _layers(x: Any) -> tuple[int, ...]:
    if isinstance(x, dict):
        parts = [tuple(part) for part in x.values()]
        if not parts or any(part != parts[0] for part in parts):
            raise ValueError(f"net_arch is {x}; policy and value function have layers of the same widths here, as in "
                             "net_arch=[64, 64]")  # fmt: skip
        return parts[0]
    if not isinstance(x, list | tuple) or not all(isinstance(n, int) for n in x):
        raise ValueError(f"net_arch is {x!r}; it must be widths of layers, as in net_arch=[64, 64]")
    return tuple(x)


def _activation(x: Any) -> str:
    from tutti.rl.networks.networks import ACTIVATIONS

    for name, kind in ACTIVATIONS.items():
        if x is kind:
            return name
    raise ValueError(f"activation_fn is {getattr(x, '__name__', x)}; it must be one of "
                     f"{', '.join(kind.__name__ for kind in ACTIVATIONS.values())}, here activation="
                     f"{' or '.join(map(repr, ACTIVATIONS))}")  # fmt: skip


def check_device(device: Any) -> None:
    """Raise ValueError for a device that agents do not compute on."""
    if str(device) not in ("cpu", "auto"):
        raise ValueError(f"device is {device!s}; agents compute on the CPU: leave it out, or pass 'cpu'")


def callbacks(callback: Any) -> list[Any]:
    """Callbacks as a list. Raises ValueError for what cannot be called with the agent."""
    if callback is None:
        return []
    functions = [callback] if callable(callback) or not isinstance(callback, Iterable) else list(callback)
    for each in functions:
        if not callable(each) or isinstance(each, type):
            raise ValueError(f"callback is {each!r}; it must be a function of the agent, or a list of such functions: "
                             "tutti.rl has EvalCallback, CheckpointCallback, StopOnReturn and others")  # fmt: skip
    return functions

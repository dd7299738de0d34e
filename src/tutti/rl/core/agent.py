"""`Agent`: what all algorithms share. Users call `learn`, `predict`, `evaluate`, `save` and `load`.

    agent = PPO("CartPole-v1", seed=0)
    agent.learn(100_000)
    action, _ = agent.predict(obs)

An algorithm is a subclass with a `Config` and four pure functions of tensors: `init`, `act`, `policy` and the learning
step of its family (`tutti.rl.algorithms.families.on_policy`, `tutti.rl.algorithms.families.off_policy`, ...). It says
nothing about devices, processes, or who steps the environments.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tutti.rl import sb3
from tutti.rl.core import collect, files, keys, ranges
from tutti.rl.core.driver import drive
from tutti.rl.core.env import Env
from tutti.rl.core.evaluate import Evaluation, check_spaces, evaluate
from tutti.rl.core.host import HostActor
from tutti.rl.core.normalize import Normalizer
from tutti.rl.core.options import PRECISIONS, configured
from tutti.rl.core.program import Program, leaves
from tutti.rl.core.vector import VectorEnv
from tutti.rl.networks import pixels
from tutti.rl.networks.distributions import distribution_for
from tutti.rl.networks.features import Features, features_of
from tutti.rl.networks.networks import Ensemble, Network

SIGNALS = {"return": "return", "reward": "reward", "obs": "observation", "last": "observation"}  # by their tensors
Tree = dict[str, Any]
Number = float | Tensor
Rate = Number | Callable[[Any], Any]  # constant, or a function of the remaining progress, from 1 to 0


@dataclass(frozen=True)
class Config:
    """Options of every algorithm. Names are those of Stable-Baselines3 where it has them.

    n_envs: environments that are stepped together. n_steps: steps of each between two learning phases.
    gamma: discount. learning_rate: a number, or a function of the remaining progress (1 at the start, 0 at the end).
    hidden: widths of hidden layers. normalize_obs, normalize_reward: by running statistics.
    precision: "float32", or "bfloat16" for the layers of policies and value functions; weights, optimizers, losses and
    models of the environment stay float32. It pays for wide layers on processors with AVX-512 BF16 or AMX.
    """

    n_envs: int = 1
    n_steps: int = 1
    gamma: Number = 0.99
    learning_rate: Rate = 3e-4
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    normalize_obs: bool = False
    normalize_reward: bool = False
    precision: str = "float32"

    def __getattribute__(self, name: str) -> Any:
        if (reads := _reads.get()) is not None:
            reads.add(name)
        return super().__getattribute__(name)


_reads: ContextVar[set[str] | None] = ContextVar("reads", default=None)


@contextmanager
def reads() -> Iterator[set[str]]:
    """Record the names of the options that are read within the block."""
    names: set[str] = set()
    token = _reads.set(names)
    try:
        yield names
    finally:
        _reads.reset(token)


class Agent(ABC):
    """A policy, how it learns, and the environments that it learns in.

    env: a name (`tutti.rl.make`), a pure `Env`, a `VectorEnv` of the host with `n_envs` instances, or an environment
        of gymnasium or PettingZoo. It may follow a policy, as in `PPO("MlpPolicy", env)`: "CnnPolicy" sees pictures
        with convolutions, "MlpPolicy" as numbers; by default those of 36 x 36 and more are seen with convolutions.
    seed: random seed of weights, environments and exploration. With equal versions, equal seeds give equal results.
    level: "O2" compiles whole iterations; "O0" runs their operators one by one; "eager" is plain Python.
    threads: threads of PyTorch's operators; more than one rarely helps networks of this size.
    verbose: 1 prints metrics while learning. tensorboard_log: a folder for TensorBoard. device: "cpu" or "auto".
    options: the fields of the algorithm's `Config`. policy_kwargs: hidden and activation in the names of
        Stable-Baselines3.

    Raises ValueError for unknown options, and for spaces that do not suit the algorithm.
    """

    Config: ClassVar[type[Config]] = Config
    config: Any
    squashed: ClassVar[bool] = False  # whether continuous actions are tanh of a normal number
    actions: ClassVar[tuple[type[spaces.Space], ...]] = ()  # the action spaces that the algorithm can handle; () is all
    multi_agent: ClassVar[bool] = True
    pixels: ClassVar[bool] = False  # whether pictures stay uint8 until a network sees them
    sees: ClassVar[bool] = False  # whether its networks can have convolutions
    cnn_hidden: ClassVar[tuple[int, ...] | None] = None  # hidden layers behind convolutions, unless they are given
    gaps: ClassVar[bool] = False  # whether it can learn in environments some of whose rows are no steps
    ranges: ClassVar[dict[str, ranges.Range]] = {}  # of options, where they are narrower than `ranges` says
    unused: ClassVar[tuple[str, ...]] = ()  # options of a parent class that have no effect: giving them is an error
    warm_until = 0  # number of steps when the replay was last empty, for algorithms with one

    def __init__(self, *args: Any, policy: str | None = None, env: Any = None, seed: int | None = 0,
                 level: str = "O2", threads: int = 1, verbose: int = 0, tensorboard_log: str | Path | None = None,
                 device: Any = "cpu", policy_kwargs: dict[str, Any] | None = None, _stored: Set[str] = frozenset(),
                 **options: Any):  # fmt: skip
        kind = type(self)
        self.policy_name, env = sb3.policy_and_env(kind.__name__, args, policy, env)
        sb3.check_device(device)
        options = sb3.options(kind, options, policy_kwargs)
        if self.policy_name == "MlpLstmPolicy":
            options = self._with_memory(options)
        self.config, self.threads = configured(kind, options), _whole("threads", threads, 1)
        self.chosen = options.keys() - _stored  # by the caller; the others are defaults, or come from a file
        self.verbose, self.tensorboard_log = _whole("verbose", verbose, 0), tensorboard_log
        self.env = self._make_env(env, options)
        self.seed, self.level = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed, level
        _whole("seed", self.seed, -(1 << 63))
        self._check_spaces()
        self.features: Features = features_of(self.env.observation_space, self.pixels)
        self.image = self._seen()
        if self.image and "hidden" not in options and self.cnn_hidden is not None:
            self.config = replace(self.config, hidden=self.cnn_hidden)
        self.distribution: Any = distribution_for(self.env.action_space, self.squashed)
        self.normalizer = Normalizer(self.features.size, self.config.normalize_obs, self.config.normalize_reward)
        self.check()
        with reads() as self.constants:  # options whose values are a part of networks, optimizers and the replay
            self.build()
        for x in vars(self).values():
            if isinstance(x, Network | Ensemble):
                x.compute_in(PRECISIONS[self.config.precision])
        self.num_timesteps, self.episodes = 0, deque[tuple[float, float]](maxlen=100)
        self.episodes_done = 0
        self.metrics: dict[str, float] = {}
        self.functions: dict[Any, Callable] = {}  # what the program has compiled, by what it is for
        self._begin()

    def __getattr__(self, name: str) -> Any:
        hint = f"; {sb3.HINTS[name]}" if name in sb3.HINTS else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    def _with_memory(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of a policy whose memory is an LSTM."""
        if not any(f.name == "cell" for f in fields(type(self).Config)):
            raise ValueError(f"MlpLstmPolicy needs a memory, and {type(self).__name__} has none; use RecurrentPPO")
        return {"cell": "lstm", **options}

    def _seen(self) -> tuple[int, int, int] | None:
        """The size of pictures that convolutions see, or None where features are seen as they are."""
        name, image, policy = type(self).__name__, self.features.image, self.policy_name
        parts = getattr(self.env.observation_space, "spaces", {})
        parts = list(parts.values() if isinstance(parts, dict) else parts)
        if policy == "MultiInputPolicy" and (not parts or any(features_of(x).image for x in parts)):
            wrong = "has pictures in it, which convolutions do not see here" if parts else "is no Dict or Tuple"
            raise ValueError(f"MultiInputPolicy is for observations of several parts, and {self.env.name}'s space "
                             f"{self.env.observation_space} {wrong}")  # fmt: skip
        if policy == "CnnPolicy":
            if not self.sees:
                raise ValueError(f"{name} has no convolutions; leave 'CnnPolicy' out, or use PPO, A2C, DQN or SAC")
            if not pixels.fits(image):
                raise ValueError("CnnPolicy is for pictures: a Box of uint8 (height, width, channels) or (channels, "
                                 f"height, width) of at least {pixels.SMALLEST} x {pixels.SMALLEST}; {self.env.name} "
                                 f"has {self.env.observation_space}: use 'MlpPolicy'")  # fmt: skip
        use_image = policy in (None, "CnnPolicy") and self.sees and len(self.env.agents) == 1
        return image if use_image and pixels.fits(image) else None

    def sighted(self, make: Callable[[int], nn.Module], size: int | None = None) -> nn.Module:
        """A network of so many inputs, observations first: behind convolutions where those are pictures."""
        size = self.features.size if size is None else size
        return pixels.Seeing(self.image, make, size) if self.image else make(size)

    def check(self) -> None:  # noqa: B027
        """Raise ValueError for options that have no effect in this environment."""

    # -- what an algorithm defines --------------------------------------------------------------------------------

    @abstractmethod
    def build(self) -> None:
        """Make networks and optimizers, without weights."""

    @abstractmethod
    def init(self, seed: int) -> Tree:
        """First weights and optimizer states: a nested dict of tensors, called the learner."""

    @abstractmethod
    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        """Choose actions for observations. Returns (action, what the learner will need of it, next carry).

        seen: "obs", features (n, [agents,] size), and "mask" and "overview" where the environment has them.
        """

    @abstractmethod
    def iterate(self, run: Tree) -> tuple[Tree, Tree]:
        """One iteration in a pure environment: act and learn. Returns the run and metrics."""

    @abstractmethod
    def absorb(self, run: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        """Learn from a chunk of experience (`tutti.rl.core.collect`). Returns the run and metrics."""

    def policy(self, learner: Tree) -> Tree:
        """The part of the learner that acting needs. Channels to actors carry this."""
        return learner

    def acting(self, learner: Tree) -> Tree:
        """The policy, with the statistics that it needs and its progress."""
        extras = {name: learner[name] for name in ("obs_norm", "progress") if name in learner}
        return {**self.policy(learner), **extras}

    def carry(self, n: int) -> Tree:
        """Initial memory of a policy in an episode: tensors (n, ...)."""
        return {}

    @property
    def steps_per_iteration(self) -> int:
        """What an iteration adds to `num_timesteps`."""
        return self.config.n_steps * self.config.n_envs

    # -- what algorithms use --------------------------------------------------------------------------------------

    def rows(self, n: int) -> tuple[int, ...]:
        """The shape of rewards of n environments: (n,), or (n, agents)."""
        return (n,) if len(self.env.agents) == 1 else (n, len(self.env.agents))

    def refuse(self, why: str, *names: str) -> None:
        """Raise ValueError if one of these options, which have no effect here, is not the default."""
        default = type(self).Config()
        for name in names:
            if getattr(self.config, name) != getattr(default, name):
                raise ValueError(f"{name} has no effect on {type(self).__name__} {why}; leave it out")

    def fit_batch(self, rows: int, what: str, unit: int = 1, why: str = "") -> None:
        """Make batch_size a multiple of `unit` that divides `rows`. what: the rows, in words. why: there is a unit.

        A batch_size that the caller did not choose becomes the largest such number up to it, with a warning. Raises
        ValueError, with that number, for one that the caller chose.
        """
        size = self.config.batch_size
        if not (rows % size or size % unit):
            return
        fits = [n for n in range(unit, rows + 1, unit) if rows % n == 0]
        best = max((n for n in fits if 1 < n <= size), default=rows if fits[0] == 1 else fits[0])
        rule = f"does not divide the {rows} {what}" if rows % size else f"is no multiple of {unit}: {why}"
        if "batch_size" in self.chosen:
            raise ValueError(f"batch_size is {size}, which {rule}; use batch_size={best}")
        warnings.warn(f"{type(self).__name__}: batch_size is {size}, which {rule}; it is {best} now, and batch_size="
                      f"{best} says so without this warning", stacklevel=4)  # fmt: skip
        self.config = replace(self.config, batch_size=best)

    def to_env(self, action: Tensor) -> Tensor:
        return self.distribution.to_env(action)

    def to_user(self, action: Tensor) -> Tensor:
        """Actions as the environment that is adapted takes them, of those of the algorithm."""
        return _shifted(self.to_env(action), getattr(self.env, "starts", (None, None))[1])

    def from_user(self, action: Tensor) -> Tensor:
        """Inverse of `to_user`."""
        return self.distribution.from_env(_shifted(action, getattr(self.env, "starts", (None, None))[1], -1))

    def normalized(self, policy: Tree, seen: Tree) -> Tree:
        return {**seen, "obs": self.normalizer.apply(policy, seen["obs"])}

    def rate(self, learner: Tree) -> Any:
        """The learning rate now."""
        rate = self.config.learning_rate
        return rate(1 - learner["progress"]) if callable(rate) else rate

    # -- what users call ------------------------------------------------------------------------------------------

    def learn(self, total_timesteps: int, callback: Callback | Iterable[Callback] | None = None, *,
              log_interval: int | None = None, tb_log_name: str | None = None, reset_num_timesteps: bool = False,
              progress_bar: bool = False) -> Agent:  # fmt: skip
        """Learn for so many steps of environments more. Returns the agent.

        callback: called with the agent after each iteration; learning ends when one returns False. log_interval:
        between two reports of `verbose` and `tensorboard_log`, iterations of on-policy algorithms (1) and episodes of
        others (4). reset_num_timesteps: count steps from 0 again, and with them what follows the progress.

        Raises ValueError for metrics and weights that are not finite.
        """
        from tutti.rl.core.report import reporting

        count = _whole("total_timesteps", total_timesteps, 0)
        if reset_num_timesteps:
            self.num_timesteps = self.warm_until = 0
            self.program.put({"steps": torch.zeros((), dtype=torch.int64)})
            self.program.put({"learner": {"progress": torch.zeros(())}})
        self.total = self.num_timesteps + count
        self.prepare()
        self.program.on_compile = self._tell_compiling if self.verbose else None
        log = log_interval if log_interval is None else _whole("log_interval", log_interval, 1)
        with reporting(self, callback, progress_bar, log, tb_log_name) as report:
            drive(self, self.total, self.step, report)
        self.check_weights()
        return self

    def _tell_compiling(self) -> None:
        """Say, once in a call of `learn`, why nothing happens for a while."""
        self.program.on_compile = None
        print(f'{type(self).__name__}: compiling the iteration, 20 s to two minutes unless the cache has it; for short '
              'runs, level="O0" begins at once', flush=True)  # fmt: skip

    @property
    def observation_space(self) -> spaces.Space:
        return self.env.observation_space

    @property
    def action_space(self) -> spaces.Space:
        return self.env.action_space

    @property
    def n_envs(self) -> int:
        return self.config.n_envs

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def get_env(self) -> Env | VectorEnv:
        """The environments that it learns in."""
        return self.env

    def set_env(self, env: Any, force_reset: bool = True) -> None:
        """Replace the environments by others with the same spaces and number. New episodes begin."""
        if not force_reset:
            raise ValueError("force_reset is False; other environments begin with new episodes: leave it out")
        from tutti.rl.by_name import adapted, make

        new_env = make(env, self.config.n_envs) if isinstance(env, str) else adapted(env)
        check_spaces(self, new_env)
        if isinstance(new_env, VectorEnv) and new_env.n != self.config.n_envs:
            raise ValueError(
                f"{new_env.name} is a vector of {new_env.n} environments, and the agent has {self.config.n_envs}"
            )
        self.env, self.env_name, run = new_env, env if isinstance(env, str) else None, self.program.state()
        run.pop("actor", None)
        if isinstance(new_env, Env):
            run["actor"] = collect.begin(self, new_env, keys.fold(run["key"], 4), self.config.n_envs)
        else:
            self.host = HostActor(self, new_env, self.seed)
        self.functions = {}
        self.program = Program(run, self.level, self.threads)

    def step(self) -> None:
        """One iteration: act, and learn from what happened."""
        start = time.perf_counter()
        if isinstance(self.env, Env):
            self._note(self.program.call(self.phase()), start)
        else:
            self.learn_from(self.host.collect(self), start)

    def learn_from(self, chunk: Tree, start: float | None = None) -> None:
        """Learn from a chunk of experience (`tutti.rl.core.collect`), from any actor. start: when it began to act."""
        start = time.perf_counter() if start is None else start
        self._note(self.program.call(self.learning(), chunk), start)

    def _note(self, metrics: Tree, start: float) -> None:
        """Keep what an iteration reports."""
        ended = metrics.pop("episodes")
        returns, lengths = ended["return"], ended["length"]
        finished = lengths > 0
        each = (returns if returns.ndim == lengths.ndim else returns.mean(-1))[finished]
        steps = lengths.numel()
        self.num_timesteps += steps
        if not each.isfinite().all():
            raise ValueError(f"{self.env.name}: the return of an episode that ended by step {self.num_timesteps:,} is "
                             f"{float(each[~each.isfinite()][0])}; `step` must return finite rewards")  # fmt: skip
        self.episodes_done += len(each)
        self.episodes.extend(zip(each.tolist(), lengths[finished].tolist(), strict=True))
        self.metrics = self._finite(metrics)
        self.metrics["steps_per_second"] = steps / (time.perf_counter() - start)

    def _finite(self, metrics: Tree) -> dict[str, float]:
        """Metrics as floats. Raises ValueError with the likely cause if one is not finite."""
        values = {name: float(x) for name, x in metrics.items()}
        wrong = [name for name, x in values.items() if not math.isfinite(x)]
        if wrong:
            raise ValueError(f"{type(self).__name__}: {wrong[0]} is {values[wrong[0]]} by step {self.num_timesteps:,}. "
                             f"{self._cause()}")  # fmt: skip
        return values

    def _cause(self) -> str:
        state = self.program.state()
        for group, where in (("actor", "of an episode under way"), ("replay", "in the replay")):
            for name, x in leaves(state.get(group, {})).items():
                what = SIGNALS.get(name.rpartition(".")[2])
                if what and x.is_floating_point() and not x.isfinite().all():
                    return (f"{self.env.name}: the {what} {where} is {float(x[~x.isfinite()][0])}; `step` must return "
                            f"finite {what if what != 'return' else 'reward'}s")  # fmt: skip
        return "Lower learning_rate, scale rewards, or normalize observations (normalize_obs=True)"

    def check_weights(self) -> None:
        """Raise ValueError for weights that are not finite."""
        for name, x in leaves(self.program.state()["learner"]).items():
            if not x.isfinite().all():
                raise ValueError(f"{type(self).__name__}: {name} is not finite after {self.num_timesteps:,} steps. "
                                 f"{self._cause()}")  # fmt: skip

    def phase(self) -> Callable[[Tree], tuple[Tree, Tree]]:
        """The function of the next iteration in a pure environment."""
        return self.iterate

    def behaviour(self) -> Callable:
        """The function that chooses actions in the next iteration: `act`, or one with its signature."""
        return self.act

    def learning(self) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
        """The function of the next iteration where the host steps environments."""
        return self.absorb

    def predict(self, observation: Any, state: Tree | None = None, episode_start: np.ndarray | None = None,
                deterministic: bool = True, mask: np.ndarray | None = None) -> tuple[Any, Tree | None]:  # fmt: skip
        """Actions for observations of the environment's space, one or a batch of them.

        state: what the last call returned, for policies with a memory. episode_start: bool (n,), where it is forgotten.
        mask: which actions are possible. Returns (actions as the environment takes them, the next state or None).
        """
        obs, single = self._batched(observation)
        n = obs.shape[0]
        carry = self.carry(n) if state is None else state
        if episode_start is not None:
            started = torch.as_tensor(episode_start)
            carry = pytree.tree_map(lambda x: torch.where(started.view(-1, *[1] * (x.ndim - 1)), 0, x), carry)
        seen = {"obs": obs} | ({} if mask is None else {"mask": torch.as_tensor(mask).reshape(*obs.shape[:-1], -1)})
        learner = self.program.state()["learner"]
        self.predictions += 1
        key = keys.fold(keys.make(self.seed + 1), self.predictions)
        with torch.no_grad():
            policy = self.acting(learner)
            action, _, carry = self.act(policy, self.normalized(policy, seen), carry, key, not deterministic)
            action = self.to_user(action).numpy()
        return (action[0] if single else action), (carry or None)

    def evaluate(self, episodes: int = 10, deterministic: bool = True, env: Any = None, seed: int = 1) -> Evaluation:
        """Returns and lengths of new episodes.

        env: instead of the agent's; of a `VectorEnv`, each instance contributes equally many of the episodes, up to
        one. seed: no seed repeats training episodes.
        """
        return evaluate(self, episodes, deterministic, env, seed)

    def save(self, path: str | Path, replay: bool = True, score: float | None = None) -> Path:
        """Write everything that continuing needs to one file, and return its path. replay: whether with its data.
        score: the mean return that an evaluation gave it."""
        return files.save(self, Path(path), replay, score)

    @classmethod
    def load(cls, path: str | Path, env: Any = None, **options: Any) -> Any:
        """An agent from a file that `save` wrote. It continues bit for bit in a pure environment.

        env: needed unless it was given by name. options: replace those in the file. No code of the file is run.
        """
        if options.pop("custom_objects", None):
            raise ValueError("custom_objects replace what is in a file; give options by name, as in learning_rate=1e-4")
        return files.load(cls, files.Saved(Path(path)), env, options)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _make_env(self, env: Any, options: dict[str, Any]) -> Env | VectorEnv:
        self.env_name = env if isinstance(env, str) else None
        if isinstance(env, str):
            from tutti.rl.by_name import make

            env = make(env, self.config.n_envs)
        else:
            from tutti.rl.by_name import adapted

            env = adapted(env)
        if isinstance(env, VectorEnv) and env.n != self.config.n_envs:
            if "n_envs" in options:
                raise ValueError(f"n_envs is {options['n_envs']}, and env is a vector of {env.n}; leave it out")
            self.config = replace(self.config, n_envs=env.n)
        return env

    def _check_spaces(self) -> None:
        name, space = type(self).__name__, self.env.action_space
        if self.actions and not isinstance(space, self.actions):
            expected = " or ".join(x.__name__ for x in self.actions)
            suited = "PPO" if isinstance(space, spaces.Discrete | spaces.Box) else "PPO or A2C"
            raise ValueError(f"{name} needs a {expected} action space, and that of {self.env.name} is {space}; "
                             f"{suited} takes it")  # fmt: skip
        if len(self.env.agents) > 1 and not self.multi_agent:
            raise ValueError(f"{name} is for one agent, and {self.env.name} has {len(self.env.agents)}: use IPPO, "
                             "MAPPO, QMIX, VDN, COMA or MADDPG")  # fmt: skip

        if getattr(self.env, "gaps", False) and not self.gaps:
            raise ValueError(f"{name} learns from every row, and {self.env.name} spends steps on resets: make it with "
                             "autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP")  # fmt: skip

    def _begin(self) -> None:
        """The state of a new run."""
        key = keys.make(self.seed)
        n, learner = self.config.n_envs, self.init(self.seed)
        learner |= {"progress": torch.zeros(()), **self.normalizer.init(self.rows(n))}
        run: Tree = {"learner": learner, "key": keys.fold(key, 1), "steps": torch.zeros((), dtype=torch.int64),
                     "total": torch.ones(())}  # fmt: skip
        if isinstance(self.env, Env):
            run["actor"] = collect.begin(self, self.env, keys.fold(key, 2), n)
        else:
            self.host = HostActor(self, self.env, self.seed)
        with reads() as more:
            run |= self.more_state()
        self.constants |= more
        self.program, self.predictions = Program(run, self.level, self.threads), 0

    def more_state(self) -> Tree:
        """State of the run besides learner and actor, such as a replay."""
        return {}

    def prepare(self) -> None:
        """Tell the program the number of steps in all."""
        self.program.put({"total": torch.tensor(float(self.total))})

    def advance(self, run: Tree, steps: int) -> Tree:
        """The run with its number of steps and the learner's progress after `steps` more."""
        done = run["steps"] + steps
        progress = (done / run["total"]).clamp(max=1.0)
        return {**run, "steps": done, "learner": {**run["learner"], "progress": progress}}

    def _batched(self, observation: Any) -> tuple[Tensor, bool]:
        """Features (n, ..., size), and whether the observation is a single one."""
        space = self.env.observation_space
        own = _shifted(_plain(observation), getattr(self.env, "starts", (None, None))[0], -1)
        tensors = pytree.tree_map(torch.as_tensor, own)
        x = self.features(tensors)
        want = 1 + (len(self.env.agents) > 1)
        if x.shape[-1] != self.features.size or x.ndim not in (want, want + 1):
            shapes = pytree.tree_map(lambda t: tuple(t.shape), tensors)
            raise ValueError(f"observations of {self.env.name} are {space}, and this one has the shape {shapes}")
        return (x[None], True) if x.ndim == want else (x, False)


def _whole(name: str, x: Any, low: int) -> int:
    """A whole number from `low` on; floats such as 1e5 are taken."""
    number = float(x) if isinstance(x, Real) and not isinstance(x, bool) else math.nan  # pyright: ignore
    if not number.is_integer() or number < low:
        raise ValueError(f"{name} is {x!r}; it must be a whole number{f' from {low} on' if low > -(1 << 62) else ''}")
    return int(x)  # pyright: ignore


def _shifted(x: Any, by: Any, sign: int = 1) -> Any:
    """Values plus or minus the starts of discrete spaces (`VectorEnv.starts`)."""
    if by is None:
        return x
    from tutti.rl.adapt import layout

    by = pytree.tree_map(torch.from_numpy, by) if isinstance(x, Tensor) else by
    return layout.shifted(x, by, sign)


def _plain(x: Any) -> Any:
    """Dicts and tuples of observations as dicts with text keys, lists of numbers as arrays."""
    if isinstance(x, dict):
        return {str(k): _plain(v) for k, v in x.items()}
    if isinstance(x, tuple):
        return {str(i): _plain(v) for i, v in enumerate(x)}
    return np.asarray(x) if isinstance(x, list) else x


Callback = Callable[[Agent], bool | None]

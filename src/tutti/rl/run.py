"""The verbs of `tutti rl`: train an agent as a config says, evaluate it, and record how it acts."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tutti.config.build import build
from tutti.config.files import read, toml_value
from tutti.launch.interrupt import noted
from tutti.launch.launch import Interrupted, launch, under_launcher, world_size
from tutti.rl.algorithms import ALGORITHMS, algorithm
from tutti.rl.core.agent import Agent
from tutti.rl.core.callbacks import CheckpointCallback, Curve, EvalCallback, Every, TensorBoard, checkpoints
from tutti.rl.core.files import Saved, load, newest, whole
from tutti.rl.core.program import LEVELS
from tutti.rl.core.vector import VectorEnv
from tutti.rl.placement import job
from tutti.rl.placement.job import RunPlacement
from tutti.rl.placement.placement import SPLIT, Placed
from tutti.rl.placement.ranks import process
from tutti.rl.presets import PRESETS, preset
from tutti.whole_files import write_text

FINAL, CURVE, CONFIG = "agent.safetensors", "curve.json", "config.json"


@dataclass(frozen=True)
class RunConfig:
    """A config of `tutti rl train`: the keys of its TOML file.

    algorithm, env: names. steps: number of steps to learn for. seed, level: as for `tutti.rl.Agent`. options: those of
    the algorithm.
    threshold: learning ends when an evaluation reaches this mean return. evaluate: steps between evaluations.
    checkpoint: steps between checkpoints. data: data of an offline algorithm, a folder in Minari's format or the name
    of data that our agents make (`tutti.rl.offline_data`). placement, ranks, workers: where it runs
    (`tutti.rl.placement.placement`).
    """

    algorithm: str
    env: str
    steps: int
    seed: int = 0
    level: str = "O2"
    out: str = ""
    threshold: float | None = None
    evaluate: int = 20_000
    checkpoint: int = 100_000
    data: str = ""
    placement: str = "fused"
    ranks: int = 1
    workers: str = "processes"
    options: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(name: str) -> RunConfig:
        """Load a run from a TOML file or a preset name."""
        if not name.endswith(".toml"):
            p = preset(name)
            return RunConfig(p.algorithm, p.env, p.steps, out=f"out/rl/{name}", options=dict(p.options), data=p.data)
        path = Path(name)
        if not path.exists():
            near = " or ".join(get_close_matches(path.stem, PRESETS, 3, 0.0))
            raise ValueError(f"there is no file {path}; near presets are {near} (`tutti rl list` shows all)")
        return build(RunConfig, {"out": f"out/rl/{path.stem}", **read(path)}, str(path))

    def check(self) -> None:
        """Raise ValueError for numbers that no run can have."""
        for name in ("steps", "evaluate", "checkpoint", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.level not in LEVELS:
            raise ValueError(f"level is {self.level!r}; it must be one of {', '.join(LEVELS)}")


def train(config: str, overrides: dict[str, Any], option: Sequence[str], processes: int | None, plan: Path | None,
          restarts: int) -> None:  # fmt: skip
    """Train an agent as `tutti rl train` says. overrides: values that replace those of the config."""
    run = replace(RunConfig.of(config), **overrides)
    run = replace(run, options={**run.options, **dict(map(parsed, option))})
    run.check()
    if outside := [name for name in run.options if name in RunConfig.__dataclass_fields__]:
        raise ValueError(
            f"{outside[0]} is not an option of the algorithm: write it above [options], or as --{outside[0]}"
        )
    if plan is not None:
        if processes is not None or "placement" in overrides or "ranks" in overrides:
            raise ValueError(f"--plan {plan} says the placement, ranks and processes: leave out those options")
        place = RunPlacement.load(plan)
        run, processes = replace(run, placement=place.placement, ranks=place.ranks), place.processes
    if run.placement == "fused" and world_size() > 1:
        raise ValueError(f"this job has {world_size()} processes, and without a placement one trains: give --placement "
                         f"learners --ranks {world_size()}, or start one process")  # fmt: skip
    if run.placement != "fused" or run.ranks != 1:
        return _train_placed(run, processes, restarts)
    folder = Path(run.out)
    agent = _begun(run, folder)
    if agent.num_timesteps >= run.steps:
        print(f"all {run.steps:,} steps are done; more need --steps")
    curve, scores = Curve(), EvalCallback(run.evaluate, threshold=run.threshold, best=folder / "best.safetensors")
    curve.points.extend(_points(folder))
    written = CurveFile(curve, folder, run.checkpoint)  # before the checkpoint: a killed run loses no points
    callbacks = [curve, scores, written, CheckpointCallback(folder, run.checkpoint), TensorBoard(folder), _says(scores)]
    with noted(signal.SIGTERM) as received:
        try:
            callbacks.append(lambda agent: not received)
            agent.learn(max(run.steps - agent.num_timesteps, 0), callbacks, progress_bar=True)
        finally:
            written.run(agent)
            agent.save(folder / FINAL)
            if agent.num_timesteps < run.steps and (received or sys.exc_info()[0] is KeyboardInterrupt):
                print(f"stopped after {agent.num_timesteps:,} steps; the same command continues", flush=True)
    if received:
        raise Interrupted(signal.SIGTERM)
    _draw(curve.points, folder / "curve.svg", run)
    print(f"{agent.evaluate(20)}; saved in {folder}")


def play(agent: Agent, to: str, steps: int, seed: int, fps: int) -> None:
    from tutti.rl.video import record

    count, total = record(agent, Path(to), steps, seed, fps)
    print(f"wrote {to}: {count} frames, return {total:.1f}")


def show() -> None:
    """Print algorithms, presets and environments."""
    from tutti.rl.envs.registry import names

    print("algorithms  ", ", ".join(ALGORITHMS))
    print("environments", ", ".join(names()), "and those of gymnasium, envpool:..., dm_control:...")
    width = max(map(len, PRESETS))
    for name, p in PRESETS.items():
        print(f"  {name:{width}}  {p.algorithm} on {p.env}: return {p.threshold:g} in {p.steps:,} steps")


def _train_placed(run: RunConfig, processes: int | None, restarts: int) -> None:
    """Train under a placement: in this process if it is one of a job already, else in a job of so many."""
    if run.data:
        raise ValueError(f"{run.algorithm} learns from data, without environments: it has no placement")
    count = processes or (run.ranks if run.placement in SPLIT else 1)
    if count == 1 or under_launcher():
        return placed_run(run)
    _check_folder(run, Path(run.out))
    _placed(replace(run, level="eager"))  # validate once, before processes start
    launch(placed_run, count, run, restarts=restarts)


def placed_run(run: RunConfig) -> None:
    """A process of a run under a placement."""
    folder, placed = Path(run.out), _placed(run)
    callbacks: list[Any] = []
    curve, scores = Curve(), EvalCallback(run.evaluate, threshold=run.threshold, best=folder / "best.safetensors")
    if process() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CONFIG, json.dumps(_check_folder(run, folder)), durable=True)
        curve.points.extend(_points(folder))
        written = CurveFile(curve, folder, every=1)
        callbacks = [curve, written, scores, TensorBoard(folder), _says(scores)]
    with noted(signal.SIGTERM) as received:  # the state is saved at multiples of the two intervals
        job.train(placed, run.steps, (run.evaluate, run.checkpoint), folder, callbacks, lambda: bool(received))
    if received:
        if isinstance(placed.agent.env, VectorEnv):
            placed.agent.env.close()
        raise Interrupted(signal.SIGTERM)
    if process() == 0:
        written.run(placed.agent)
        placed.agent.save(folder / FINAL)
        _draw(curve.points, folder / "curve.svg", run)
        print(f"{placed.agent.evaluate(20)}; saved in {folder}")
    if isinstance(placed.agent.env, VectorEnv):
        placed.agent.env.close()


def _placed(run: RunConfig) -> Placed:
    options = options_of(run)
    return Placed(
        run.algorithm, run.env, run.placement, run.ranks, seed=run.seed, level=run.level, workers=run.workers, **options
    )


def _check_folder(run: RunConfig, folder: Path) -> dict[str, Any]:
    """The config of the run as JSON. Raises ValueError if the folder has the config of another run."""
    free = {"steps", "out", "threshold", "workers"} | ({"placement", "ranks"} if run.placement == "fused" else set())
    config = json.loads(json.dumps({k: v for k, v in asdict(run).items() if k not in free}))
    path = folder / CONFIG
    if path.exists() and (before := _json(path, dict)) != config:
        differences = "; ".join(_differences(before, config))
        raise ValueError(f"{folder} has another run: {differences}; choose another --out or delete it")
    return config


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two configs, options of the algorithm one by one."""
    texts = []
    for key in dict.fromkeys((*before, *now)):
        a, b = before.get(key, "not given"), now.get(key, "not given")
        if isinstance(a, dict) and isinstance(b, dict):
            texts += _differences(a, b)
        elif a != b:
            texts.append(f"{key} was {a} and is {b}")
    return texts


def options_of(run: RunConfig) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in run.options.items()}


def _begun(run: RunConfig, folder: Path) -> Agent:
    """A new agent, or the one of the folder's newest checkpoint."""
    config = _check_folder(run, folder)
    paths = sorted([*checkpoints(folder), *folder.glob(FINAL)], key=lambda x: x.stat().st_mtime)
    kind = algorithm(run.algorithm)
    options = options_of(run)
    more: dict[str, Any] = {"data": run.data} if run.data else {}
    if saved := newest(paths, whole):
        agent = load(kind, saved, run.env, {"level": run.level, **more})
        print(f"continuing after {agent.num_timesteps:,} steps")
        return agent
    agent = kind(run.env, seed=run.seed, level=run.level, **options, **more)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONFIG, json.dumps(config), durable=True)
    return agent


def opened(path: str, env: str = "") -> Agent:
    """The agent of a file, or of the folder of a run. env: instead of the environment that the file names."""
    folder = Path(path)
    if folder.is_dir():
        files = [*checkpoints(folder), *folder.glob(FINAL)]
        if not files:
            raise ValueError(f"{folder} has no agent; tutti rl train writes one")
        folder = max(files, key=lambda x: x.stat().st_mtime)
    return load(Agent, Saved(folder), env or None, {"level": "eager"})


def parsed(text: str) -> tuple[str, Any]:
    """A pair "name=value", the value as in TOML."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option {text}: write name=value, as in --option gamma=0.98")
    return name, toml_value(value)


def _says(scores: EvalCallback):
    """A callback that prints each evaluation once."""
    said = 0

    def tell(agent: Agent) -> None:
        nonlocal said
        for steps, evaluation in scores.evaluations[said:]:
            print(f"{steps:>12,} steps  {evaluation}", flush=True)
        said = len(scores.evaluations)

    return tell


class CurveFile(Every):
    """Writes a learning curve to a folder."""

    def __init__(self, curve: Curve, folder: Path, every: int):
        super().__init__(every)
        self.curve, self.path = curve, folder / CURVE

    def run(self, agent: Agent) -> None:
        write_text(self.path, json.dumps(self.curve.points), durable=True)


def _points(folder: Path) -> list[tuple[int, float]]:
    path = folder / CURVE
    if not path.exists():
        return []
    points = _json(path, list)
    if not all(isinstance(x, list) and len(x) == 2 and all(isinstance(y, int | float) for y in x) for x in points):
        raise ValueError(f"{path} does not hold a curve: it must be a list of pairs of numbers; delete it")
    return [tuple(x) for x in points]


def _json(path: Path, kind: type) -> Any:
    """Parse a JSON file of a run's folder."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; delete it, or choose another --out") from None
    if not isinstance(content, kind):
        raise ValueError(
            f"{path} holds a {type(content).__name__}, not a {kind.__name__}; delete it, or choose another --out"
        )
    return content


def _draw(points: list[tuple[int, float]], to: Path, run: RunConfig) -> None:
    """The learning curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    if points:
        axes.plot(*zip(*points, strict=True))
    axes.set(
        xlabel="steps", ylabel="mean return of 100 episodes", title=f"{run.algorithm} on {run.env}, seed {run.seed}"
    )
    figure.savefig(to)

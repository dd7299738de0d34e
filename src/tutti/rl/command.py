"""The verb `tutti rl`: its options. The work is done in `tutti.rl.run`, imported when a verb runs."""

from __future__ import annotations

import inspect
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tutti.config.options import call_verb

First = tyro.conf.Positional


def train(
    config: First[str],
    steps: int | None = None,
    seed: int | None = None,
    level: str | None = None,
    out: str | None = None,
    threshold: float | None = None,
    option: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    placement: str | None = None,
    ranks: int | None = None,
    processes: int | None = None,
    plan: Path | None = None,
    workers: Literal["processes", "ray"] | None = None,
    restarts: int = 3,
) -> None:
    """Train an agent. The same command continues a run that was interrupted.

    With --placement the fragments of the algorithm run on several ranks; `tutti plan --rl` says which placement is the
    fastest. Options of the algorithm are those of all ranks together.

    Args:
        config: A TOML file, or a preset such as ppo-cartpole (`tutti rl list` shows all).
        steps: Number of steps of all environments together.
        seed: Random seed of weights, environments and exploration.
        level: O2 compiles whole iterations, O1 groups of operators; O0 runs operators one by one, eager plain Python.
        out: Folder for checkpoints, the curve and TensorBoard's files; by default out/rl/ and the name of the config.
        threshold: End when an evaluation reaches this mean return.
        option: An option of the algorithm, as in `--option gamma=0.98`. May be repeated.
        placement: Where acting and learning run: fused, learners, actors, async, environments or server.
        ranks: Number of ranks of the placement.
        processes: Number of processes that the ranks are shared out among; by default one for each rank, and 1 with
            environments, whose ranks are worker processes. 1 runs ranks as threads.
        plan: A placement that `tutti plan --rl ... --save` wrote, instead of the three above.
        workers: What the workers of the placement environments are: processes of this machine, or actors of Ray, on the
            cluster that RAY_ADDRESS names or a new one here.
        restarts: How often all processes start again, from the last state, when one of them is killed or fails.
    """
    from tutti.rl import run

    overrides = {"steps": steps, "seed": seed, "level": level, "out": out, "threshold": threshold,
                 "placement": placement, "ranks": ranks, "workers": workers}  # fmt: skip
    run.train(config, {k: v for k, v in overrides.items() if v is not None}, option, processes, plan, restarts)


def evaluate(agent: First[str], episodes: int = 20, seed: int = 1, deterministic: bool = True, env: str = "") -> None:
    """Print the returns of new episodes.

    Args:
        agent: The file of an agent, or the folder of a run.
        episodes: Number of episodes.
        seed: Random seed of the environments.
        deterministic: Take the most likely action.
        env: Environment, instead of the one that the file names.
    """
    from tutti.rl import run

    print(run.opened(agent, env).evaluate(episodes, deterministic=deterministic, seed=seed))


def play(
    agent: First[str], to: str = "play.gif", steps: int = 500, seed: int = 1, fps: int = 30, env: str = ""
) -> None:
    """Record an episode as an animated GIF.

    Args:
        agent: The file of an agent, or the folder of a run.
        to: Name of the .gif file.
        steps: Most steps of the episode.
        seed: Random seed of the environment.
        fps: Frames per second.
        env: Environment, instead of the one that the file names.
    """
    from tutti.rl import run

    if steps < 1 or fps < 1:
        raise ValueError(f"--steps {steps}, --fps {fps}: both must be at least 1")
    run.play(run.opened(agent, env), to, steps, seed, fps)


def show() -> None:
    """List algorithms, presets and environments."""
    from tutti.rl import run

    run.show()


VERBS: dict[str, Any] = {"train": train, "eval": evaluate, "play": play, "list": show}


def rl(argv: list[str]) -> None:
    """Run `tutti rl`."""
    if argv and not argv[0].startswith("-") and argv[0] not in VERBS:
        near = " or ".join(get_close_matches(argv[0], VERBS, 2, 0.0)[:1])
        raise ValueError(f"there is no verb {argv[0]!r}; did you mean {near}? There are {', '.join(VERBS)}")
    if argv and argv[0] in VERBS:
        check_verb_options(argv[0], argv[1:])
    call_verb(VERBS, "tutti rl", "Reinforcement learning.", argv)


def check_verb_options(verb: str, words: list[str]) -> None:
    """Raise ValueError for an option that a verb does not have, with the nearest of its own or of the algorithms'."""
    own = {name.replace("_", "-"): x.annotation for name, x in inspect.signature(VERBS[verb]).parameters.items()
           if not str(x.annotation).startswith("First")}  # fmt: skip
    options_of_verb = {"help", *own, *(f"no-{name}" for name, annotation in own.items() if annotation == "bool")}
    for word in words:
        name = word.removeprefix("--").partition("=")[0].replace("_", "-")
        if not word.startswith("--") or not name or name in options_of_verb:
            continue
        near = [f"--{x}" for x in get_close_matches(name, options_of_verb, 1, 0.7)]
        if verb == "train" and not near:
            options = get_close_matches(name.replace("-", "_"), _algorithm_options(), 1, 0.7)
            near = [f"--option {x}=..." for x in options]
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"no option {word.partition('=')[0]}; {hint}tutti rl {verb} --help lists all")


def _algorithm_options() -> set[str]:
    """The names of the options of all algorithms."""
    from tutti.rl.algorithms import ALGORITHMS, algorithm

    return {f.name for kind in ALGORITHMS for f in fields(algorithm(kind).Config)}

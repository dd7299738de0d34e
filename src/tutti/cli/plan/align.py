"""`tutti plan --align`: where completions are written and learned, and what a round costs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tutti.cli.plan.workload import DTYPES, Captured, Workload
from tutti.cli.tables import consoles, table
from tutti.hardware import Cluster
from tutti.launch.progress import progress
from tutti.plan.explain import seconds, size


def plan_align(
    algorithm: Annotated[Literal["ppo", "grpo"], tyro.conf.Positional],
    model: str,
    cluster: str,
    completions: int = 256,
    generations: int | None = None,
    prompt: int = 256,
    tokens: int = 512,
    batch: int | None = None,
    epochs: int | None = None,
    reference: bool | None = None,
    reward_model: bool | None = None,
    optimizer: str = "adamw",
    dtype: str = "bfloat16",
    level: str = "O2",
    top: int = 8,
    save: Path | None = None,
) -> None:
    """Predict a round of alignment under each placement of its rollouts, and choose one.

    A round writes completions, scores them, learns from them, and moves the new weights to the engines. Needs neither
    the devices nor memory for the model. `rollout_placement` of `tutti align` takes what is chosen.

    Args:
        algorithm: ppo, or grpo, which stands for RLOO and REINFORCE++, too.
        model: Folder with a config.json of transformers, or such a file.
        cluster: The devices, such as h100:8, h100:4x8 or cpu:4.
        completions: Completions of a round.
        generations: Completions of each prompt. Default: 1 for ppo, 8 for grpo.
        prompt: Tokens of a prompt.
        tokens: Tokens of a completion.
        batch: Completions of a step of training. Default: all of a round.
        epochs: How often a round is learned. Default: 4 for ppo, 1 for grpo.
        reference: Whether there is a reference model. Default: for ppo.
        reward_model: Whether a model of the same size gives rewards. Default: for ppo.
        optimizer: A class of torch.optim in lower case; or adamw8bit, lamb, lion of tutti.optim.
        dtype: Dtype of parameters: bfloat16 or float32.
        level: O0 runs steps of training operator by operator, O1 compiles groups of operators, O2 whole layers.
        top: Placements to print.
        save: Write all placements to this JSON file.
    """
    from transformers import AutoConfig

    from tutti.align.rollouts.forecast import Planner, Round, chosen, why

    ppo = algorithm == "ppo"
    rows = batch or completions
    sizes = Round.of(algorithm, completions, generations or (1 if ppo else 8), prompt, tokens, rows,
                     epochs or (4 if ppo else 1), ppo if reference is None else reference,
                     ppo if reward_model is None else reward_model)  # fmt: skip
    target, config = Cluster.parse(cluster), AutoConfig.from_pretrained(model)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and prompt + tokens > positions:
        raise ValueError(f"--prompt {prompt} and --tokens {tokens} are more than the model's {positions} positions")
    console = consoles()[0]
    with progress("reading the model") as tell:
        workload = Workload(model, rows, prompt + tokens, optimizer, dtype, masters=dtype == "bfloat16")
        captured = Captured(workload, tell)
        batch = captured.facts.batch
        planner = Planner(captured.graph, batch, config, DTYPES[dtype], target, sizes, level, tell)
        ranked = planner.forecasts()
    best = chosen(ranked)
    shown = table("placement", "training", "engines", "round", "writing", "scoring", "learning", "weights", "received",
                  "memory", left=("training", "engines"))  # fmt: skip
    for x in ranked[:top]:
        name = x.placement + (", ahead" if x.ahead else "") + (" (chosen)" if x is best else "")
        times = [seconds(t) for t in (x.seconds, x.writing, x.scoring, x.learning, x.moving)]
        shown.add_row(name, x.training, x.engines, *times, size(x.moved), size(x.memory))
    console.print(shown)
    print(why(ranked, best))
    for name, error in planner.refused.items():
        print(f"not possible: {name}: {error}")
    if save:
        save.write_text(json.dumps([{**asdict(x), "seconds": x.seconds} for x in ranked], indent=2) + "\n")
        print(f"saved {save}")

"""`tutti align`: align a model as a config file says.

    model = "out/lm/model"                 # a folder of transformers
    data = "pairs.jsonl"                   # whatever tutti.data.open_source opens
    held_out = "held-out.jsonl"
    out = "out/dpo"
    reference = "out/sft/model"            # of dpo, kto and trainers with rewards; by default the model itself
    teacher = "out/large/model"            # of gkd
    env = "games.py:Guess"                 # what makes environments, for trainers with rewards; the file is run

    [options]                              # of the trainer's config, such as tutti.align.DPOConfig
    beta = 0.1
    max_steps = 500

    [lora]                                 # of peft.LoraConfig: adapters alone are trained
    r = 16

    [[rewards]]                            # of ppo, grpo, rloo, reinforce, online_dpo and best_of_n
    model = "out/reward/model"             # that `tutti align reward` has trained
    weight = 1.0

    [[rewards]]
    verifier = "exact_match"               # of tutti.align.rewards.verify, and its options
    column = "answer"
    extract = "boxed"                      # or a regular expression
    normalize = "number"                   # or "plain"

    [parallel]
    processes = 2

The same command continues an interrupted run. The aligned model lies in `out/model`.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from tutti.align.arguments import pretrained
from tutti.align.report import write_report
from tutti.config import files
from tutti.config.build import build
from tutti.keywords import check_name
from tutti.launch.launch import launch, rank, under_launcher

Kind = Literal["sft", "reward", "prm", "dpo", "kto", "orpo", "ppo", "grpo", "rloo", "reinforce", "online_dpo",
               "best_of_n", "gkd"]  # fmt: skip
REWARDED = "ppo", "grpo", "rloo", "reinforce", "online_dpo", "best_of_n"
REFERENCED = "dpo", "kto", *REWARDED
NAMES = {"sft": "SFT", "reward": "Reward", "prm": "PRM", "dpo": "DPO", "kto": "KTO", "orpo": "ORPO", "ppo": "PPO",
         "grpo": "GRPO", "rloo": "RLOO", "reinforce": "Reinforce", "online_dpo": "OnlineDPO", "best_of_n": "BestOfN",
         "gkd": "GKD"}  # fmt: skip
VERIFIERS = "exact_match", "regex", "json_schema", "unit_tests", "overlong", "length_penalty"
FUNCTIONS = {"extract": ("boxed", "code_of"), "normalize": ("plain", "number")}
"""Options of verifiers that are functions of `tutti.align.rewards.verify`, by their names."""


@dataclass(frozen=True)
class AlignParallel:
    """processes: on this machine."""

    processes: int = 1


@dataclass(frozen=True)
class AlignRun:
    """The sections of the config; the docstring of this file shows them."""

    model: str
    data: str
    out: str
    held_out: str = ""
    reference: str = ""
    teacher: str = ""
    env: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    rewards: tuple[dict[str, Any], ...] = ()
    parallel: AlignParallel = AlignParallel()


def command(
    kind: Annotated[Kind, tyro.conf.Positional],
    config: Annotated[Path, tyro.conf.Positional],
    reward: tuple[str, ...] = (),
) -> None:
    """Align a model: fine-tune it on texts or chats, train a reward model, learn from preferences or from rewards.

    Args:
        kind: The algorithm. From ppo to best_of_n, models learn from rewards of what they write, by gkd from a teacher.
        config: A TOML or YAML file with model, data, out, [options], [lora], [[rewards]] and [parallel].
        reward: Functions that score completions, as `rewards.py:score`, for algorithms with rewards. The file is run.
    """
    run = read(config, kind)
    if kind in REWARDED and not (run.rewards or run.env or reward):
        raise ValueError(f"{kind} needs rewards: --reward FILE.py:NAME, or [[rewards]] or env in {config}")
    if kind not in REWARDED and (reward or run.rewards or run.env):
        raise ValueError(f"{kind} takes no rewards and no env; {', '.join(REWARDED)} do")
    for name in reward:
        function_of(name)
    if run.env:
        function_of(run.env, "env")
    if under_launcher() or run.parallel.processes == 1:
        align(kind, run, reward)
    else:
        launch(align, run.parallel.processes, kind, run, reward)


def read(path: Path, kind: str) -> AlignRun:
    """The run that a file describes. Raises ValueError, naming the file, for what is unknown or missing."""
    run: AlignRun = build(AlignRun, files.read(path), str(path))
    if run.parallel.processes < 1:
        raise ValueError(f"{path}: parallel.processes is {run.parallel.processes}; it must be at least 1")
    for i, reward in enumerate(run.rewards):
        _check_reward(reward, f"{path}: [[rewards]] {i + 1}")
    if run.reference and kind not in REFERENCED:
        raise ValueError(f"{path}: {kind} has no reference")
    if bool(run.teacher) != (kind == "gkd"):
        raise ValueError(f'{path}: gkd needs teacher = "..."' if kind == "gkd" else f"{path}: {kind} has no teacher")
    return run


def _check_reward(table: Mapping[str, Any], where: str) -> None:
    """Raises ValueError, saying where, for a table that is none of a reward."""
    from tutti.align.rewards import verify

    if ("model" in table) == ("verifier" in table):
        raise ValueError(f'{where} needs model = "..." or verifier = "{VERIFIERS[0]}"')
    options: Mapping[str, Any] = {}
    if "verifier" in table:
        name = table["verifier"]
        check_name(name, VERIFIERS, f"{where}: there is no verifier {name!r}")
        options = signature(getattr(verify, name)).parameters
    for key in table:
        check_name(key, ("model", "verifier", "weight", *options), f"{where} has no key {key!r}")
    if missing := [x for x in options if options[x].default is Parameter.empty and x not in table]:
        raise ValueError(f"{where}: {table['verifier']} needs {', '.join(missing)}")


def reward_of(table: Mapping[str, Any]) -> Any:
    """The reward of a table of [[rewards]]: a model, or a verifier with its options."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from tutti.align.rewards import sandbox, verify

    if "model" in table:
        return pretrained(AutoModelForSequenceClassification, table["model"], dtype=torch.float32, num_labels=1)
    options = {key: x for key, x in table.items() if key not in ("verifier", "weight")}
    for key, names in FUNCTIONS.items():
        if options.get(key) in names:
            options[key] = getattr(verify, options[key])
    if "limits" in options:
        options["limits"] = sandbox.Limits(**options["limits"])
    return getattr(verify, table["verifier"])(**options)


def align(kind: str, run: AlignRun, reward: Sequence[str] = ()) -> None:
    """Build everything, train and save, as one rank of a job."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tutti import align as algorithms
    from tutti.data import open_source
    from tutti.train.stop import train_until_stopped

    trainer_class, config = (getattr(algorithms, f"{NAMES[kind]}{x}") for x in ("Trainer", "Config"))
    values = {"report_to": "none", "save_strategy": "steps", "save_steps": 100, **run.options}
    names = [x.name for x in fields(config)]
    if "log_completions" in names:
        values = {"log_completions": True, **values}
    for key in values:
        check_name(key, names, f"{config.__name__} has no option {key!r}")
    out, args = Path(run.out), config(output_dir=run.out, **values)
    tokenizer = AutoTokenizer.from_pretrained(run.model, trust_remote_code=False)
    options: dict[str, Any] = {"train_dataset": open_source(run.data), "processing_class": tokenizer}
    if run.held_out:
        options["eval_dataset"] = open_source(run.held_out)
    if run.lora:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(**run.lora)
    if run.reference:
        options["ref_model"] = pretrained(AutoModelForCausalLM, run.reference, dtype="auto")
    if run.teacher:
        options["teacher_model"] = run.teacher
    if run.env:
        options["env"] = function_of(run.env, "env")
    if kind in REWARDED:
        options["reward_funcs"] = [*map(function_of, reward), *map(reward_of, run.rewards)]
        weights = [1.0] * len(reward) + [float(x.get("weight", 1.0)) for x in run.rewards]
        args.reward_weights = args.reward_weights or [*weights, *([1.0] if run.env else [])]
    trainer = trainer_class(run.model, args=args, **options)
    train_until_stopped(trainer, resume=any(out.glob("checkpoint-*/trainer_state.json")))
    trainer.save_model(str(out / "model"))
    metrics = trainer.evaluate() if run.held_out else {}
    if rank() == 0:
        trainer.save_state()
        for name, value in metrics.items():
            print(f"{name:30} {value:.6g}")
        report = write_report(out, f"{out.name}: {kind}", trainer.state.log_history)
        print(f"report                         {report}")
        print(f"model                          {out / 'model'}", flush=True)


def function_of(name: str, option: str = "--reward") -> Any:
    """The function that `FILE.py:NAME` names. The file is run. Raises ValueError if there is none. option: its name."""
    path, _, own = name.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(f"{option} {name}: there is no file {path or name!r}; give FILE.py:NAME")
    function = runpy.run_path(path).get(own)
    if not callable(function):
        raise ValueError(f"{option} {name}: {path} has no function {own!r}")
    return function


assert set(NAMES) == set(get_args(Kind))

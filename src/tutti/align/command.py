"""`tutti align`: align a model as a config file says.

    model = "out/lm/model"                 # a folder of transformers
    data = "pairs.jsonl"                   # whatever tutti.data.open_source opens
    held_out = "held-out.jsonl"
    out = "out/dpo"
    reference = "out/sft/model"            # of dpo, kto and trainers that generate; by default the model itself

    [options]                              # of the trainer's config, such as tutti.align.DPOConfig
    beta = 0.1
    max_steps = 500

    [lora]                                 # of peft.LoraConfig: adapters alone are trained
    r = 16

    [[rewards]]                            # of trainers that generate
    model = "out/reward/model"             # that `tutti align reward` has trained
    weight = 1.0

    [parallel]
    processes = 2

The same command continues an interrupted run. The aligned model lies in `out/model`.
"""

from __future__ import annotations

import runpy
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from tutti.keywords import check_name
from tutti.launch.launch import launch, rank, under_launcher

Kind = Literal["sft", "reward", "prm", "dpo", "kto", "orpo", "ppo", "grpo", "rloo", "reinforce"]
GENERATE = "ppo", "grpo", "rloo", "reinforce"
REFERENCED = "dpo", "kto", *GENERATE
NAMES = {"sft": "SFT", "reward": "Reward", "prm": "PRM", "dpo": "DPO", "kto": "KTO", "orpo": "ORPO", "ppo": "PPO",
         "grpo": "GRPO", "rloo": "RLOO", "reinforce": "Reinforce"}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The sections of the config; the docstring of this file shows them."""

    model: str
    data: str
    out: str
    held_out: str = ""
    reference: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    rewards: list[dict[str, Any]] = field(default_factory=list)
    parallel: dict[str, Any] = field(default_factory=dict)


def command(
    kind: Annotated[Kind, tyro.conf.Positional],
    config: Annotated[Path, tyro.conf.Positional],
    reward: tuple[str, ...] = (),
) -> None:
    """Align a model: fine-tune it on texts or chats, train a reward model, learn from preferences or from rewards.

    Args:
        kind: sft, reward (models of outcomes), prm (of steps), dpo, kto, orpo; ppo, grpo, rloo and reinforce generate.
        config: A TOML file with model, data, out, [options], [lora], [[rewards]] and [parallel].
        reward: Functions that score completions, as `rewards.py:score`, for algorithms that generate. The file is run.
    """
    run = read(config, kind)
    if reward and kind not in GENERATE:
        raise ValueError(f"{kind} takes no rewards; {', '.join(GENERATE)} do")
    if kind in GENERATE and not (run.rewards or reward):
        raise ValueError(f"{kind} needs rewards: --reward FILE.py:NAME, or [[rewards]] in {config}")
    for name in reward:
        function_of(name)
    processes = run.parallel.get("processes", 1)
    if under_launcher() or processes == 1:
        align(kind, run, reward)
    else:
        launch(align, processes, kind, run, reward)


def read(path: Path, kind: str) -> Run:
    """The run that a file describes. Raises ValueError, naming the file, for what is unknown or missing."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; `tutti align {kind}` reads a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    sections = [x.name for x in fields(Run)]
    for key in table:
        check_name(key, sections, f"{path}: there is no key {key!r}")
    for name in ("model", "data", "out"):
        if not isinstance(table.get(name), str):
            raise ValueError(f'{path} needs {name} = "..."')
    for key in table.get("parallel", {}):
        check_name(key, ("processes",), f"{path}: [parallel] has no key {key!r}")
    for i, each in enumerate(table.get("rewards", [])):
        for key in each:
            check_name(key, ("model", "weight"), f"{path}: [[rewards]] {i + 1} has no key {key!r}")
        if "model" not in each:
            raise ValueError(f'{path}: [[rewards]] {i + 1} needs model = "..."')
    if table.get("reference") and kind not in REFERENCED:
        raise ValueError(f"{path}: {kind} has no reference")
    return Run(**table)


def align(kind: str, run: Run, reward: Sequence[str] = ()) -> None:
    """Build everything, train and save, as one rank of a job."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from tutti import align as algorithms
    from tutti.data import open_source

    trainer_class, config = (getattr(algorithms, f"{NAMES[kind]}{x}") for x in ("Trainer", "Config"))
    values = {"report_to": "none", "save_strategy": "steps", "save_steps": 100, **run.options}
    names = [x.name for x in fields(config)]
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
        options["ref_model"] = AutoModelForCausalLM.from_pretrained(run.reference, dtype="auto")
    if kind in GENERATE:
        functions: list[Any] = [function_of(x) for x in reward]
        weights = [1.0] * len(functions)
        for each in run.rewards:
            functions.append(AutoModelForSequenceClassification.from_pretrained(each["model"], dtype=torch.float32))
            weights.append(float(each.get("weight", 1.0)))
        options["reward_funcs"] = functions
        args.reward_weights = args.reward_weights or weights
    trainer = trainer_class(run.model, args=args, **options)
    trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*/trainer_state.json")))
    trainer.save_model(str(out / "model"))
    metrics = trainer.evaluate() if run.held_out else {}
    if rank() == 0:
        trainer.save_state()
        for name, value in metrics.items():
            print(f"{name:30} {value:.6g}")
        print(f"model                          {out / 'model'}", flush=True)


def function_of(name: str) -> Any:
    """The function that `FILE.py:NAME` names. The file is run. Raises ValueError if there is none."""
    path, _, own = name.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(f"--reward {name}: there is no file {path or name!r}; give FILE.py:NAME")
    function = runpy.run_path(path).get(own)
    if not callable(function):
        raise ValueError(f"--reward {name}: {path} has no function {own!r}")
    return function


assert set(NAMES) == set(get_args(Kind))

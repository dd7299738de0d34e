"""Alignment from nothing, on a task whose true reward is known: a model learns to write sums that have a given result.

A Llama of 0.2 million parameters with 24 tokens goes through four steps, and two more algorithms, on three seeds:

1. It is trained on random sums such as `9+8=17;`.
2. `SFTTrainer`: it is fine-tuned on prompts such as `17:` and sums, of which only some have that result.
3. `RewardTrainer`: a reward model learns from pairs of sums that the fine-tuned model wrote, the better one first.
4. `PPOTrainer`: the fine-tuned model learns to write what the reward model likes, near to what it was.

`DPOTrainer` learns from the pairs of step 3, and `GRPOTrainer` from the true reward. By seed and step:

- `true reward`: the share of sampled completions that are a sum with the result that was asked for.
- `kl`: from the fine-tuned model, the mean of the last rounds, in nats a completion (PPO) or a token (GRPO).
- `seconds`: of the wall clock.
- `curve`: as logged each five steps: rewards of the reward model (PPO), accuracies of pairs (DPO), true rewards (GRPO).

`results/align_demo.svg` draws the curves.
"""

from __future__ import annotations

import ast
import copy
import operator
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

import harness
from tutti.align import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from tutti.align.rollouts.rollout import Sampler
from tutti.serve import Sampling

SEEDS = 0, 1, 2
RIGHT = 0.5  # share of the sums of fine-tuning that have the result that was asked for
LONGEST = 8  # tokens of a completion
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
RESULTS = range(1, 25)


def tokenizer() -> Any:
    """Characters as tokens."""
    symbols = ["<pad>", "<s>", "</s>", *"0123456789+-*=:;"]
    characters = Tokenizer(models.WordLevel({x: i for i, x in enumerate(symbols)}, "<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore
    characters.decoder = decoders.Fuse()  # pyright: ignore
    return PreTrainedTokenizerFast(tokenizer_object=characters, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def result(text: str) -> int | None:
    """The result of a sum of one-digit numbers such as 9+8, or None if the text is none."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(tree, ast.BinOp) or type(tree.op) not in OPERATORS:
        return None
    numbers = [getattr(x, "value", None) for x in (tree.left, tree.right)]
    if not all(isinstance(x, int) and len(str(x)) == 1 for x in numbers):
        return None
    return OPERATORS[type(tree.op)](*numbers)


def true_reward(prompts: list[str], completions: list[str]) -> list[float]:
    """Whether a completion is a sum with the result that its prompt asks for."""
    return [float(result(y) == int(x[:-1])) for x, y in zip(prompts, completions, strict=True)]


def sums(draw: random.Random) -> tuple[str, int]:
    while True:
        text = f"{draw.randint(0, 9)}{draw.choice('+-*')}{draw.randint(0, 9)}"
        if (value := result(text)) in RESULTS:
            assert value is not None
            return text, value


def demonstrations(draw: random.Random, count: int) -> list[dict[str, str]]:
    rows = []
    for _ in range(count):
        text, value = sums(draw)
        asked = value if draw.random() < RIGHT else draw.choice(RESULTS)
        rows.append({"prompt": f"{asked}:", "completion": text})
    return rows


def config() -> LlamaConfig:
    return LlamaConfig(vocab_size=24, hidden_size=96, intermediate_size=256, num_hidden_layers=2,
                       num_attention_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
                       pad_token_id=0)  # fmt: skip


def options(folder: Path, steps: int, batch: int, rate: float, seed: int, **more: Any) -> dict[str, Any]:
    return {"output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": batch, "learning_rate": rate,
            "seed": seed, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 5,
            "lr_scheduler_type": "constant", "level": "O0", "plan": "single", "warmup_steps": 0, **more}  # fmt: skip


def completions(model: Any, words: Any, count: int, seed: int) -> tuple[list[str], list[str]]:
    """Prompts for all results, and `count` sampled completions of each."""
    prompts = [f"{x}:" for x in RESULTS]
    sampler = Sampler(model.eval(), words, Sampling(max_tokens=LONGEST), 32, 64)
    groups = sampler.generate([words(x)["input_ids"] for x in prompts], count, seed)
    return [p for p in prompts for _ in range(count)], [x.text for group in groups for x in group]


def measured(model: Any, words: Any, seed: int) -> float:
    return statistics.mean(true_reward(*completions(model, words, 64, 10_000 + seed)))


def pairs(model: Any, words: Any, seed: int, count: int) -> list[dict[str, str]]:
    """Two completions of a prompt, the better one first."""
    prompts, texts = completions(model, words, count, seed)
    rewards, rows, draw = true_reward(prompts, texts), [], random.Random(seed)
    for x in RESULTS:
        own = [(r, t) for p, r, t in zip(prompts, rewards, texts, strict=True) if p == f"{x}:"]
        good, bad = ([t for r, t in own if r == wanted] for wanted in (1.0, 0.0))
        rows += [{"prompt": f"{x}:", "chosen": draw.choice(good), "rejected": t} for t in bad if good]
    draw.shuffle(rows)
    return rows


def curve(trainer: Any, name: str) -> list[float]:
    return [x[name] for x in trainer.state.log_history if name in x]


def one(seed: int, quick: bool) -> dict[str, Any]:
    part = 8 if quick else 1
    draw, words, figures = random.Random(seed), tokenizer(), {}
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as name:
        folder, prompts = Path(name), [{"prompt": f"{x}:"} for x in RESULTS]

        def timed(step: str, make: Any, model: Any = None) -> Any:
            begin = time.perf_counter()
            trainer = make()
            trainer.train()
            figures[step] = {"seconds": time.perf_counter() - begin}
            if model is not False:
                figures[step]["true reward"] = measured(trainer.model, words, seed)
            harness.say(f"seed {seed}, {step}: {figures[step]}")
            return trainer

        base = LlamaForCausalLM(config())
        lines = [{"text": ";".join(f"{t}={v}" for t, v in (sums(draw) for _ in range(6)))} for _ in range(4000)]
        timed("pre-training", lambda: SFTTrainer(base, SFTConfig(**options(folder, 400 // part, 32, 2e-3, seed)),
              train_dataset=lines, processing_class=words))  # fmt: skip
        tuned = timed("SFT", lambda: SFTTrainer(base, SFTConfig(**options(folder, 1000 // part, 64, 2e-3, seed)),
                      train_dataset=demonstrations(draw, 20000), processing_class=words)).model  # fmt: skip
        rows = pairs(tuned, words, seed, 128)
        scorer = LlamaForSequenceClassification(_with_one_output(config()))
        scorer.model.load_state_dict(tuned.model.state_dict())
        judge = timed("reward model", lambda: RewardTrainer(
            scorer, RewardConfig(**options(folder, 600 // part, 64, 1e-3, seed)), train_dataset=rows[200:],
            eval_dataset=rows[:200], processing_class=words), False)  # fmt: skip
        figures["reward model"]["accuracy"] = judge.evaluate()["eval_accuracy"]
        shared = {"max_completion_length": LONGEST}
        ppo = timed("PPO", lambda: PPOTrainer(
            copy.deepcopy(tuned), scorer, PPOConfig(**options(folder, 240 // part, 96, 5e-4, seed), **shared,
            num_ppo_epochs=2, kl_coef=0.3, missing_eos_penalty=1.0), train_dataset=prompts, processing_class=words,
        ))  # fmt: skip
        figures["PPO"]["kl"] = statistics.mean(curve(ppo, "objective/kl")[-5:])
        figures["PPO"]["curve"] = curve(ppo, "reward")
        dpo = timed("DPO", lambda: DPOTrainer(
            copy.deepcopy(tuned), args=DPOConfig(**options(folder, 200 // part, 64, 2e-4, seed), beta=0.1),
            train_dataset=rows, processing_class=words))  # fmt: skip
        figures["DPO"]["curve"] = curve(dpo, "rewards/accuracies")
        grpo = timed("GRPO", lambda: GRPOTrainer(
            copy.deepcopy(tuned), true_reward, GRPOConfig(**options(folder, 120 // part, 192, 5e-4, seed), **shared,
            num_generations=8, beta=0.02), train_dataset=prompts, processing_class=words))  # fmt: skip
        figures["GRPO"]["kl"] = statistics.mean(curve(grpo, "kl")[-5:])
        figures["GRPO"]["curve"] = curve(grpo, "reward")
    return figures


def draw(rows: dict[str, Any], to: Path) -> None:
    """The learning curves, a panel for each algorithm and a line for each seed."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "tutti"
    figure = Figure(figsize=(9, 3), layout="constrained")
    titles = {"PPO": "reward of the reward model", "DPO": "accuracy of pairs", "GRPO": "true reward"}
    for axes, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for seed, row in rows.items():
            curve = row[name]["curve"]
            axes.plot(range(5, 5 * len(curve) + 1, 5), curve, label=seed)
        axes.set(title=f"{name}: {title}", xlabel="step")
        axes.legend()
    figure.savefig(to, metadata={"Date": None})


def _with_one_output(config: Any) -> Any:
    config.num_labels = 1
    return config


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)  # the model is small
    seeds = SEEDS[:1] if quick else SEEDS
    begin, rows = time.perf_counter(), {f"seed {x}": one(x, quick) for x in seeds}
    gain = {x: min(row[x]["true reward"] - row["SFT"]["true reward"] for row in rows.values())
            for x in ("PPO", "DPO", "GRPO")}  # fmt: skip
    if not quick:
        draw(rows, harness.RESULTS / "align_demo.svg")
    return {"rows": rows, "least gain": gain, "seconds": time.perf_counter() - begin}


if __name__ == "__main__":
    harness.main(run, __file__, ["transformers"])

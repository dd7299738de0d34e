"""Training on what the model writes itself: rollouts, rewards, advantages, and steps of gradients on them.

Each round, the engine completes some prompts with the weights of the moment, rewards score the completions, and one or
more steps follow on them. Batches have, besides those of `sequences`:

| entry | shape | |
|---|---|---|
| advantages | (rows, t - 1) float32 | of each token of the completion, elsewhere 0 |
| old_logprobs | (rows, t - 1) float32 | log-probabilities of the tokens under the weights that wrote them |
| ref_logprobs | (rows, t - 1) float32 | under the reference, if there is one |

All log-probabilities are of one distribution: that of all tokens at the temperature of sampling, whatever top_p, top_k
and min_p have left out while sampling. A comparison of one with the other would be wrong by the log of what they keep.
"""

from __future__ import annotations

import copy
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.trainer_utils import speed_metrics

import tutti
from tutti.align import objectives
from tutti.align.arguments import AlignArguments, is_adapted, without_dropout
from tutti.align.chat import is_conversation
from tutti.align.importance import MODES, importance_weights
from tutti.align.rewards.scoring import Completed, Rewards
from tutti.align.rollouts.envs import BEGUN, REWARD, begun, play, with_environment
from tutti.align.rollouts.invariant import check_bits, check_invariant, invariant_logprobs
from tutti.align.rollouts.placement import PLACEMENTS, Apart, Replicas
from tutti.align.rollouts.rollout import MAX_SEQUENCES, Rollout, Sampler
from tutti.align.sequences import IGNORED, batch_of, learned, token_logprobs
from tutti.align.trainer import AlignTrainer
from tutti.data.order import Order
from tutti.hardware import machine
from tutti.launch.progress import progress
from tutti.serve import Sampling
from tutti.train.trainer import checkpointing
from tutti.train.trainer.arguments import option, output_folder, rows_of_microbatch

HELD_OUT = 1_000_002  # the number of the round of an evaluation, for its seed


COMPLETIONS = "completions.jsonl"  # in output_dir


@dataclass
class PolicyConfig(AlignArguments):
    """Options of trainers that generate, with the names and defaults of TRL's where it has them."""

    learning_rate: float = field(default=1e-6, metadata={"help": "Highest learning rate."})
    num_generations: int = field(default=8, metadata={"help": "Completions of each prompt."})
    max_completion_length: int = field(default=256, metadata={"help": "Longest completion in tokens."})
    max_turn_length: int | None = field(
        default=None, metadata={"help": "Longest turn with an environment in tokens; None: what is left."}
    )
    generation_batch_size: int | None = field(
        default=None, metadata={"help": "Completions of a round; None: the rows of one step."}
    )
    staleness: int = field(
        default=0,
        metadata={"help": "Rounds that are written ahead, with weights so many rounds older; 0: none."},
    )
    rollout_placement: str = field(
        default="together", metadata={"help": "Where engines are: together, replicas or apart; see `placement`."}
    )
    rollout_workers: int = field(default=1, metadata={"help": "Processes that write completions, if they are apart."})
    importance_sampling_correction: bool | None = field(
        default=None,
        metadata={"help": "Whether losses are weighted for weights that wrote differ; None: with staleness."},
    )
    importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={"help": "token_truncate, token_mask, sequence_truncate or sequence_mask: see `importance`."},
    )
    importance_sampling_clip_max: float | None = field(
        default=3.0, metadata={"help": "Largest weight of that correction; None: no bound."}
    )
    num_iterations: int = field(default=1, metadata={"help": "How often the completions of a round are trained on."})
    temperature: float = field(default=1.0, metadata={"help": "Of sampling, and of all log-probabilities."})
    top_p: float = field(default=1.0, metadata={"help": "Sample among the most likely tokens of this probability."})
    top_k: int = field(default=0, metadata={"help": "Sample among so many of the most likely tokens; 0: all."})
    min_p: float | None = field(
        default=None, metadata={"help": "Sample among tokens of this share of the highest probability."}
    )
    stop: list[str] | None = field(default=None, metadata={"help": "Texts that end a completion."})
    epsilon: float = field(default=0.2, metadata={"help": "How far ratios may fall below 1."})
    epsilon_high: float | None = field(default=None, metadata={"help": "How far they may rise; None: epsilon."})
    delta: float | None = field(default=None, metadata={"help": "The largest ratio of negative advantages."})
    beta: float = field(default=0.0, metadata={"help": "Weight of the divergence from the reference; 0: no reference."})
    reward_weights: list[float] | None = field(default=None, metadata={"help": "A weight for each reward; None: 1."})
    mask_truncated_completions: bool = field(
        default=False, metadata={"help": "Whether completions that did not end have no loss."}
    )
    target_kl: float | None = field(
        default=None, metadata={"help": "Training ends once the divergence of a step from the reference is larger."}
    )
    log_completions: bool = field(
        default=False, metadata={"help": "Write the completions of each round into completions.jsonl in output_dir."}
    )
    batch_invariant: bool = field(
        default=False,
        metadata={"help": "Whether completions are scored with the bits that the engine reports: see `invariant`."},
    )
    engine: dict[str, Any] | None = field(
        default=None, metadata={"help": "Options of tutti.serve.Engine, such as level or cache_dtype."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_generations < 1 or self.max_completion_length < 1 or self.num_iterations < 1:
            raise ValueError("num_generations, max_completion_length and num_iterations must be at least 1")
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0: a model that always writes the "
                             "same learns nothing from it")  # fmt: skip
        if self.beta < 0:
            raise ValueError(f"beta is {self.beta}; it must be at least 0")
        if not 0 <= self.epsilon < 1 or (self.epsilon_high is not None and self.epsilon_high < 0):
            raise ValueError(f"epsilon is {self.epsilon} and epsilon_high {self.epsilon_high}; expected 0 to 1, and at "
                             "least 0")  # fmt: skip
        if self.staleness < 0:
            raise ValueError(f"staleness is {self.staleness}; it must be at least 0")
        if self.rollout_placement not in PLACEMENTS or self.rollout_workers < 1:
            raise ValueError(f"rollout_placement {self.rollout_placement!r}, rollout_workers {self.rollout_workers}; "
                             f"expected one of {', '.join(PLACEMENTS)}, and at least 1")  # fmt: skip
        if self.importance_sampling_mode not in MODES:
            raise ValueError(f"importance_sampling_mode {self.importance_sampling_mode!r}; expected one of "
                             f"{', '.join(MODES)}")  # fmt: skip
        if self.importance_sampling_clip_max is not None and not self.importance_sampling_clip_max > 0:
            raise ValueError(f"importance_sampling_clip_max is {self.importance_sampling_clip_max}; it must be above 0")
        if self.target_kl is not None and not self.beta:
            raise ValueError("target_kl measures the divergence from the reference: give beta above 0")

    @property
    def high(self) -> float:
        """Upper clipping distance of ratios."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def sampling(self) -> Sampling:
        """Sampling parameters."""
        return Sampling(
            max_tokens=self.max_completion_length, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            min_p=self.min_p or 0.0, stop=tuple(self.stop or ()), include_stop=True,
        )  # fmt: skip


class PolicyTrainer(AlignTrainer):
    """A trainer on completions that the model writes. Subclasses define `advantages` and `losses`.

    model: the policy. reward_funcs: see `scoring.Rewards`. train_dataset: rows with `prompt`, a text or messages, and
    whatever the rewards read. eval_dataset: such rows, of whose completions `evaluate` reports the rewards. ref_model:
    the reference, if `beta` is above 0; None: the model before training, or without its adapters. env: makes an
    environment that the model converses with, beside or in place of rewards: see `envs`.
    """

    args: PolicyConfig

    equal_items, plans_first = False, True
    arguments: type[PolicyConfig] = PolicyConfig
    scores_old = False  # whether advantages or the loss need log-probabilities of the policy even in a single step
    rewarded = True  # whether it has rewards
    weighted = True  # whether its gradient is an expectation under the policy, which importance weights can correct
    apart = ""  # beginning of the names of parameters that are trained and are none of the policy

    def __init__(self, model: nn.Module | str, reward_funcs: Any = None, args: Any = None, train_dataset: Any = None,
                 ref_model: nn.Module | None = None, env: Any = None, **options: Any):  # fmt: skip
        self.env: Any = env
        super().__init__(model, args, train_dataset, **options)
        args = self.args
        self.policy: Any = self.model
        self.rewards: Any = None
        if self.rewarded:
            self.rewards = Rewards(with_environment(reward_funcs, env), args.reward_weights, self.tokenizer)
        self.size = args.num_generations
        self.step_rows = rows_of_microbatch(args) * args.gradient_accumulation_steps * self.completions_of_row
        self.round_rows = args.generation_batch_size or self.step_rows
        self._check_sizes()
        self.ref_model: Any = self._reference(ref_model) if args.beta else None
        if args.batch_invariant:
            check_invariant(self.policy, args.engine or {})
        self.sampler: Sampler | None = None
        self.written: dict[int, Written] = {}  # rounds that are written ahead, by their seeds
        self.ahead: list[tuple[Sequence[Mapping[str, Any]], int]] = []  # rows and seeds of those that are to be
        self.scorer: dict[str, Any] = {}  # functions of log-probabilities
        self.rounds = 0  # before the one that is trained on
        self.kl = 0.0  # from the reference, in the last step
        if args.max_steps <= 0 and train_dataset is not None:
            rounds = math.ceil(args.num_train_epochs * len(self.train_dataset) * self.size / self.round_rows)
            args.max_steps = rounds * args.num_iterations * (self.round_rows // self.step_rows)

    def _check_sizes(self) -> None:
        rows, size, step = self.round_rows, self.size, self.step_rows
        if rows % size or rows % step:
            raise ValueError(f"a round of {rows} completions; it must be a multiple of num_generations ({size}) and of "
                             f"the rows of a step ({step} = batch size x gradient_accumulation_steps): give "
                             "generation_batch_size")  # fmt: skip
        if self.longest is not None and self.args.max_completion_length >= self.longest:
            raise ValueError(f"max_completion_length is {self.args.max_completion_length}, and a sequence may have "
                             f"{self.longest} tokens: nothing is left for prompts")  # fmt: skip

    def _reference(self, model: Any) -> nn.Module | None:
        """Another model; None if the policy without its adapters is the reference."""
        if model is None and is_adapted(self.policy):
            return None
        reference = copy.deepcopy(self.policy) if model is None else model
        without_dropout(reference)
        return reference.eval().requires_grad_(False)

    @property
    def completions_of_row(self) -> int:
        """Number of completions that `select_rows` combines into a row of a step."""
        return 1

    @property
    def corrects(self) -> bool:
        """Whether losses are corrected for completions that were sampled with other weights than those trained."""
        option = self.args.importance_sampling_correction
        return self.weighted and (self.args.staleness > 0 if option is None else option)

    @property
    def needs_old(self) -> bool:
        """Whether log-probabilities of the policy are computed before the steps of a round."""
        multiple_steps = self.args.num_iterations > 1 or self.round_rows > self.step_rows
        return self.corrects or self.scores_old or multiple_steps or self.args.batch_invariant

    # -- data ------------------------------------------------------------------------------------------------------

    def features(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row, and `prompt_ids`."""
        if self.env is not None:
            row = begun(self.env, row)
        if "prompt" not in row:
            raise ValueError(f"the row has {', '.join(row)}; it needs prompt")
        ids = self.encoder_of(row).prompt(row["prompt"])
        room = (self.longest or 2**30) - self.args.max_completion_length
        if not ids:
            raise ValueError("the prompt is empty, and the tokenizer begins texts with no token: leave the row out")
        if len(ids) > room:
            raise ValueError(f"the prompt has {len(ids)} tokens; {room} fit beside a completion of "
                             f"{self.args.max_completion_length}: lower max_completion_length, raise max_length up to "
                             "the model's positions, or leave the row out")  # fmt: skip
        return {**row, "prompt_ids": ids}

    def get_train_dataloader(self) -> Any:
        """Batches of rollouts: see `Experience`."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset of prompts")
        return Experience(self)

    def clipped(
        self, inputs: Mapping[str, Tensor], logprobs: Tensor, logits: Tensor, level: str = "token"
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return -min(r A, clip(r) A) of each token, r itself, and measures of rows.

        level: "token" or "sequence", what each ratio r is of (`objectives.log_ratios`).
        """
        args, mask = self.args, learned(inputs["labels"])
        old, advantages = inputs.get("old_logprobs", logprobs.detach()), inputs["advantages"]
        ratios = objectives.log_ratios(logprobs, old, mask, level).exp()
        each = objectives.clipped_loss(ratios, advantages, args.epsilon, args.high, args.delta)
        with torch.no_grad():
            share = objectives.clipped_share(ratios, advantages, args.epsilon, args.high)
            measures = {"clip_ratio": objectives.mean_of_rows(share.expand_as(mask), mask),
                        "entropy": objectives.mean_of_rows(objectives.entropy(logits), mask)}  # fmt: skip
            if "ref_logprobs" in inputs:
                kl = objectives.divergence(logprobs, inputs["ref_logprobs"])
                measures["kl"] = objectives.mean_of_rows(kl, mask)
        return each, ratios, measures

    def evaluate_rows(self, rows: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
        """Rewards and lengths of completions that are written for the prompts of some features. There is no loss."""
        if not self.rewarded:
            return super().evaluate_rows(rows, ignore_keys, prefix)
        begin, prompts = time.time(), list(rows)
        with self.averaged(), progress(f"writing {len(prompts) * self.size} completions, to evaluate"):
            rollouts = self.generate(prompts, Experience(self).seed(HELD_OUT))
        scored = self.rewards(completions_of(rollouts, [row for row in prompts for _ in range(self.size)]))
        measures = self.measures(rollouts, scored, self.rewards.total(scored), {})
        metrics = {f"{prefix}_{name}": float(x) for name, x in measures.items()}
        metrics |= speed_metrics(prefix, begin, num_samples=len(rollouts))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, test_dataset: Any, *args: Any, **options: Any) -> Any:
        """Refused: `evaluate` writes completions and scores them."""
        raise ValueError(f"{type(self).__name__}.predict: predictions are completions: use evaluate, or tutti.serve")

    # -- to be defined ---------------------------------------------------------------------------------------------

    def advantages(self, rollouts: Sequence[Rollout], rewards: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`advantages` of all tokens of a round, and what else `losses` reads. rewards: (rows), nan for none."""
        raise NotImplementedError

    def select_rows(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Select the rows to train on from the completions of a round; by default all."""
        return dict(batch)

    # -- a round ---------------------------------------------------------------------------------------------------

    def generate(self, rows: Sequence[Mapping[str, Any]], seed: int) -> list[Rollout]:
        """Completions of the prompts of some rows with the weights of the moment; those of a prompt are adjacent."""
        return self.begin(rows, seed)()

    def begin(self, rows: Sequence[Mapping[str, Any]], seed: int) -> Callable[[], list[Rollout]]:
        """Begin the completions of `generate`. Returns a function that gives them."""
        if self.sampler is None:
            self.sampler = self.make_sampler(max(len(x["prompt_ids"]) for x in rows))
        self.sampler.update(self.policy_weights())
        if self.env is None:
            groups = self.sampler.begin(self.sampler.requests([x["prompt_ids"] for x in rows], self.size, seed))
        else:
            episodes = play(self.env, rows, self.size, self.sampler, self.encoder_of, seed,
                            self.args.max_completion_length, self.args.max_turn_length)  # fmt: skip
            groups = lambda: [episodes]  # noqa: E731
        self.policy.train(self.is_in_train)
        return lambda: [x for group in groups() for x in group]

    def make_sampler(self, prompt: int) -> Sampler:
        """Make the sampler. prompt: tokens of the longest prompt, where sequences have no limit."""
        args, kind, options = self.args, self.args.rollout_placement, dict(self.args.engine or {})
        longest = prompt + args.max_completion_length if self.longest is None else self.longest
        if kind == "apart":
            workers = args.rollout_workers
            options |= {"workers": workers, "threads": max(1, machine.cores() // (workers + (args.staleness > 0)))}
        makers = {"together": Sampler, "replicas": Replicas, "apart": Apart}
        return makers[kind](
            self.policy, self.tokenizer, args.sampling(), longest, min(self.round_rows, MAX_SEQUENCES), **options
        )

    def policy_weights(self) -> Any:
        """The source of the policy's weights: the step that trains it, or before training the model."""
        return self.step if self.step is not None else self.model.state_dict()

    def round(self, rows: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Tensor]]:
        """The batches of a round."""
        begin = time.perf_counter()
        with progress(f"writing {len(rows) * self.size} completions"):
            rollouts, age = self.write(rows, seed)
        generated = time.perf_counter()
        of_rows = [row for row in rows for _ in range(self.size)]
        completed = completions_of(rollouts, of_rows)
        scored = self.rewards(completed)
        totals = self.rewards.total(scored)
        if totals.isnan().all():
            warnings.warn("no completion of a round has a reward, so nothing is learned from it: rewards are None, NaN "
                          "or infinite", stacklevel=2)  # fmt: skip
        batch = self.batch_of_rollouts(rollouts, totals)
        with torch.no_grad():
            batch |= self.score(batch)
            if self.args.batch_invariant and not age:
                self._check_bits(rollouts, batch)
            batch |= self.advantages(rollouts, totals, batch)
            measures = self.correct(rollouts, batch) if self.corrects else {}
        if self.args.staleness:
            measures["sampling/staleness"] = torch.tensor(float(age))
        seconds = {"time/generation": generated - begin, "time/scoring": time.perf_counter() - generated}
        measures |= self.measures(rollouts, scored, totals, batch)
        self.measured.append(measures | {name: torch.tensor(x) for name, x in seconds.items()})
        if self.args.log_completions and self.is_world_process_zero():
            self._write(completed, totals, scored)
        return self.parts(batch, seed)

    def write(self, rows: Sequence[Mapping[str, Any]], seed: int) -> tuple[list[Rollout], int]:
        """The completions of a round, and the number of rounds since they were written. Starts later rounds."""
        own = self.written.pop(seed, None) or Written(self.rounds, self.begin(rows, seed))
        rollouts = own.rollouts  # before weights of later rounds go to the engines
        for next_rows, at in self.ahead:
            self.written[at] = Written(self.rounds, self.begin(next_rows, at))
        return rollouts, self.rounds - own.rounds

    def correct(self, rollouts: Sequence[Rollout], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weight the advantages of a round, as `importance` says. Returns measures."""
        args, mask = self.args, learned(batch["labels"])
        weights = importance_weights(batch["old_logprobs"], sampled_logprobs(rollouts, mask), mask,
                                     args.importance_sampling_mode, args.importance_sampling_clip_max)  # fmt: skip
        batch["advantages"] = batch["advantages"] * weights
        counted, name = weights[mask > 0], "sampling/importance_sampling_ratio"
        if not len(counted):
            return {}
        return {f"{name}/min": counted.min(), f"{name}/mean": counted.mean(), f"{name}/max": counted.max()}

    def parts(self, batch: Mapping[str, Tensor], seed: int) -> list[dict[str, Tensor]]:
        """The batches of the steps of a round: its rows in a random order, and in another in each iteration."""
        draw, batches, batch = torch.Generator().manual_seed(seed), [], self.select_rows(batch)
        rows, size = len(batch["labels"]), self.step_rows // self.completions_of_row
        for _ in range(self.args.num_iterations):
            order = torch.arange(rows) if rows == size else torch.randperm(rows, generator=draw)
            batches += [{name: x[part] for name, x in batch.items()} for part in order.split(size)]
        return batches

    def batch_of_rollouts(self, rollouts: Sequence[Rollout], rewards: Tensor) -> dict[str, Tensor]:
        """Prompts and completions; of completions without a reward, and of masked ones, no token is learned."""
        rows = []
        for rollout, reward in zip(rollouts, rewards.tolist(), strict=True):
            counts = math.isfinite(reward) and (rollout.ended or not self.args.mask_truncated_completions)
            labels = rollout.labels if counts else [IGNORED] * len(rollout.tokens)
            rows.append({"input_ids": [*rollout.prompt, *rollout.tokens],
                         "labels": [IGNORED] * len(rollout.prompt) + labels})  # fmt: skip
        return batch_of(rows, self.pad, self.args.pad_to_multiple_of, self.positions)

    def score(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Constants of a round: log-probabilities of the policy, if steps need them, and of the reference."""
        scores: dict[str, Tensor] = {}
        if self.needs_old:
            scores["old_logprobs"] = self.logprobs("policy", batch)
        if self.args.beta:
            scores["ref_logprobs"] = self.logprobs("reference", batch)
        return scores

    def logprobs(self, whose: str, batch: Mapping[str, Tensor]) -> Tensor:
        """Log-probabilities (rows, t - 1) under the weights of the policy of the moment, or of the reference."""
        adapted = whose == "reference" and self.ref_model is None
        model: Any = self.policy if whose == "policy" or adapted else self.ref_model
        with model.disable_adapter() if adapted else nullcontext():
            return self.computed(whose, model, lambda batch: self.round_logprobs(model, batch), batch)

    def round_logprobs(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Log-probabilities before the steps of a round, which have no gradients."""
        if self.args.batch_invariant:
            return invariant_logprobs(model, batch, self.args.temperature)
        return self.token_logprobs(model, batch)[0]

    def _check_bits(self, rollouts: Sequence[Rollout], batch: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError if the engine has reported other bits for the weights of the moment."""
        old, plans = batch["old_logprobs"], (option(self.args, "plan"), (self.args.engine or {}).get("plan", "auto"))
        check_bits(old, sampled_logprobs(rollouts, old), batch["labels"], plans)

    def computed(self, name: str, model: Any, f: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Apply a function of a model to the sequences of a round, without gradients: (rows, ...) float32.

        name: unique name of the function, by which it is kept: it is captured only once.
        """
        sequences = {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}
        was = model.training
        model.eval()
        if name not in self.scorer:
            self.scorer[name] = tutti.function(
                lambda batch: f(batch).detach(), {key: x[: self.step_rows] for key, x in sequences.items()},
                store=tutti.Store(model=model), plan=option(self.args, "plan"), cluster=option(self.args, "cluster"),
                seed=self.args.seed,
            )  # fmt: skip
        parts = [self.scorer[name]({key: x[at : at + self.step_rows] for key, x in sequences.items()})
                 for at in range(0, len(sequences["labels"]), self.step_rows)]  # fmt: skip
        model.train(was)
        return torch.cat(parts).float()

    def token_logprobs(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probabilities at the temperature, and logits, of the tokens of a batch."""
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        if self.args.temperature != 1:
            logits = logits / self.args.temperature
        return token_logprobs(logits, batch["labels"]), logits

    def measures(
        self, rollouts: Sequence[Rollout], scored: Tensor, totals: Tensor, batch: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Measures of a round, for the log."""
        lengths = torch.tensor([float(len(x.tokens)) for x in rollouts])
        ended = torch.tensor([float(x.ended) for x in rollouts])
        groups = totals.view(-1, self.size)
        measures = {f"rewards/{name}/mean": scored[:, i].nanmean() for i, name in enumerate(self.rewards.names)}
        measures |= {name: torch.tensor(x) for name, x in self.rewards.measures().items()}
        if self.size > 1:
            deviation = groups.std(1)
            measures |= {"reward_std": deviation.nanmean(), "frac_reward_zero_std": (deviation == 0).float().mean()}
        measures |= {"reward": totals.nanmean(), "rewards/without": totals.isnan().float().mean(),
                  "completions/mean_length": lengths.mean(), "completions/max_length": lengths.max(),
                  "completions/clipped_ratio": 1 - ended.mean(),
                  "completions/empty": (lengths == 0).float().mean()}  # fmt: skip
        if self.env is not None:
            measures["completions/mean_turns"] = torch.tensor([float(x.turns) for x in rollouts]).mean()
        if "old_logprobs" in batch:
            sampled = sampled_logprobs(rollouts, batch["old_logprobs"])
            mask = learned(batch["labels"])
            apart = ((batch["old_logprobs"] - sampled) * mask).abs()
            measures["sampling/logprob_difference/max"] = apart.max()
        return measures

    def _write(self, completed: Completed, totals: Tensor, scored: Tensor) -> None:
        with Path(output_folder(self.args), COMPLETIONS).open("a") as file:
            for i, (prompt, completion) in enumerate(zip(completed.prompts, completed.completions, strict=True)):
                each = dict(zip(self.rewards.names, map(_number, scored[i]), strict=True))
                row = {"step": self.state.global_step, "prompt": prompt, "completion": completion,
                       "reward": _number(totals[i]), **each}  # fmt: skip
                file.write(json.dumps(row) + "\n")

    def run_step(self, batch: dict[str, Any]) -> Tensor:
        loss = super().run_step(batch)
        self.kl = float(self.measured[-1].get("kl", torch.zeros(())))
        return loss

    def end_step(self) -> None:
        """Stop once the model is farther from the reference than it may be."""
        if self.args.target_kl is not None and self.kl > self.args.target_kl:
            self.log({"stopped_by_kl": self.kl})
            self.control.should_training_stop = True

    def example_batch(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        """A batch of a step as `round` makes it, of rollouts without a reward."""
        rewards = torch.zeros(len(rollouts))
        batch = self.batch_of_rollouts(rollouts, rewards)
        empty = torch.zeros(batch["labels"][:, 1:].shape)
        if self.needs_old:
            batch["old_logprobs"] = empty
        if self.args.beta:
            batch["ref_logprobs"] = empty
        return batch | {name: torch.zeros_like(x) for name, x in self.advantages(rollouts, rewards, batch).items()}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy alone."""
        checkpointing.save_model(self, Path(output_dir or output_folder(self.args)), without=self.apart)

    def round_state(self) -> dict[str, Any]:
        """Further state that a run needs to resume, as JSON."""
        return {}

    def load_round_state(self, state: Mapping[str, Any]) -> None:
        """Take what `round_state` has given."""


@dataclass
class Written:
    """Completions of a round that is to come. rounds: how many had been learned when their writing began. result:
    gives them, once they are written."""

    rounds: int
    result: Callable[[], list[Rollout]]

    @cached_property
    def rollouts(self) -> list[Rollout]:
        """The completions; waits for them."""
        return self.result()


class Experience:
    """Batches of steps, without end: the loader of a `PolicyTrainer`.

    Its state has the batches of a round that are left, so a run that resumes goes on with the same ones.
    """

    whole = True  # a batch is that of a step

    def __init__(self, trainer: PolicyTrainer):
        self.trainer, self.rounds = trainer, 0
        self.left: list[dict[str, Tensor]] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            if not self.left:
                self.trainer.rounds, self.trainer.ahead = self.rounds, self.ahead()
                self.left = self.trainer.round(self.rows(self.rounds), self.seed(self.rounds))
                self.rounds += 1
            yield self.left.pop(0)

    def ahead(self) -> list[tuple[Sequence[Mapping[str, Any]], int]]:
        """Rows and seeds of the rounds that are to be written ahead now, as far as there are steps for them."""
        trainer, args = self.trainer, self.trainer.args
        steps = args.num_iterations * (trainer.round_rows // trainer.step_rows)
        end = min(self.rounds + args.staleness + 1, math.ceil(args.max_steps / steps))
        missing = [i for i in range(self.rounds + 1, end) if self.seed(i) not in trainer.written]
        return [(self.rows(i), self.seed(i)) for i in missing]

    def rows(self, number: int) -> list[Mapping[str, Any]]:
        """The rows of a round: the dataset in a random order, and again in another."""
        data, count = self.trainer.train_dataset, self.trainer.round_rows // self.trainer.size
        order = Order(len(data), (self.trainer.args.seed,), "rows")
        return [data[int(i)] for i in order.rows(np.arange(number * count, (number + 1) * count))]

    def seed(self, number: int) -> int:
        """The seed of a round's completions."""
        return (self.trainer.args.seed * 1_000_003 + number) * 100_003

    def example(self, count: int) -> list[dict[str, Tensor]]:
        """An example batch with the entries and rows of a step, for tracing."""
        trainer = self.trainer
        row = trainer.train_dataset[0]["prompt_ids"]
        rollout = Rollout(row, [trainer.pad] * min(8, trainer.args.max_completion_length), [0.0] * 8, True, "")
        return [trainer.select_rows(trainer.example_batch([rollout] * trainer.step_rows))]

    def state_dict(self) -> dict[str, Any]:
        """Rounds that have begun, and what is left of the last. Numbers of JSON are exact for float32."""
        batches = [{name: [str(x.dtype).removeprefix("torch."), x.tolist()] for name, x in batch.items()}
                   for batch in self.left]  # fmt: skip
        written = [[seed, x.rounds, [asdict(rollout) for rollout in x.rollouts]]
                   for seed, x in self.trainer.written.items()]  # fmt: skip
        return {"rounds": self.rounds, "left": batches, "written": written, "trainer": self.trainer.round_state()}

    def go_on(self, folder: Path, step: int) -> None:
        """Continue after the last batch of a checkpoint."""
        state = json.loads((folder / checkpointing.STREAM).read_text())
        self.rounds = state["rounds"]
        self.left = [{name: torch.tensor(x, dtype=getattr(torch, dtype)) for name, (dtype, x) in batch.items()}
                     for batch in state["left"]]  # fmt: skip
        self.trainer.written = {}
        for seed, rounds, written in state["written"]:
            rollouts = [Rollout(**x) for x in written]
            self.trainer.written[seed] = Written(rounds, partial(list, rollouts))
        self.trainer.load_round_state(state["trainer"])


def completions_of(rollouts: Sequence[Rollout], rows: Sequence[Mapping[str, Any]]) -> Completed:
    """Rollouts as rewards read them: completions of conversations are messages."""
    prompts = [x["prompt"] for x in rows]
    texts = [x.messages or [{"role": "assistant", "content": x.text}] if is_conversation(p) else x.text
             for x, p in zip(rollouts, prompts, strict=True)]  # fmt: skip
    columns = [{k: v for k, v in x.items() if k not in ("prompt", "prompt_ids", BEGUN)}
               | ({} if rollout.reward is None else {REWARD: rollout.reward})
               for x, rollout in zip(rows, rollouts, strict=True)]  # fmt: skip
    return Completed(prompts, texts, [x.prompt for x in rollouts], [x.tokens for x in rollouts], columns)


def sampled_logprobs(rollouts: Sequence[Rollout], like: Tensor) -> Tensor:
    """Return the log-probabilities of the tokens of completions under the weights that wrote them, at the places of a
    batch's: (rows, t - 1), elsewhere 0. like: tensor of that shape."""
    logprobs = torch.zeros_like(like)
    for i, x in enumerate(rollouts):
        at = len(x.prompt) - 1
        logprobs[i, at : at + len(x.tokens)] = torch.tensor(x.logprobs)
    return logprobs


def _number(x: Tensor) -> float | None:
    return float(x) if math.isfinite(float(x)) else None

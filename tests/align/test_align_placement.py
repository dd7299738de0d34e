"""Where completions are written changes neither what is written nor what is learned."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import align_models as small
from tutti.align import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from tutti.align.rollouts import placement
from tutti.align.rollouts.placement import Replicas
from tutti.serve import Sampling

PROMPTS = [{"prompt": x} for x in ("one", "two", "three", "four", "and five")]


def grpo(path: Any, **options: Any) -> GRPOTrainer:
    more = {"num_generations": 4, "max_steps": 3, **options}
    return GRPOTrainer(small.model(), small.vowels, GRPOConfig(**small.policy_options(path, **more)), PROMPTS,
                       processing_class=small.tokenizer())  # fmt: skip


def measured(trainer: Any) -> list[float]:
    return [*small.logs(trainer), *small.logs(trainer, "reward"), *small.logs(trainer, "grad_norm")]


@pytest.mark.parametrize("options", [{}, {"staleness": 1}], ids=["", "ahead"])
def test_engines_apart(tmp_path, options):
    """Two processes write what an engine of the job writes, also while training goes on."""
    together, apart = grpo(tmp_path / "a", **options), grpo(tmp_path / "b", **options, rollout_placement="apart",
                                                            rollout_workers=2)  # fmt: skip
    together.train()
    apart.train()
    assert measured(apart) == pytest.approx(measured(together), abs=1e-5)


def test_a_run_with_engines_apart_resumes(tmp_path):
    options = {"staleness": 1, "rollout_placement": "apart", "max_steps": 4}
    whole = grpo(tmp_path / "a", **options)
    whole.train()
    begun = grpo(tmp_path / "b", **options, save_strategy="steps", save_steps=2)
    begun.args.max_steps = 4
    begun.train()
    again = grpo(tmp_path / "b", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert measured(again)[-1] == measured(whole)[-1]


def test_answers_are_taken_in_any_order(tmp_path):
    trainer = grpo(tmp_path, rollout_placement="apart", rollout_workers=2)
    rows = [trainer.train_dataset[i] for i in range(3)]
    first, second = trainer.begin(rows, 0), trainer.begin(rows[:1], 5)
    later = second()
    assert [x.tokens for x in later] == [x.tokens for x in trainer.generate(rows[:1], 5)]
    assert len(first()) == 12


def test_messages_and_answers_larger_than_a_pipe_holds(monkeypatch):
    """Requests are sent before the answers to earlier ones are read, and neither waits for the other."""
    large, answers, (ours, theirs) = ["x" * 1000] * 1000, [], multiprocessing.Pipe()

    class Large:
        def begin(self, requests: Any) -> Any:
            return lambda: requests

    def train() -> None:
        for _ in range(3):
            ours.send(("generate", large))
        answers.extend(ours.recv() for _ in range(3))
        ours.close()

    monkeypatch.setattr(placement, "Sampler", lambda *_, **__: Large())
    monkeypatch.setattr(placement.signal, "signal", lambda *_: None)
    monkeypatch.setattr(placement, "JOB", ())
    thread = Thread(target=train, daemon=True)
    thread.start()
    placement._write(theirs, (torch.device("cpu"), torch.get_num_threads(), [], torch.nn.Linear(1, 1)), {})
    thread.join(10)
    assert answers == [large] * 3


def test_adapters(tmp_path):
    from peft import LoraConfig

    def trainer(name: str, **options: Any) -> GRPOTrainer:
        args = GRPOConfig(**small.policy_options(tmp_path / name, num_generations=4, **options))
        return GRPOTrainer(small.model(), small.vowels, args, PROMPTS, processing_class=small.tokenizer(),
                           peft_config=LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=True))  # fmt: skip

    together, apart = trainer("a"), trainer("b", rollout_placement="apart")
    together.train()
    apart.train()
    assert measured(apart) == pytest.approx(measured(together), abs=1e-5)


def test_a_writer_that_ends(tmp_path):
    trainer = grpo(tmp_path, rollout_placement="apart")
    rows = [trainer.train_dataset[0]]
    trainer.generate(rows, 0)
    writer = trainer.sampler.writers[0]  # pyright: ignore
    writer.process.kill()
    writer.process.join()
    with pytest.raises(ChildProcessError, match="writes completions has ended, with exit code -9"):
        trainer.generate(rows, 1)


def test_a_writer_that_fails(tmp_path):
    trainer = grpo(tmp_path, rollout_placement="apart", engine={"cache_dtype": "int7"})
    with pytest.raises(ChildProcessError, match="int7"):
        trainer.generate([trainer.train_dataset[0]], 0)


def test_unknown_placements(tmp_path):
    with pytest.raises(ValueError, match=r"'near'.*expected one of together, replicas, apart"):
        GRPOConfig(str(tmp_path), rollout_placement="near")
    with pytest.raises(ValueError, match="rollout_workers 0"):
        GRPOConfig(str(tmp_path), rollout_placement="apart", rollout_workers=0)


def _written() -> list[list[int]]:
    sampler = Replicas(small.model(), small.tokenizer(), Sampling(max_tokens=4), 32, 8)
    return [x.tokens for group in sampler.generate([[5, 6], [7], [8, 9]], 2, seed=3) for x in group]


def test_replicas(pool):
    """Four processes share three prompts; all of them get all completions, which are those of one process."""
    alone = _written()
    assert pool.run(_written) == [alone] * 4


def _ppo(path: str, **options: Any) -> tuple[list[float], float]:
    args = PPOConfig(**small.policy_options(path, **options))
    trainer = PPOTrainer(small.model(), small.vowels, args, PROMPTS, processing_class=small.tokenizer())
    trainer.train()
    return [*measured(trainer), *small.logs(trainer, "objective/kl"), *small.logs(trainer, "value/loss")], sum(
        float(x.double().abs().sum()) for x in trainer.model.state_dict().values()
    )


def _task(path: str) -> list[tuple[list[float], float]]:
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore  # it may start processes
    placements: list[dict[str, Any]] = [
        {"plan": "dp2xtp2", "engine": {"plan": "tp4"}},
        {"plan": "dp2xtp2", "rollout_placement": "replicas"},
        {"plan": "dp2xtp2", "rollout_placement": "apart", "rollout_workers": 2},
    ]

    return [_ppo(f"{path}/{i}", per_device_train_batch_size=4, **x) for i, x in enumerate(placements)]


def test_ppo_in_four_processes(tmp_path: Path, pool):
    """Under three placements with three plans, PPO logs what it logs on one device, and ends with its weights."""
    logged, weights = _ppo(str(tmp_path / "one"))
    for of_rank in pool.run(_task, str(tmp_path)):
        for rank_logs, total in of_rank:
            assert rank_logs == pytest.approx(logged, abs=2e-5)
            assert total == pytest.approx(weights, rel=1e-6)

"""The trainer gives sampled tokens the log-probabilities that the engine reported: within 1e-5, and the same bits with
`batch_invariant`."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from test_serving import FAMILIES, model_of

import align_models as small
import tutti
from gloo import Pool
from tutti.align import PPOConfig, PPOTrainer
from tutti.align.policy import sampled_logprobs
from tutti.align.sequences import learned
from tutti.exec.runtimes.runtime import join_job
from tutti.serve import Engine, Request, Sampling
from tutti.serve.cache.logits import sequence_logits

FEW, MANY = 64, 1000
SAMPLINGS = {"whole": (1.0, 1.0), "nucleus": (0.7, 0.8)}  # temperature, top_p
PROMPTS = [{"prompt": f"{'a' * (i % 7)}{i}+{i}="} for i in range(MANY)]


class Compared(NamedTuple):
    """Log-probabilities of trainer and engine. farthest: their largest difference. different: tokens whose bits differ.
    tokens: all that were sampled."""

    farthest: float
    different: int
    tokens: int


def model() -> Any:
    """A model whose distributions are neither uniform nor certain."""
    policy = small.model()
    with torch.no_grad():
        for p in policy.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.12)
    return policy


def compared(path: str, count: int, sampling: str, invariant: bool, plan: str = "single", cluster: str = "auto") -> Any:
    """Sample so many completions, and score them, in a trainer."""
    temperature, top_p = SAMPLINGS[sampling]
    options = small.policy_options(path, temperature=temperature, top_p=top_p, batch_invariant=invariant, plan=plan,
                                   max_completion_length=16, cluster=cluster, per_device_train_batch_size=4,
                                   generation_batch_size=count,
                                   engine={"plan": plan, "cluster": cluster})  # fmt: skip
    trainer = PPOTrainer(model(), small.vowels, PPOConfig(**options), train_dataset=PROMPTS,
                         processing_class=small.tokenizer())  # fmt: skip
    rollouts = trainer.generate([trainer.train_dataset[i] for i in range(count)], seed=0)
    batch = trainer.batch_of_rollouts(rollouts, torch.zeros(count))
    scores = trainer.score(batch)["old_logprobs"]
    mask = learned(batch["labels"]) > 0
    own, theirs = scores[mask], sampled_logprobs(rollouts, scores)[mask]
    assert len({tuple(x.tokens) for x in rollouts}) > count / 2, "sequences are sampled"
    return Compared(float((own - theirs).abs().max()), int((own != theirs).sum()), len(own))


def check(results: Compared, invariant: bool) -> None:
    print(results)
    assert results.farthest < 1e-5
    if invariant:
        assert results.farthest == 0 and results.different == 0
    else:
        assert results.different, "the mode makes a difference"


@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "invariant"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("count", [FEW, MANY])
def test_one_device(count, sampling, invariant, tmp_path):
    check(compared(str(tmp_path), count, sampling, invariant), invariant)


@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "invariant"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_two_virtual_devices(sampling, invariant, tmp_path):
    check(compared(str(tmp_path), FEW, sampling, invariant, "tp2", "cpu:2"), invariant)


@pytest.fixture(scope="module")
def pair():
    workers = Pool(2)
    yield workers
    workers.close()


def _rank(*args: Any) -> Compared:
    join_job(torch.device("cpu"))
    return compared(*args)


@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "invariant"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("count", [FEW, MANY])
def test_tensor_parallelism_of_two_processes(count, sampling, invariant, pair, tmp_path):
    first, second = pair.run(_rank, str(tmp_path), count, sampling, invariant, "tp2")
    assert first == second
    check(first, invariant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, dtype):
    """What the engine reports of prompts in chunks and of generated tokens are the bits of whole padded sequences."""
    policy = model_of(family).to(dtype)
    engine = Engine(policy, blocks=64, budget=32, most=4, plan="single", self_check=False)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 250, (n,), generator=draw).tolist() for n in (5, 37, 21, 1)]
    sampling = Sampling(max_tokens=12, seed=1, logprobs=0, prompt_logprobs=0, ignore_end=True)
    outputs = engine.generate([Request(x, sampling) for x in prompts])
    ids = torch.zeros(4, 56, dtype=torch.int64)
    for row, x in zip(ids, outputs, strict=True):
        row[: len(x.prompt) + 12] = torch.tensor(x.prompt + x.tokens)
    scored = tutti.function(lambda ids: sequence_logits(policy, ids).detach(), ids, store=tutti.Store(model=policy),
                            plan="single")  # fmt: skip
    logprobs = scored(ids).float().log_softmax(-1)
    for row, own, x in zip(ids, logprobs, outputs, strict=True):
        reported = [y.logprob for y in (*x.prompt_logprobs, *x.completions[0].logprobs)]
        assert own[: len(reported)].gather(1, row[1 : len(reported) + 1, None])[:, 0].tolist() == reported

"""The engine: serves requests to a model that generates, with one continuous batch.

engine = tutti.serve.Engine(model, tokenizer=tokenizer)
outputs = engine.generate(["The capital of France is", [1, 2, 3]], tutti.serve.Sampling(max_tokens=20))
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch
from torch import Tensor, nn

from tutti.api.step import Step
from tutti.checkpoint.model import model_folder, skeleton
from tutti.compress.folder import GGUF
from tutti.compress.formats import gguf
from tutti.hardware import Cluster
from tutti.keywords import names_nearest
from tutti.launch.progress import progress
from tutti.nn.rows import greatest
from tutti.plan.plan import Plan
from tutti.serve import compressed
from tutti.serve.cache.attention import CacheDtype
from tutti.serve.cache.blocks import BlockPool
from tutti.serve.constraints.constrain import Constraint, Constraints
from tutti.serve.engine.job import Branch, Job
from tutti.serve.engine.protocols import Stepping
from tutti.serve.engine.request import Output, Request, Sampling, TokenLogprobs
from tutti.serve.engine.runner import Runner
from tutti.serve.engine.sampling import adjusted, drawn, is_greedy, report, uniform
from tutti.serve.engine.scheduler import Batch, Piece, Scheduler
from tutti.serve.engine.self_check import compare_logits
from tutti.serve.engine.sequence import TokenSequence
from tutti.serve.engine.speculate import Guesser, PromptLookup
from tutti.serve.lora import Adapters
from tutti.serve.quantize import Quantize, quantized
from tutti.serve.source import Source
from tutti.serve.values import JsonValue, Model, Processor, Prompt, Tokenizer
from tutti.serve.weights import Weights, read, update

UNLIMITED = 2048  # tokens of a sequence of models without a limit, unless `longest` says otherwise


class Wanted(NamedTuple):
    """Places in a batch of the tokens of a piece whose logits are needed. reported: tokens of the prompt, whose
    log-probabilities are reported. chosen: tokens after which tokens are chosen: the last one and each draft."""

    piece: Piece
    reported: list[int]
    chosen: list[int]


@dataclass
class Carried:
    """A request on its way to another engine. sequences: number, tokens, computed tokens and score of each. elapsed:
    seconds since it arrived. caches: the keys and values of each, by the names of the store, (slots, heads, width)."""

    request: Request
    output: Output
    source: Source | None
    seed: int
    sequences: list[tuple[int, list[int], int, float]]
    elapsed: float
    caches: list[dict[str, Tensor]]

    @property
    def bytes(self) -> int:
        """Bytes of the caches."""
        return sum(x.nbytes for cache in self.caches for x in cache.values())


class Engine:
    """Serves requests to a model that generates.

    model: a causal language model of `transformers`, also one that sees images, or an encoder-decoder model; a folder
        with one, a run or checkpoint of training, a file in GGUF, or a `tutti.Step` that trains one. It runs in its own
        dtype; of GGUF in bfloat16, or float32 if the file has no smaller weights than float16. A model
        object is not changed and can be trained. Of a folder, each process reads only its parts.
    tokenizer: tokenizer for prompts that are text, stop texts and constraints; or a processor of `transformers` with
        one, which reads images and sound. By default that of the folder, if it has one.
    cluster, plan, level: as for `tutti.function`.
    block: tokens in a block of the cache. blocks: number of blocks; by default as many as `memory` bytes hold.
    memory: bytes of the KV cache on all devices together.
    cache_dtype: "int8" rounds keys and values, with a scale for each token and head: about half the bytes of bfloat16.
        "int4": with two numbers for 64 of a head, a quarter. On CPUs only.
    host_memory: bytes on the host for the blocks of preempted sequences; without it they are computed again.
    budget: tokens of a step. most: sequences that run at once. longest: tokens of a sequence, prompt included; by
        default as many as the model has positions (2,048 if it has no limit), and the cache has room for.
    prefix_cache: whether prompts with the same beginning share its blocks.
    speculate: number of tokens to guess by prompt look-up, or an object that guesses, such as a `DraftModel`.
    adapters: folders of LoRA adapters of `peft` by name, which requests choose.
    quantize: "int8" or "int4" rounds the weights of linear layers (`serve.quantize`), not those of adapters.
    seed: random seed of requests that have none.
    share_frozen: whether parameters of the model that require no gradients are not copied, where a process holds them
        whole: nobody may write into them while the engine is used.
    self_check: whether to compare the engine's logits with those of the model's own forward pass
    (`serve.engine.self_check`).

    Raises ValueError for models whose attention cannot be paged or that would be served wrongly, and for a cache that
    is too small.
    """

    @names_nearest
    def __init__(
        self,
        model: nn.Module | Step | str | Path,
        *,
        tokenizer: Tokenizer = None,
        cluster: Cluster | str = "auto",
        plan: Plan | str | Path = "auto",
        level: str = "O0",
        block: int = 16,
        blocks: int | None = None,
        memory: int = 1 << 30,
        cache_dtype: CacheDtype = "",
        host_memory: int = 0,
        budget: int = 512,
        most: int = 32,
        longest: int | None = None,
        prefix_cache: bool = True,
        speculate: int | Guesser = 0,
        adapters: Mapping[str, str | Path] | None = None,
        quantize: Quantize = "",
        seed: int = 0,
        self_check: bool = True,
        share_frozen: bool = False,
    ):
        folder, source = None, None
        if isinstance(model, Step):
            model, source = model.model, model
        elif not isinstance(model, nn.Module) and Path(model).suffix == GGUF:
            model, tokenizer = gguf.load(model, dtype=None, packed=True), tokenizer or _tokenizer_of(Path(model))
        elif not isinstance(model, nn.Module):
            folder = model_folder(model)
            model, tokenizer = skeleton(folder), tokenizer or _reader(folder)
            if compressed.is_compressed(model):
                if quantize:
                    raise ValueError(f"{folder} is quantized already: serve it without quantize=")
                compressed.prepare(model)
        assert isinstance(model, nn.Module)
        model = compressed.served(model)
        if quantize:
            model = quantized(model, quantize, folder is None and source is None)
        self.processor = tokenizer if hasattr(tokenizer, "tokenizer") else None
        self.model, self.tokenizer = model.eval(), self.processor.tokenizer if self.processor else tokenizer
        self.config: Model = model.config.get_text_config()  # pyright: ignore
        self.vocabulary = self.config.vocab_size
        self.adapters = Adapters(model, adapters) if adapters else None
        self.runner = Runner(model, block=block, blocks=blocks, memory=memory, host_memory=host_memory, budget=budget,
                             most=most, longest=longest or _positions(self.config), adapters=self.adapters,
                             cache_dtype=cache_dtype, share_frozen=share_frozen, saves=self_check,
                             options={"cluster": cluster, "plan": plan, "level": level})  # fmt: skip
        self.bytes = read(self.runner.store, model, folder) if folder else 0
        self.longest = self.runner.longest
        self.pool = BlockPool(self.runner.blocks, block, prefix_cache)
        host = BlockPool(self.runner.host_blocks, block, False) if self.runner.host_blocks else None
        self.scheduler = Scheduler(self.pool, host, budget, most)
        self.ends = _ends(model)
        self.constraints = Constraints(self.tokenizer, self.vocabulary, self.ends)
        self.guesser = (PromptLookup(speculate) if speculate else None) if isinstance(speculate, int) else speculate
        if self.guesser:
            self.guesser.bind(budget, most, self.longest, self.vocabulary)
        self.jobs: dict[str, Job] = {}
        self.arriving: list[tuple[TokenSequence, int, dict[str, Tensor]]] = []  # with their computed tokens and caches
        self.random = random.Random(seed)
        self.steps = self.guessed = self.accepted = 0
        if source is not None:
            self.update(source)
        self.checked = 0.0  # seconds
        if self_check:
            with progress("self-check: comparing logits with those of the model's own forward pass"):
                self.checked = compare_logits(self.runner)

    def update(self, weights: Weights) -> int:
        """Take new weights, of a `tutti.Step` or `tutti.Store` that trains the model in this job or of a state dict.


        Requests that run are computed again with the new weights, from what they have. Returns the bytes received.
        Every rank of a job must call it. Raises ValueError if a parameter is missing or has another shape.
        """
        for sequence, _, _ in self.arriving:
            self.scheduler.add(sequence)
        self.arriving = []
        self.scheduler.recompute()
        received = update(self.runner.store, self.model, weights)
        self.runner.check_recorded()
        return received

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> Output:
        """A new request. Its output grows with each `step`.

        Raises ValueError for a request that can never be served; nothing has changed then.
        """
        sampling, (prompt, source) = request.sampling, self._read(request)
        if request.id in self.jobs:
            raise ValueError(f"there is a request {request.id!r} already")
        if sampling.beams > self.scheduler.most:
            raise ValueError(f"the request has {sampling.beams} beams; {self.scheduler.most} sequences run at once")
        if (
            sampling.beams > 1
            and sampling.beams * self.pool.needed(len(prompt) + self._most(request, prompt, source))
            + self.pool.needed(source.slots if source else 0)
            > self.pool.count
        ):
            raise ValueError(f"{sampling.beams} beams of this length do not fit into the KV cache")
        self._check_request(request)
        constraint = self.prepare(request)
        output = Output(request.id, prompt, [], source=source.slots if source else 0, arrival=request.arrival)
        seed = self.random.getrandbits(63) if sampling.seed is None else sampling.seed
        job = self._job(request, output, source, seed)
        most, salt, factors = self.scheduler.most, self._salt(request, source), self._factors(len(prompt), len(prompt))
        sequences = [TokenSequence(request, first, list(prompt), len(prompt), salt, source, factors=factors,
                              room=min(most, sampling.sequences - first))
                     for first in range(0, sampling.sequences, most)]  # fmt: skip
        job.begin(sequences, constraint)
        self.jobs[request.id] = job
        for sequence in sequences:
            self.scheduler.add(sequence)
        return output

    def _check_request(self, request: Request) -> None:
        """Raise ValueError for what no engine of this model and tokenizer can do."""
        sampling = request.sampling
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop texts need the model's tokenizer")
        named = *sampling.stop_tokens, *sampling.logprob_tokens, *(x for bad in sampling.bad for x in bad)
        for token in (*sampling.logit_bias, *(sampling.allowed or ()), *named):
            self._check(token)
        if request.adapter and (self.adapters is None or not self.adapters.number(request.adapter)):
            raise ValueError(f"there is no adapter {request.adapter!r}: the engine has none")

    def _read(self, request: Request) -> tuple[list[int], Source | None]:
        """The tokens of a prompt, and what an encoder reads. Raises ValueError if they cannot be continued."""
        encoder = self.runner.encoder
        if encoder is None:
            if request.inputs:
                raise ValueError(f"{type(self.model).__name__} reads tokens only, not {sorted(request.inputs)}")
            return self.tokens(request.prompt), None
        prompt, source = encoder.read(request.prompt, request.inputs, self.tokens)
        if source and self.pool.needed(source.slots) + self.pool.needed(len(prompt) + 1) > self.pool.count:
            raise ValueError(f"a source of {source.slots} positions does not fit into the KV cache")
        return prompt, source

    def _job(self, request: Request, output: Output, source: Source | None, seed: int) -> Job:
        sampling = request.sampling
        ends = {*sampling.stop_tokens, *(() if sampling.ignore_end else self.ends)}
        return Job(request, output, seed, ends, self._most(request, output.prompt, source), self.tokenizer)

    def _most(self, request: Request, prompt: list[int], source: Source | None) -> int:
        """The number of tokens that a continuation may have."""
        room = self.pool.count - self.pool.needed(source.slots) if source else self.pool.count
        longest = min(self.longest, room * self.pool.size)
        return min(request.sampling.max_tokens or longest, longest - len(prompt))

    def _salt(self, request: Request, source: Source | None) -> bytes:
        """What distinguishes its blocks from those of others. All of a prompt that is reported must be computed."""
        if request.sampling.prompt_logprobs is not None:
            return uuid4().bytes
        return request.prefix + (source.digest if source else b"")

    def _factors(self, prompt: int, tokens: int) -> bytes:
        """Which rotary factors a sequence of so many tokens has."""
        scaling = self.runner.scaling
        return scaling.factors(prompt, tokens) if scaling else b""

    def prepare(self, request: Request) -> Constraint | None:
        """Compile what the output must match. Another thread may do it before `add`, and hold the constraint until
        then, so that no step waits for it.

        Raises ValueError for a constraint that is malformed or large.
        """
        return self.constraints.make(*request.sampling.constraint) if request.sampling.constraint else None

    def tokens(self, prompt: JsonValue) -> list[int]:
        """The tokens of a prompt. Raises ValueError if they cannot be continued."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the prompt is a text; give the engine a tokenizer, or a prompt of tokens")
            prompt = self.tokenizer(prompt)["input_ids"]
        tokens = [int(x) for x in prompt]
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        if len(tokens) >= self.longest:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; the engine holds {self.longest} with the output: as many as "
                "`longest`, its memory and the model's positions allow"
            )
        for token in tokens:
            self._check(token)
        return tokens

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocabulary:
            raise ValueError(f"token {token} is not in the vocabulary of {self.vocabulary}")

    def fail(self, why: str) -> list[Output]:
        """End all requests with an error. Returns their outputs."""
        outputs = [job.output for job in self.jobs.values()]
        for output in outputs:
            output.error = why
            self.cancel(output.id, "error")
        return outputs

    def cancel(self, id: str, reason: str = "cancelled") -> Output | None:
        """End a request with what it has. Returns its output; None if it is unknown or finished."""
        if (job := self.jobs.get(id)) is None:
            return None
        for branch in list(job.branches.values()):
            if branch.sequence in self.scheduler:
                self.scheduler.remove(branch.sequence)
            self.arriving = [x for x in self.arriving if x[0] is not branch.sequence]
            job.end(branch.sequence, reason)
        for completion in job.output.completions:  # also of sequences that have not begun
            completion.finish = completion.finish or reason
        self._conclude(job)
        return job.output

    @property
    def engines(self) -> list[Engine]:
        """This one: callers may have several."""
        return [self]

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self.jobs)

    def hand_on(self, id: str) -> Carried | None:
        """Let go of a request that has begun to generate, with its cache. None if it stays: a beam search, or a request
        with a sequence that was preempted."""
        job = self.jobs[id]
        sequences = [x.sequence for x in job.branches.values()]
        if job.beams or any(not x.output or x not in self.scheduler.running for x in sequences):
            return None
        caches = [self.runner.read_blocks([*x.source_blocks, *x.blocks[: self.pool.needed(x.computed)]])
                  for x in sequences]  # fmt: skip
        states = [(x.number, x.tokens, x.computed, x.score) for x in sequences]
        carried = Carried(job.request, job.output, sequences[0].source, job.seed, states,
                          time.monotonic() - job.request.arrival, caches)  # fmt: skip
        for x in sequences:
            self.scheduler.remove(x)
        del self.jobs[id]
        return carried

    def take_over(self, carried: Carried) -> Output:
        """Go on with a request that another engine of the same model has handed on.

        Raises ValueError if it does not fit this engine; nothing has changed then.
        """
        self._check_carried(carried)
        carried.request.arrival = time.monotonic() - carried.elapsed  # by the clock of this host
        job, source = self._job(carried.request, carried.output, carried.source, carried.seed), carried.source
        arriving = []
        for (number, tokens, computed, score), cache in zip(carried.sequences, carried.caches, strict=True):
            prompt = len(carried.output.prompt)
            salt, factors = self._salt(carried.request, source), self._factors(prompt, computed)
            sequence = TokenSequence(
                carried.request, number, tokens, prompt, salt, source, score=score, factors=factors
            )
            job.resume(sequence, self.prepare(carried.request))
            arriving.append((sequence, computed, cache))
        self.arriving += arriving  # after all constraints have taken their tokens, which raises for some
        self.jobs[carried.request.id] = job
        return carried.output

    def _check_carried(self, carried: Carried) -> None:
        """Raise ValueError unless a request fits this engine."""
        output, source, sequences = carried.output, carried.source, carried.sequences
        numbers, completions = {number for number, *_ in sequences}, output.completions
        if carried.request.id in self.jobs or output.id != carried.request.id:
            raise ValueError(f"there is a request {carried.request.id!r} already, or the output is of another")
        self._check_request(carried.request)
        if source and (self.runner.encoder is None or not self.runner.encoder.fits(source, len(output.prompt))):
            raise ValueError(f"{type(self.model).__name__} has no encoder for what was sent, or another one")
        if not sequences or len(sequences) != len(carried.caches) or carried.request.sampling.beams > 1:
            raise ValueError(f"{len(sequences)} sequences with {len(carried.caches)} caches")
        if not numbers <= {*range(len(completions))} or len(numbers) < len(sequences) or not output.prompt:
            raise ValueError(f"sequences of {len(completions)} completions, a prompt of {len(output.prompt)} tokens")
        for (number, tokens, computed, _), cache in zip(sequences, carried.caches, strict=True):
            if tokens != output.prompt + completions[number].tokens or not 0 < computed < len(tokens):
                raise ValueError(f"sequence {number} has {len(tokens)} tokens, {computed} of them computed, which are "
                                 "not those of its output")  # fmt: skip
            if len(tokens) > self.longest:
                raise ValueError(f"sequence {number} has {len(tokens)} tokens; the engine holds {self.longest}")
            for token in tokens:
                self._check(token)
            blocks = self.pool.needed(computed) + (self.pool.needed(source.slots) if source else 0)
            self.runner.check_blocks(blocks, cache)

    def _arrive(self) -> None:
        """Begin sequences that were taken over, as far as there is room for them."""
        while self.arriving:
            sequence, computed, cache = self.arriving[0]
            if not self.scheduler.place(sequence, computed):
                return
            del self.arriving[0]
            self.runner.write_blocks([*sequence.source_blocks, *sequence.blocks], cache)
            sequence.register(self.pool)

    def generate(self, requests: Iterable[Request | Prompt], sampling: Sampling | None = None) -> list[Output]:
        """The outputs of requests, in their order. Every rank of a job must call it; rank 0's requests are served.

        requests: `Request` objects, texts, or lists of tokens. sampling: sampling parameters of the latter two.
        """
        if not self.runner.leads:
            return self.runner.follow()
        all_requests = [x if isinstance(x, Request) else Request(x, sampling or Sampling()) for x in requests]
        try:
            outputs = served(self, all_requests)
        except Exception as error:
            for request in all_requests:
                self.cancel(request.id)
            self.runner.release(error)
            raise
        self.runner.release(outputs)
        return outputs

    def warm_up(self) -> None:
        """Capture and compile the steps of all sizes, so that no request waits for it."""
        shapes = self.runner.shapes()[::-1]  # the largest first: recorded steps share memory
        with progress("preparing steps") as tell:
            for i, shape in enumerate(shapes):
                tell.count(i, len(shapes))
                self.runner.prepare(shape)
            self.runner.prepare_encoder()

    def embed(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """The mean of the last hidden states of each prompt, of length one: (prompts, hidden), float32."""
        means = [self.runner.hidden(self.tokens(x)).float().mean(0) for x in prompts]
        return torch.nn.functional.normalize(torch.stack(means), dim=-1)

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Compute the next batch. Returns the outputs that have changed."""
        changed = self._expire()
        self._arrive()
        self._outgrow()
        self._guess()
        batch = self.scheduler.schedule()
        if not batch.pieces:
            if self.jobs and not changed:
                raise RuntimeError("no sequence fits into the KV cache; give the engine more blocks")
            return changed
        samplings = [piece.sequence.request.sampling for piece in batch.pieces]
        reports = any(x.logprobs is not None or x.prompt_logprobs is not None or x.sequences > 1 for x in samplings)
        with nullcontext() if reports else self.runner.threads():  # log-probabilities are PyTorch's work
            wanted = self._rows(batch)
            logits = self.runner.run(batch, [row for _, reported, chosen in wanted for row in (*reported, *chosen)])
            self.steps += 1
            for sequence in batch.sources:
                sequence.know_source(self.pool)
            return list({x.id: x for x in [*changed, *self._take(wanted, logits)]}.values())

    def _expire(self) -> list[Output]:
        """End requests whose deadline has passed."""
        now, over = time.monotonic(), []
        for job in list(self.jobs.values()):
            if job.request.deadline is not None and now > job.request.arrival + job.request.deadline:
                self.cancel(job.request.id, "deadline")
                over.append(job.output)
        return over

    def _outgrow(self) -> None:
        """Compute sequences again whose rotary factors have changed with their length."""
        if self.runner.scaling and self.runner.scaling.recomputed:
            for sequence in self.scheduler:
                if (factors := self._factors(sequence.prompt, len(sequence.tokens))) != sequence.factors:
                    self.scheduler.restart(sequence, factors)

    def _guess(self) -> None:
        """Give sequences that generate guesses to verify."""
        if self.guesser is None:
            return
        able = [x for x in self.scheduler.running if x.wanted == 1 and self._may_guess(x)]
        for sequence, tokens in zip(able, self.guesser.guess(able, self._choose), strict=True):
            job = self.jobs[sequence.request.id]
            left = min(job.most - len(sequence.output), self.longest - len(sequence.tokens)) - 1
            sequence.drafts = tokens[: max(0, left)]
            if self._factors(sequence.prompt, len(sequence.tokens) + len(sequence.drafts)) != sequence.factors:
                sequence.drafts = []

    def _choose(self, owners: Sequence[tuple[TokenSequence, list[int]]], logits: Tensor) -> list[int]:
        """The tokens that follow some sequences and drafts, from their logits: -1 where no token can follow."""
        jobs = [self.jobs[sequence.request.id] for sequence, _ in owners]
        rows = [job.row(sequence, drafts) for job, (sequence, drafts) in zip(jobs, owners, strict=True)]
        logits, samplings = adjusted(logits, rows), [job.request.sampling for job in jobs]
        if all(is_greedy(x) for x in samplings):
            return greatest(logits).tolist()
        numbers = [uniform(job.seed, sequence.number, len(sequence.tokens) + len(drafts))
                   for job, (sequence, drafts) in zip(jobs, owners, strict=True)]  # fmt: skip
        return drawn(logits, samplings, numbers)

    def _may_guess(self, sequence: TokenSequence) -> bool:
        job = self.jobs[sequence.request.id]
        return job.beams is None and job.branches[sequence.number].constraint is None

    def _rows(self, batch: Batch) -> list[Wanted]:
        """The tokens of a batch whose logits are needed."""
        wanted, at = [], 0
        for piece in batch.pieces:
            (sequence, start, count), reported = piece, range(0)
            if sequence.request.sampling.prompt_logprobs is not None:
                first = max(start, len(self.jobs[sequence.request.id].output.prompt_logprobs))
                reported = range(first, min(start + count, sequence.prompt - 1))
            chosen = range(max(start, len(sequence.tokens) - 1), start + count)
            wanted.append(Wanted(piece, [at + p - start for p in reported], [at + p - start for p in chosen]))
            at += count
        return wanted

    def _take(self, wanted: list[Wanted], logits: Tensor) -> list[Output]:
        """Choose tokens from the logits, and note what the step has computed."""
        changed, plain, beams, at = [], [], [], 0
        for piece, reported, chosen in wanted:
            sequence, job = piece.sequence, self.jobs[piece.sequence.request.id]
            if reported:
                self._report_prompt(job, sequence, logits[at : at + len(reported)])
            rows = range(at + len(reported), at + len(reported) + len(chosen))
            at = rows.stop
            sequence.computed = piece.start + piece.count - (len(sequence.drafts) if chosen else 0)
            sequence.register(self.pool)
            job.output.cached = max(job.output.cached, sequence.cached)
            if chosen:
                changed.append(job.output)
                kind = beams if job.beams else plain
                kind += [(x, rows) for x in (sequence, *self._fork(job, sequence))]
        self._sample(plain, logits)
        self._search(beams, logits)
        return changed

    def _fork(self, job: Job, sequence: TokenSequence) -> list[TokenSequence]:
        """When the prompt is in the cache, the other sequences of its request begin."""
        if job.beams or sequence.room == 1:
            return []
        first = sequence.number
        forks = [sequence.fork(self.pool, number) for number in range(first + 1, first + sequence.room)]
        for one in forks:
            self.scheduler.join(one)
            job.fork(one, sequence)
        sequence.room = 1
        return forks

    def _report_prompt(self, job: Job, sequence: TokenSequence, logits: Tensor) -> None:
        """Log-probabilities of prompt tokens, in the order of their positions."""
        logprobs = job.output.prompt_logprobs
        first = len(logprobs) + 1
        tokens = sequence.tokens[first : first + len(logits)]
        logprobs += report(logits, tokens, [job.request.sampling.prompt_logprobs] * len(tokens))

    def _sample(self, chosen: list[tuple[TokenSequence, range]], logits: Tensor) -> None:
        """Choose tokens for sequences from logits of their last token and each draft, which are in these rows."""
        if not chosen:
            return
        owners = [(sequence, sequence.drafts[:i]) for sequence, rows in chosen for i in range(len(rows))]
        jobs = [self.jobs[sequence.request.id] for sequence, _ in owners]
        rows = [row for _, each in chosen for row in each]
        if rows != list(range(len(logits))):
            logits = logits[torch.tensor(rows, device=logits.device)]
        samplings = [job.request.sampling for job in jobs]
        reported = [x.logprobs is not None or x.sequences > 1 for x in samplings]
        raw = logits.float().clone() if any(reported) else None
        if raw is not None and any(x.scaled_logprobs for x in samplings):
            raw /= torch.tensor([x.temperature if x.scaled_logprobs and not is_greedy(x) else 1.0 for x in samplings],
                                device=raw.device).unsqueeze(1)  # fmt: skip
        tokens = self._choose(owners, logits)
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if raw is not None:
            token_logprobs = report(raw, tokens, [x.logprobs for x in samplings], [x.logprob_tokens for x in samplings])
            logprobs = [x if wanted else None for x, wanted in zip(token_logprobs, reported, strict=True)]
        at = 0
        for sequence, rows in chosen:
            self._accept(sequence, tokens[at : at + len(rows)], logprobs[at : at + len(rows)])
            at += len(rows)

    def _accept(self, sequence: TokenSequence, tokens: list[int], logprobs: list[TokenLogprobs | None]) -> None:
        """Append the tokens up to the first that a draft had not guessed."""
        job, drafts = self.jobs.get(sequence.request.id), sequence.drafts
        if job is None:  # another sequence of the request has just failed
            return
        sequence.drafts = []
        self.guessed += len(drafts)
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            try:
                if token < 0:
                    raise ValueError("no token is allowed here, or the model's logits are not numbers")
                ended = job.take(sequence, token, logprob)
            except ValueError as error:  # no token is allowed
                job.output.error = str(error)
                self.cancel(job.request.id, "error")
                return
            if ended:
                self.scheduler.remove(sequence)
                if not job.branches:
                    self._conclude(job)
                return
            if i == len(drafts) or drafts[i] != token:
                return
            sequence.computed += 1
            self.accepted += 1
        sequence.register(self.pool)

    def _search(self, chosen: list[tuple[TokenSequence, range]], logits: Tensor) -> None:
        """Advance beam searches whose beams all have logits."""
        for sequence, rows in chosen:
            job = self.jobs[sequence.request.id]
            assert job.beams
            last = adjusted(logits[rows.stop - 1 : rows.stop].clone(), [job.row(sequence, [])])
            job.rows[sequence.number] = last.float().log_softmax(-1)[0]
            if len(job.rows) == len(job.branches):
                self._advance(job)

    def _advance(self, job: Job) -> None:
        beams, rows = job.beams, job.rows
        assert beams
        job.rows = {}
        branches = [job.branches[number] for number in sorted(job.branches)]
        chosen = beams.advance(torch.stack([rows[x.sequence.number] for x in branches]), job.ends, job.most)
        if not chosen:
            self.cancel(job.request.id, "stop")
            return
        beams_by_number: dict[int, TokenSequence] = {}
        parents = [x.sequence for x in branches]
        used: set[int] = set()
        for number, (beam, _) in enumerate(chosen):
            parent = parents[beam]
            if beam in used:
                beams_by_number[number] = parent.fork(self.pool, number)
                self.scheduler.join(beams_by_number[number])
            else:
                used.add(beam)
                beams_by_number[number] = parent
        for sequence, (_, token) in zip(beams_by_number.values(), chosen, strict=True):  # after all forks
            sequence.extend([token])
        for i, parent in enumerate(parents):
            if i not in used:
                self.scheduler.remove(parent)
        first = branches[0]
        job.branches = {}
        for number, sequence in beams_by_number.items():
            sequence.number, sequence.room = number, 1
            job.branches[number] = Branch(sequence, first.completion, None, None)
        next(iter(beams_by_number.values())).room = beams.width - len(beams_by_number) + 1

    def _conclude(self, job: Job) -> None:
        job.conclude()
        del self.jobs[job.request.id]


def served(engine: Stepping, requests: Iterable[Request | Prompt], sampling: Sampling | None = None) -> list[Output]:
    """The finished outputs of requests to anything with the methods of an engine. Arguments: see `Engine.generate`."""
    outputs = [engine.add(x if isinstance(x, Request) else Request(x, sampling or Sampling())) for x in requests]
    while not all(x.finished for x in outputs):
        engine.step()
    return outputs


def _reader(folder: Path) -> Processor:
    """The processor or the tokenizer of a folder, if it has one."""
    from transformers import AutoProcessor, AutoTokenizer

    processes = any((folder / x).exists() for x in ("processor_config.json", "preprocessor_config.json"))
    try:
        return (AutoProcessor if processes else AutoTokenizer).from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def _tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer of a file in GGUF, if it has one that is supported."""
    try:
        return gguf.load_tokenizer(path)
    except ValueError:
        return None


def _positions(config: Model) -> int:
    """The number of positions that a model, or its decoder, has; or was trained for, if any number is possible."""
    names = "max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len"
    return next((n for name in names if (n := getattr(config, name, None))), UNLIMITED)


def _ends(model: Model) -> list[int]:
    """The tokens that end an output."""
    ids = getattr(model, "generation_config", None) and model.generation_config.eos_token_id
    ids = model.config.get_text_config().eos_token_id if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

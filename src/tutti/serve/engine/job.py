"""A request in the engine: its sequences, what they have produced, and when they end."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tutti.serve.constraints.constrain import Constraint
from tutti.serve.engine.beams import Beams
from tutti.serve.engine.request import Completion, Output, Request, TokenLogprobs
from tutti.serve.engine.sampling import Row
from tutti.serve.engine.sequence import TokenSequence
from tutti.serve.engine.text import Text
from tutti.serve.values import Tokenizer


@dataclass
class Branch:
    """A sequence that is still extended, with its completion."""

    sequence: TokenSequence
    completion: Completion
    text: Text | None
    constraint: Constraint | None


@dataclass
class Job:
    """A request that runs.

    seed: seed of its random numbers. ends: tokens that end a continuation. most: number of tokens that one may have.
    """

    request: Request
    output: Output
    seed: int
    ends: Collection[int]
    most: int
    tokenizer: Tokenizer
    branches: dict[int, Branch] = field(default_factory=dict)  # by number
    beams: Beams | None = None
    rows: dict[int, Any] = field(default_factory=dict)  # log-probabilities of beams that wait for the others

    def begin(self, sequences: Sequence[TokenSequence], constraint: Constraint | None) -> None:
        """The first sequences. Each is forked until there are as many as the request has."""
        sampling = self.request.sampling
        if sampling.beams > 1:
            self.beams = Beams(sampling.beams, sampling.length_penalty)
        self.output.completions += [Completion() for _ in range(1 if self.beams else sampling.sequences)]
        for sequence in sequences:
            self._branch(sequence, self.output.completions[sequence.number], constraint)

    def resume(self, sequence: TokenSequence, constraint: Constraint | None) -> None:
        """A sequence that another engine began. Its completion is in the output."""
        branch = self._branch(sequence, self.output.completions[sequence.number], constraint)
        for token in sequence.output:
            if branch.text:
                branch.text.add([token])
            if branch.constraint:
                branch.constraint.take(token)

    def fork(self, sequence: TokenSequence, parent: TokenSequence) -> None:
        """Another continuation of the prompt."""
        self._branch(sequence, self.output.completions[sequence.number], self.branches[parent.number].constraint)

    def _branch(self, sequence: TokenSequence, completion: Completion, constraint: Constraint | None) -> Branch:
        """A sequence is extended from now on."""
        prompt, sampling = sequence.tokens[: sequence.prompt], self.request.sampling
        text = None
        if self.tokenizer:
            text = Text(self.tokenizer, prompt, sampling.stop, sampling.include_stop, sampling.skip_special)
        own = constraint and constraint.fork()
        self.branches[sequence.number] = Branch(sequence, completion, text, own)
        return self.branches[sequence.number]

    def row(self, sequence: TokenSequence, drafts: list[int]) -> Row:
        """What decides about the token after a sequence and some drafts."""
        sampling, constraint = self.request.sampling, self.branches[sequence.number].constraint
        count = len(sequence.tokens) - sequence.prompt + len(drafts)
        row = Row(sampling, (), (), constraint and constraint.allowed(),
                  tuple(self.ends) if count < sampling.min_tokens else ())  # fmt: skip
        if sampling.adjusts_nothing:
            return row
        return row._replace(prompt=sequence.tokens[: sequence.prompt], output=sequence.output + drafts)

    def take(self, sequence: TokenSequence, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Append a chosen token to a branch. Whether it ends."""
        branch, sampling = self.branches[sequence.number], self.request.sampling
        completion = branch.completion
        sequence.extend([token])
        completion.tokens.append(token)
        self.output.times.append(time.monotonic())
        if logprobs is not None:
            sequence.score += logprobs.logprob
            if sampling.logprobs is not None:
                completion.logprobs.append(logprobs)
        ended = token in self.ends
        if not ended:
            matched = branch.constraint is not None and branch.constraint.take(token)
            stopped = branch.text is not None and branch.text.add([token])
            ended = matched or stopped
        elif sampling.include_stop and branch.text:
            branch.text.add([token])
        if ended:
            self.end(sequence, "stop")
        elif len(completion.tokens) >= self.most:
            self.end(sequence, "length")
        elif branch.text:
            completion.text = branch.text.safe
        return bool(completion.finish)

    def end(self, sequence: TokenSequence, reason: str) -> None:
        """A branch ends."""
        branch = self.branches.pop(sequence.number)
        branch.completion.finish, branch.completion.score = reason, sequence.score
        if branch.text:
            branch.text.end()
            branch.completion.text = branch.text.text

    def conclude(self) -> None:
        """All branches have ended: keep the best of them, or the best beams."""
        sampling, completions = self.request.sampling, self.output.completions
        if self.beams and self.beams.finished:
            completions[:] = [Completion(x.tokens, self._text(x.tokens), x.finish, score=x.score)
                              for x in self.beams.finished[: sampling.n]]  # fmt: skip
        elif len(completions) > sampling.n:
            mean = [(x.score / max(1, len(x.tokens)), -i) for i, x in enumerate(completions)]
            best = sorted(range(len(mean)), key=mean.__getitem__, reverse=True)[: sampling.n]
            completions[:] = [completions[i] for i in best]

    def _text(self, tokens: list[int]) -> str:
        return (
            self.tokenizer.decode(tokens, skip_special_tokens=self.request.sampling.skip_special)
            if self.tokenizer
            else ""
        )

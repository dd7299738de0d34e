"""What the Trainer needs of the loaders, checkpoints and models that it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from tutti.train.values import NamedValues

Checkpoint = TypeVar("Checkpoint")


class Loader(Protocol):
    """What training and evaluation iterate: batches, once for each epoch. It may have a length."""

    def __iter__(self) -> Iterator[NamedValues]: ...


class ResumableLoader(Protocol):
    """A loader that finds its place in the data again by itself.

    whole: whether each batch is that of a step, with all its microbatches.
    """

    whole: bool

    def __iter__(self) -> Iterator[NamedValues]: ...
    def example(self, count: int) -> Sequence[NamedValues]:
        """The first batches, which the next iterator yields again."""
        ...

    def go_on(self, checkpoint: Any, step: int) -> None:
        """Continue after the last batch of a checkpoint, which is that of this step."""
        ...

    def state_dict(self) -> NamedValues:
        """What `go_on` reads of a checkpoint, as values of JSON."""
        ...


class TakesEpoch(Protocol):
    """A loader, sampler or dataset whose order depends on the epoch."""

    def set_epoch(self, epoch: int) -> object: ...


class Schedule(Protocol):
    """A schedule of learning rates, such as a `torch.optim.lr_scheduler.LRScheduler`."""

    def step(self, *args: Any, **kwargs: Any) -> object: ...
    def get_last_lr(self) -> Sequence[float | Tensor]: ...
    def state_dict(self) -> NamedValues: ...
    def load_state_dict(self, state_dict: NamedValues, /) -> object: ...


class TrainerStore(Protocol[Checkpoint]):
    """Saves and finds the checkpoints of a Trainer."""

    def find(self, resume: str | bool | None) -> Checkpoint | None:
        """The checkpoint to resume from."""
        ...

    def restore(self, checkpoint: Checkpoint, /) -> NamedValues | None:
        """Restore what is not in the step. Returns the random states that data goes on with, if it stores them."""
        ...

    def load(self, checkpoint: Checkpoint, /) -> None:
        """Load the values into the step."""
        ...

    def save(self) -> None: ...
    def finish(self) -> None: ...


class Pretrained(Protocol):
    """A model of transformers or peft, which saves itself for `from_pretrained`."""

    def save_pretrained(self, save_directory: Path, /, *, state_dict: Mapping[str, Tensor]) -> object: ...

"""Messages between the devices of a pipeline: within one process, and between processes."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tutti.exec.runtimes.runtime import Distributed, raw
from tutti.launch.heartbeat import HEARTBEAT, Meeting
from tutti.lower.parts.actions import Message, had, orders
from tutti.plan.plan import PIPELINE

if TYPE_CHECKING:
    from tutti.exec.executor import Executor

Row = list[torch.Tensor]  # a tensor for each local rank of a device


class LocalMessages:
    """Messages between devices of one process."""

    def __init__(self):
        self.posted: dict[tuple[Message, int], Row] = {}

    def begin(self) -> None:
        self.posted = {}  # an interrupted run leaves some

    def send(self, message: Message, row: Row, source: int, target: int) -> None:
        self.posted[message, target] = [x.clone() for x in row]

    def there(self, message: Message, source: int, target: int) -> bool:
        return (message, target) in self.posted

    def receive(self, message: Message, source: int, target: int) -> Row:
        return self.posted.pop((message, target))

    def over(self) -> None:
        assert not self.posted, f"nobody has received {list(self.posted)}"

    def shared(self, value: torch.Tensor, source: int) -> torch.Tensor:
        """A tensor of one rank, everywhere."""
        return value


class ProcessMessages:
    """Messages between processes: point to point, one group for each direction, each pair in one order."""

    def __init__(self, executor: Executor, runtime: Distributed):
        self.executor, self.rank = executor, runtime.rank
        self.groups: dict[bool, Any] = runtime.directions
        self.orders, self.delivered = orders(executor.actions), had(executor.actions)
        self.coming: dict[int, deque[Message]] = {}
        self.under_way: dict[Message, tuple[dist.Work, torch.Tensor]] = {}
        self.sent: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = {}  # by receiver
        self.over_with: Counter[int] = Counter()  # how many of those sent to a receiver are known to be there
        self.unfinished = False

    def begin(self) -> None:
        if self.unfinished:
            raise RuntimeError(
                "an earlier run of this pipeline ended with an error while messages were under way, so its processes "
                "no longer agree: start the job again from a checkpoint"
            )
        self.unfinished = True

    def peer(self, device: int) -> int:
        return device * self.executor.width + self.rank % self.executor.width

    def send(self, message: Message, row: Row, source: int, target: int) -> None:
        x = row[0].contiguous()
        work = dist.isend(raw(x), self.peer(target), self.groups[source < target])
        self.sent.setdefault(target, deque()).append((work, x))  # pyright: ignore[reportArgumentType]

    def there(self, message: Message, source: int, target: int) -> bool:
        return True  # one waits for it

    def receive(self, message: Message, source: int, target: int) -> Row:
        coming = self.coming.setdefault(source, deque())
        while message not in self.under_way:
            if not coming:  # of the next step
                coming.extend(self.orders[source, target])
            self.post(coming.popleft(), source, target)
        work, x = self.under_way.pop(message)
        HEARTBEAT.enter(Meeting("receive", PIPELINE, message.name, self.peer(source)))
        work.wait()
        for _ in range(self.delivered[source, target][message] - self.over_with[source]):
            self.sent[source].popleft()[0].wait()  # Gloo does not say otherwise that a message has been sent
            self.over_with[source] += 1
        HEARTBEAT.leave()
        return [x]

    def post(self, message: Message, source: int, target: int) -> None:
        spec = self.executor.spec(message.name)
        x = torch.empty(spec.shape, dtype=spec.dtype, device=self.executor.cut.step.device)
        work = dist.irecv(raw(x), self.peer(source), self.groups[source < target])
        self.under_way[message] = work, x  # pyright: ignore[reportArgumentType]

    def over(self) -> None:
        for target, sent in self.sent.items():
            HEARTBEAT.enter(Meeting("send", PIPELINE, "the last messages of the step", self.peer(target)))
            for work, _ in sent:
                work.wait()
            HEARTBEAT.leave()
        self.sent, self.over_with, self.unfinished = {}, Counter(), False

    def shared(self, value: torch.Tensor, source: int) -> torch.Tensor:
        with HEARTBEAT.within("broadcast", "what one rank knows of the step"):
            value = value.contiguous()
            dist.broadcast(raw(value), source)
        return value

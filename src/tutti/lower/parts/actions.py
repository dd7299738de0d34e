"""The actions of each pipeline device in a step, in order: the part to run, what to receive before it, and what to send
and to free after it.

    lend     parameters that other stages read as well
    prepare  parts `P`, whose results all microbatches read
    slots    of the schedule
    hand on  sums of gradients whose parameters belong to other devices
    update   parts `U0`, `U1`, ...

A function has no slots and no sums: the parts `C0`, `C1`, ... follow what is lent.

Each value is sent once to each device that reads it, and kept there until its last reader has run. A value that several
stages read in the forward pass (the output of an encoder) is passed from each to the next: the next cannot start
earlier anyway, and no device sends it to all. Messages between two devices are sent and received in one order, that of
the sender's actions (`orders`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tutti.ir.kind import Kind, kind_of
from tutti.lower.parts.cut import LEVELLED, PREPARATION, Cut, Place
from tutti.plan.pipeline.slots import Schedule

ONCE = -1  # instead of a microbatch: for values that exist once per step


class Message(NamedTuple):
    """A value of a microbatch; or an input or a sum of gradients, once per step."""

    name: str
    microbatch: int


@dataclass
class Action:
    """place: the part to run, if any. second: a part and its microbatch that run together with it. receives, sends:
    (message, other device). drops: values to free after it."""

    place: Place | None
    microbatch: int
    second: tuple[Place, int] | None = None
    receives: list[tuple[Message, int]] = field(default_factory=list)
    sends: list[tuple[Message, int]] = field(default_factory=list)
    drops: list[Message] = field(default_factory=list)

    @property
    def runs(self) -> list[tuple[Place, int]]:
        """The parts to run, with their microbatches."""
        return [(self.place, self.microbatch), *([self.second] if self.second else [])] if self.place else []


def actions_of(cut: Cut, schedule: Schedule) -> list[list[Action]]:
    """The actions of every device. A schedule without backward slots gives a forward pass only."""
    return [_Device(cut, schedule, d).actions() for d in range(len(schedule.devices))]


def orders(actions: Iterable[list[Action]]) -> dict[tuple[int, int], list[Message]]:
    """Return all messages in order, by (sender, receiver)."""
    messages: dict[tuple[int, int], list[Message]] = {}
    for sender, todo in enumerate(actions):
        for action in todo:
            for message, receiver in action.sends:
                messages.setdefault((sender, receiver), []).append(message)
    return messages


def had(actions: Sequence[list[Action]]) -> dict[tuple[int, int], dict[Message, int]]:
    """Return, by (sender, receiver) and message, how many messages of the receiver the sender receives before it."""
    counts: dict[tuple[int, int], dict[Message, int]] = {}
    for sender, todo in enumerate(actions):
        received: Counter[int] = Counter()
        for action in todo:
            received.update(source for _, source in action.receives)
            for message, receiver in action.sends:
                counts.setdefault((sender, receiver), {})[message] = received[receiver]
    return counts


class Read(NamedTuple):
    """A value that a part reads. once: whether it exists once per step. source: the device that sends it, if another
    does. onward: the devices to which it is passed on."""

    name: str
    once: bool
    source: int | None
    onward: tuple[int, ...]


class Traffic(NamedTuple):
    """The values that a part exchanges with others, the same for each microbatch. writes: with the devices to which a
    value is sent."""

    reads: tuple[Read, ...]
    writes: tuple[tuple[str, tuple[int, ...]], ...]


class _Device:
    def __init__(self, cut: Cut, schedule: Schedule, number: int):
        self.cut, self.schedule, self.number = cut, schedule, number
        self.traffic: dict[Place, Traffic] = {}
        self.here: dict[Message, Action] = {}  # values made or received, and the last action that reads each

    def at(self, stage: int) -> int:
        return self.schedule.place[stage]

    def actions(self) -> list[Action]:
        cut = self.cut
        here = [place for place in cut.parts if self.at(place.stage) == self.number]
        mine = [self.lend(), *(self.parts([(place, ONCE)]) for place in here if place.kind == PREPARATION)]
        for unit in self.schedule.units(self.number):
            places = [(Place(slot.stage, slot.kind, slot.slice), slot.microbatch) for slot in unit]
            places = [(place, microbatch) for place, microbatch in places if place in cut.parts]
            if places:
                mine.append(self.parts(places))
        if {slot.kind for slot in self.schedule.devices[self.number]} != {"F"}:
            mine.append(self.hand_on())
            mine += [self.parts([(place, ONCE)]) for place in here if place.kind[0] in LEVELLED]
        for message, action in self.here.items():
            action.drops.append(message)
        return [a for a in mine if a.place or a.sends]

    def lend(self) -> Action:
        action = Action(None, ONCE)
        for name, stages in self.cut.borrowers.items():
            if self.at(self.cut.homes[name]) == self.number:
                action.sends += self.to(Message(name, ONCE), stages)
        return action

    def hand_on(self) -> Action:
        action = Action(None, ONCE)
        for name, maker in self.cut.makers.items():
            if kind_of(name) == Kind.GRAD and self.at(maker.stage) == self.number:
                action.sends += self.to(Message(name, ONCE), [r.stage for r in self.cut.readers.get(name, ())])
        return action

    def parts(self, places: Sequence[tuple[Place, int]]) -> Action:
        """The action of one part, or of two that run together."""
        (place, microbatch), *others = places
        action = Action(place, microbatch, others[0] if others else None)
        for place, microbatch in places:
            self.part(action, place, microbatch)
        return action

    def part(self, action: Action, place: Place, microbatch: int) -> None:
        if place not in self.traffic:
            self.traffic[place] = self.traffic_of(place)
        traffic = self.traffic[place]
        for name, once, source, onward in traffic.reads:
            message = Message(name, ONCE if once else microbatch)
            if source is not None and message not in self.here:
                action.receives.append((message, source))
                action.sends += [(message, to) for to in onward]
            self.here[message] = action
        for name, targets in traffic.writes:
            message = Message(name, microbatch)
            self.here[message] = action
            action.sends += [(message, to) for to in targets]

    def traffic_of(self, place: Place) -> Traffic:
        """Return the values that a part of this device reads from other parts, and those that they read from it."""
        cut, reads = self.cut, []
        for name in cut.parts[place].inputs:
            home = cut.homes.get(name)
            maker = cut.makers[name].stage if home is None and name in cut.makers else home
            if maker is None or (name not in cut.makers and self.at(maker) == self.number):
                continue  # an input, or kept here
            value, away = kind_of(name) == Kind.VALUE, self.at(maker) != self.number
            if not (away or value):
                continue
            route = self.route(name) if value and away else {}
            source = route.get(self.number, self.at(maker)) if away else None
            once = home is not None or cut.makers[name].once
            reads.append(Read(name, once, source, self.receivers(route)))
        values = [name for name in cut.parts[place].outputs if kind_of(name) == Kind.VALUE]
        return Traffic(tuple(reads), tuple((name, self.receivers(self.route(name))) for name in values))

    def receivers(self, route: Mapping[int, int]) -> tuple[int, ...]:
        """The devices to which this one sends a value."""
        return tuple(to for to, source in route.items() if source == self.number)

    def route(self, name: str) -> dict[int, int]:
        """Return the sender of a value for each device that reads it and does not compute it."""
        home, senders = self.at(self.cut.makers[name].stage), {}
        last = home
        for stage, kind, _ in sorted(self.cut.readers[name], key=lambda place: (place.kind != "F", place.stage)):
            device = self.at(stage)
            if device != home and device not in senders:
                senders[device] = last if kind == "F" else home
                last = device if kind == "F" else last
        return senders

    def to(self, message: Message, stages: Iterable[int]) -> list[tuple[Message, int]]:
        return [(message, d) for d in sorted({self.at(s) for s in stages} - {self.number})]

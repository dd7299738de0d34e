"""Boost: training algorithms that trade computation for a little accuracy, chosen by a level or by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, cast

import torch
from torch import nn

from tutti.api.parallelize import parallelize
from tutti.api.step import Step
from tutti.tracing.batch import Batch
from tutti.train.boost.algorithm import Algorithm, Loss, NothingToDo, Training, default_loss
from tutti.train.boost.levels import ALGORITHMS, LEVELS
from tutti.train.values import NamedValues, Outputs

Value = str | Iterable[str] | Mapping[str, NamedValues] | None


class Boost:
    """The algorithms of one training run.

        boost = Boost.parse("O1")
        boost.prepare_model(model, batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = boost.make_step(model, optimizer, batch, cluster="cpu:2", plan="dp")
        for batch in loader:
            loss = step(batch)

    algorithms: by name, in the order in which they apply. left_out: algorithms of a level that do not apply to the
    model, with the reason; `prepare_model` fills it.
    """

    def __init__(self, algorithms: Mapping[str, Algorithm], of_a_level: bool = False):
        self.algorithms, self.of_a_level = dict(algorithms), of_a_level
        self.left_out: dict[str, str] = {}

    @classmethod
    def parse(cls, value: Value | Boost) -> Boost:
        """The algorithms of a level ("O0" to "O3"), of names (["grad_freeze"]), or of names with options
        ({"grad_freeze": {"groups": 5}}). None is "O0". A Boost is returned as it is.

        Raises ValueError for an unknown level, name or option, and for values that an algorithm does not take.
        """
        if isinstance(value, Boost):
            return value
        level = "O0" if value is None else value
        if isinstance(level, str):
            if level not in LEVELS:
                hint = f"; write boost=[{level!r}]" if level in ALGORITHMS else ""
                raise ValueError(f"boost is {level!r}; it may be {', '.join(LEVELS)}, or a list of algorithms{hint}")
            return cls({name: ALGORITHMS[name](**options) for name, options in LEVELS[level].items()}, of_a_level=True)
        options = level if isinstance(level, Mapping) else {name: {} for name in level}
        algorithms = {}
        for name, values in options.items():
            if name not in ALGORITHMS:
                near = get_close_matches(str(name), list(ALGORITHMS), n=1, cutoff=0.0)[0]
                raise ValueError(f"{name!r} is no algorithm of boost; the nearest is {near!r}")
            names = [key for key, x in ALGORITHMS[name].__dataclass_fields__.items() if x.init]  # pyright: ignore
            if unknown := [key for key in values if key not in names]:
                raise ValueError(f"{name} has no option {unknown[0]!r}; it has {', '.join(names)}")
            algorithms[name] = ALGORITHMS[name](**values)
        return cls({name: algorithms[name] for name in ALGORITHMS if name in algorithms})

    def prepare_model(
        self, model: nn.Module, batch: Batch, loss: Loss | None = None, steps: int | None = None
    ) -> nn.Module:
        """Change a model in place, and return it. Call it before an optimizer is made of the parameters.

        batch, loss: as for `tutti.parallelize`. The model may run on the batch once, on its own device.
        steps: number of steps of the whole run, which layer_skip needs.

        An algorithm that finds nothing to do in the model is `left_out` if a level chose it. Raises ValueError if it
        was chosen by name.
        """
        for name, algorithm in list(self.algorithms.items()):
            try:
                algorithm.prepare_model(model, batch, loss or default_loss, steps)
            except NothingToDo as reason:
                if not self.of_a_level:
                    raise
                self.left_out[name] = str(reason)
                del self.algorithms[name]
        return model

    def make_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, **options: Any) -> Training:
        """A training step: a `tutti.Step`, or an object that passes everything but a call on to one.

        With dim_reduce, only what `Training` lists is left after the switch to the subspace.

        options: those of `tutti.parallelize`.
        """
        own_loss = options.pop("loss", None)
        loss = changed = own_loss or _with_metrics(options.get("metrics", ()))
        for algorithm in self.algorithms.values():
            changed = algorithm.loss(changed)
            options = {**algorithm.options(), **options}
        step = parallelize(model, optimizer, batch, loss=own_loss if changed is loss else changed, **options)
        classes = [algorithm.classes(model) for algorithm in self.algorithms.values()]
        if joint := combined(classes):
            step.count_apart(joint)
        active = [a for a in self.algorithms.values() if a.acts]
        training = cast(Training, Boosted(step, active)) if active else step
        for algorithm in self.algorithms.values():
            training = algorithm.replaced(training, batch, changed, options)
        return training


class Boosted:
    """A `tutti.Step` with what algorithms do before and after each call. Everything else is the step's."""

    def __init__(self, step: Step, algorithms: Iterable[Algorithm]):
        self.step, self._algorithms = step, list(algorithms)

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Train on a global batch. Returns the mean loss, a 0-d tensor."""
        try:
            for algorithm in self._algorithms:
                algorithm.before(self.step, self.step.steps)
            return self.step(batch)
        finally:
            for algorithm in self._algorithms:
                algorithm.after(self.step, batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def __repr__(self) -> str:
        return f"Boosted({self.step!r}, {', '.join(map(repr, self._algorithms))})"


def combined(classes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Classes of parameters that have the same class in each of several divisions; 0 if it is 0 in all."""
    each = [x for x in classes if x]
    keys = {name: tuple(x.get(name, 0) for x in each) for name in dict.fromkeys(name for x in each for name in x)}
    numbers = {key: i for i, key in enumerate(sorted({(0,) * len(each), *keys.values()}))}
    return {name: numbers[key] for name, key in keys.items()}


def _with_metrics(names: Iterable[str]) -> Loss:
    """The default loss, with entries of the model's output as metrics."""
    wanted = list(names)
    if not wanted:
        return default_loss

    def loss(model: nn.Module, batch: Batch) -> Outputs:
        output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        fields = output if isinstance(output, Mapping) else vars(output)
        return fields["loss"], {name: fields[name] for name in wanted}

    return loss

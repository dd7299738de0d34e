"""The tensors that an optimizer keeps per parameter, and how many updates it has done."""

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterator

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from tutti.tracing.optimizers.lookup import check_options, rule_of
from tutti.tracing.optimizers.marks import EMA, EMA_DECAY, first_average
from tutti.tracing.optimizers.precision import LOW_PRECISION, value_of
from tutti.tracing.optimizers.table import Group, State

COUNT = "step"  # key of the number of updates of a parameter


def state_of(
    optimizer: Optimizer, name_of: dict[Parameter, str], fp32_master_weights: bool = False
) -> dict[str, State]:
    """Initial optimizer state of every parameter of `optimizer`, by parameter name. See `states_of`."""
    return dict(states_of(optimizer, name_of, fp32_master_weights))


def states_of(
    optimizer: Optimizer,
    name_of: dict[Parameter, str],
    fp32_master_weights: bool = False,
    of: Container[str] | None = None,
) -> Iterator[tuple[str, State]]:
    """Yield the name and the initial state of each trained parameter of `optimizer`, or of those among them in `of`.

    If the optimizer has stepped, values are copies of `optimizer.state`, else what `UpdateRule.state` returns. They are
    on the device of the parameter; a meta or fake parameter gets meta or fake state. With `fp32_master_weights`, the
    state of a bfloat16 or float16 parameter is that of its float32 copy, which is included as "master".

    A parameter without state starts afresh, also in an optimizer that has stepped, as in torch.

    Raises ValueError for an optimizer without a rule, and a parameter missing from `name_of`.
    """
    rule, stepped = rule_of(optimizer), _has_stepped(optimizer)
    kind = type(optimizer).__name__
    for group, param in _parameters(optimizer):
        check_options(optimizer, group)
        if param not in name_of:
            raise ValueError(
                f"{kind} holds a parameter of shape {tuple(param.shape)} that is not in the model; build the optimizer "
                "from model.parameters() of the model being parallelized"
            )
        if not param.requires_grad or (of is not None and name_of[param] not in of):
            continue
        value, old = param.detach(), optimizer.state.get(param, {})
        masters = {"master": value.to(torch.float32)} if fp32_master_weights and param.dtype in LOW_PRECISION else {}
        start = masters.get("master", value)
        state = rule.state(group, start)
        missing = [key for key in state if old.get(key) is None]
        if (stepped and not missing) or not (
            missing or masters
        ):  # a fresh Adagrad has bfloat16 state, which masters do not start from
            state = {key: _copied(old[key], like, f"{key} of {name_of[param]}") for key, like in state.items()}
        if group.get(EMA_DECAY) is not None:
            average = first_average(start)
            state[EMA] = _copied(old[EMA], average, f"{EMA} of {name_of[param]}") if EMA in old else average
        yield name_of[param], masters | state


def initial_state(optimizer: Optimizer, group: Group, param: torch.Tensor) -> State:
    """The state of a parameter before its first update."""
    check_options(optimizer, group)
    state = rule_of(optimizer).state(group, param)
    return state if group.get(EMA_DECAY) is None else {**state, EMA: first_average(param)}


def step_count(optimizer: Optimizer) -> int:
    """The largest number of updates that `optimizer` has done on one of its parameters: 0 if it is fresh."""
    return max(update_counts(optimizer).values(), default=0)


def update_counts(optimizer: Optimizer) -> dict[Parameter, int]:
    """Number of updates of each trained parameter.

    A parameter of an optimizer that does not count updates (SGD, Muon) has 1 if it has state: its update only needs to
    know whether it is the first.
    """
    rule_of(optimizer)
    trained = [(group, p) for group, p in _parameters(optimizer) if p.requires_grad]
    return {p: _updates(group, optimizer.state.get(p, {})) for group, p in trained}


def counter_of(optimizer: Optimizer) -> torch.Tensor | int | None:
    """Return the "step" in the optimizer's state of a parameter: a 0-d tensor, a number, or None.

    For an optimizer without state, it is found by an update of a small parameter.
    """
    for state in optimizer.state.values():
        if COUNT in state:
            return state[COUNT]
    probe, small = object.__new__(type(optimizer)), Parameter(torch.ones(2, 2))
    group = next(iter(optimizer.param_groups), {})
    hooks = {name: OrderedDict() for name in vars(optimizer) if name.startswith("_optimizer_") and "hook" in name}
    vars(probe).update(vars(optimizer) | hooks)
    vars(probe).update(state=defaultdict(dict), param_groups=[{**group, "params": [small]}])
    vars(probe).pop("step", None)  # a scheduler's
    small.grad = torch.zeros_like(small)
    try:
        type(optimizer).step(probe)
    except NotImplementedError:  # one that is an update only within a captured step
        return None
    return probe.state[small].get(COUNT)


def _updates(group: Group, state: dict) -> int:
    if state and isinstance(group.get("step"), int):  # pytorch_optimizer counts by group
        return group["step"]
    return (
        int(value_of(state["step"]))
        if "step" in state
        else int(any(x is not None for key, x in state.items() if key != EMA))
    )


def _has_stepped(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has done a step. Adagrad has state before its first step."""
    return any(value_of(state.get("step", 1)) for state in optimizer.state.values() if state.keys() - {EMA})


def _copied(old: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    if old.shape != like.shape:
        raise ValueError(f"{name} has shape {tuple(old.shape)} in the optimizer; {tuple(like.shape)} is expected")
    return torch.empty_like(like).copy_(old.detach())


def _parameters(optimizer: Optimizer) -> Iterator[tuple[Group, Parameter]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield group, param

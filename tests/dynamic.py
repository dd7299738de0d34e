"""Functions of a vector whose Python depends on its values. Not a test file: pytest rewrites asserts in those."""

import random

import numpy as np
import torch


def branches(x):
    y = x * 2
    if y.sum() > 0:
        y = y + 1
    return y - 1


def sums_items(x):
    total = 0.0
    for i in range(len(x)):
        total += x[i].item()
    return x * total


def masks(x):
    selected = x[x > 2]
    return selected.sum(), len(selected)


def catches(x):
    try:
        if x.sum() > 0:
            raise ValueError("too large")
        x = x * 2
    except ValueError as error:
        return x - len(str(error))
    return x + 1


def fails_in_torch(x):
    try:
        return x + torch.ones(4)
    except RuntimeError:
        return x - 1


def asserts(x):
    assert x.sum() > 0, "not positive"
    return x * 2


def collects(x):
    state = {"halves": [x], "count": 0}
    while state["halves"][-1].norm() > 1 and state["count"] < 5:
        state["halves"].append(state["halves"][-1] / 2)
        state["count"] += 1
    return state, (x, [x + 1])


def draws(x):
    own = torch.Generator().manual_seed(3)
    return x + np.random.rand() + random.random() + torch.rand(6) + torch.rand(6, generator=own)


def walks(x):
    def steps():
        for part in x.split(2):
            if part.sum() > 3:
                yield part * 2

    return [part + 1 for part in steps()]


CASES = [branches, sums_items, masks, catches, fails_in_torch, asserts, collects, draws, walks]

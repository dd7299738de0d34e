"""Optimal assignment, of distinct costs, so that the optimum is unique."""

import torch

from tutti.check.samples.sample import Draw, samples


@samples(torch.ops.tutti.linear_sum_assignment.default)
def assignment(d: Draw):
    return (d.floats(*d.shape(2, 2)), d.flag()), {}

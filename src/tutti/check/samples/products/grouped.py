"""Products of groups of rows, of columns, and of a contracted dim."""

import torch

from tutti.check.samples.sample import Draw, samples

F64 = torch.float64


@samples(torch.ops.tutti.grouped_mm.default)
def grouped_mm(d: Draw):
    rows, groups, k, n = *d.sizes(2, (2, 4, 6)), *d.sizes(2, (1, 2, 4))
    ends = d.integers(groups, below=rows + 1).sort()[0].to(d.pick([torch.int32, torch.int64]))
    shapes = d.pick([((rows, k), (groups, k, n)), ((k, rows), (rows, n)), ((groups, k, n), (n, rows))])
    return (*(d.floats(*shape, dtype=F64) for shape in shapes), ends, 0, groups), {}

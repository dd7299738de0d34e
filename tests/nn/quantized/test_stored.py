"""Copies that compilers keep: values, gradients through vmap, and the size of what is compiled."""

import torch

import tutti
from tutti.nn.quantized.stored import stored


def test_is_a_copy():
    x = torch.arange(6.0).view(2, 3).T
    copy = stored(x)
    assert torch.equal(copy, x) and copy.is_contiguous() and copy.data_ptr() != x.data_ptr()
    assert torch.equal(torch.vmap(stored, in_dims=1)(x), x.T)


def test_a_chain_that_reads_its_operand_twice_compiles_fast():
    """Without stored values Inductor writes out 2^40 operators."""

    def chain(x):
        for _ in range(40):
            x = stored(x ^ (x >> 3))
        return x

    x = torch.arange(5)
    assert torch.equal(tutti.function(chain, x, cluster="cpu:1", level="O2")(x), chain(x))

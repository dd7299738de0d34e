"""Attention in bfloat16 and its backward pass against float64, beside PyTorch's own; and where they are used."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.library import opcheck

import tutti
import zoo
from tutti import compat
from tutti.nn.attention import fused

ops = torch.ops.tutti


def drawn(heads, groups, queries, keys, width, causal=False, mask=None, scale=None, batch=2):
    """The arguments of the backward pass, whose operands lie as those of transformers do."""
    torch.manual_seed(0)
    shapes = [(heads, queries), (heads, queries), (groups, keys), (groups, keys)]
    grad, *qkv = (torch.randn(batch, n, h, width).bfloat16().transpose(1, 2) for h, n in shapes)
    how = {"attn_mask": mask, "scale": scale}
    return (grad, *qkv, *fused.FLASH(*qkv, 0.0, causal, **how), 0.0, causal), how


def of_forward(args, how):
    """The arguments of the forward pass."""
    return (*args[1:4], *args[6:]), how


def exact(args, how):
    """What attention gives, and its gradients."""
    grad, q, k, v, _, _, _, causal = args
    mask = how["attn_mask"]
    learned = [x.double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(
        *learned, None if mask is None else mask.double(), 0.0, causal, scale=how["scale"], enable_gqa=True
    )
    return out.detach(), torch.autograd.grad(out, learned, grad.double())


def hiding(*shape):
    """A mask that hides half of the keys."""
    return torch.zeros(shape).masked_fill(torch.rand(shape) < 0.5, -torch.inf)


def hiding_all(*shape):
    """A mask that hides half of the keys, and all of them from the last queries."""
    return torch.cat([hiding(*shape), hiding(*shape)[..., :2, :] - torch.inf], -2)


CASES = {
    "heads": dict(heads=3, groups=3, queries=70, keys=70, width=64),
    "causal": dict(heads=2, groups=2, queries=300, keys=300, width=64, causal=True),
    "groups": dict(heads=6, groups=2, queries=128, keys=128, width=32, causal=True),
    "few queries": dict(heads=2, groups=1, queries=33, keys=301, width=96, causal=True),
    "few keys": dict(heads=2, groups=2, queries=301, keys=33, width=32, causal=True),
    "one token": dict(heads=2, groups=2, queries=1, keys=530, width=128),
    "scale": dict(heads=2, groups=2, queries=40, keys=50, width=64, scale=0.3),
    "additive mask": dict(heads=2, groups=2, queries=70, keys=290, width=64, mask=torch.randn(70, 290)),
    "mask of padding": dict(heads=2, groups=1, queries=70, keys=70, width=32, mask=hiding(2, 1, 1, 70)),
    "hidden keys": dict(heads=2, groups=2, queries=70, keys=70, width=64, mask=hiding_all(2, 2, 68, 70).bfloat16()),
    "width 40": dict(heads=2, groups=2, queries=20, keys=20, width=40),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.starts
def test_as_exact_as_pytorch(name):
    args, how = drawn(**CASES[name])
    out, gradients = exact(args, how)
    forward, sums = of_forward(args, how)
    (first, lse), (same, lses) = (f(*forward, **sums) for f in (ops.attention, fused.FLASH))
    torch.testing.assert_close(lse, lses, rtol=1e-4, atol=1e-4)
    assert lse.stride() == lses.stride()
    ours, theirs = (f(*args, **how) for f in (ops.attention_backward, fused.FLASH_BACKWARD))
    for mine, other, wanted in zip((first, *ours), (same, *theirs), (out, *gradients), strict=True):
        assert (mine - wanted).norm() <= min(1.1 * (other - wanted).norm(), 0.005 * wanted.norm())
        assert mine.stride() == other.stride()


def test_bits_do_not_depend_on_threads():
    args, how = drawn(heads=4, groups=2, queries=100, keys=100, width=32, causal=True)
    forward, sums = of_forward(args, how)
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            runs.append((*ops.attention(*forward, **sums), *ops.attention_backward(*args, **how)))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *runs))


def test_many_keys_are_seen_block_by_block():
    """The largest score comes last, so that all before it fades."""
    q = torch.ones(1, 1, 65, 32).bfloat16()
    k = (torch.arange(600) / 100).bfloat16().view(1, 1, 600, 1).expand(1, 1, 600, 32).contiguous()
    v = torch.randn(1, 1, 600, 32).bfloat16()
    out, lse = ops.attention(q, k, v)
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert (out - wanted).norm() <= 0.005 * wanted.norm()
    scores = (q.double() @ k.double().mT) * 32**-0.5
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", range(3))
def test_what_is_not_a_number_is_seen(which):
    torch.manual_seed(0)
    qkv = [torch.randn(1, 2, 70, 64).bfloat16() for _ in range(3)]
    qkv[which][0, 0, 3, 5] = torch.nan
    (out, lse), (other, lses) = ops.attention(*qkv), fused.FLASH(*qkv)
    assert torch.equal(out.isnan(), other.isnan()) and torch.equal(lse.isnan(), lses.isnan())
    gradients = ops.attention_backward(torch.ones_like(out), *qkv, out, lse, 0.0, False)
    assert any(g.isnan().any() for g in gradients)


def test_operands_of_any_strides():
    args, _ = drawn(heads=2, groups=2, queries=20, keys=20, width=32)
    columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in args[:5]]
    odd = [torch.cat([x, x[..., :1]], -1)[..., :-1] for x in args[:5]]
    assert odd[0].stride()[2:] == (33, 1)
    for strange in (columns, odd):
        for a, b in zip(ops.attention_backward(*strange, *args[5:]), ops.attention_backward(*args), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(ops.attention(*strange[1:4], 0.0, False), ops.attention(*args[1:4]), strict=True):
            assert torch.equal(a, b)
    once = args[0][:, :, :1, :1].expand_as(args[0])  # as the gradient of a sum is
    theirs = fused.FLASH_BACKWARD(once.contiguous(), *args[1:])
    for a, b in zip(ops.attention_backward(once, *args[1:]), theirs, strict=True):
        torch.testing.assert_close(a, b, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("whose", ["ours", "pytorch"])
def test_registration(whose, monkeypatch):
    if whose == "pytorch":
        monkeypatch.setattr(fused, "_kernels", lambda: None)
    args, how = drawn(heads=2, groups=1, queries=8, keys=8, width=32)
    opcheck(ops.attention_backward.default, args, how)
    opcheck(ops.attention.default, *of_forward(args, how))
    opcheck(ops.attention.default, tuple(x.contiguous() for x in args[1:4]))


def test_what_pytorch_refuses_is_refused():
    q, k = torch.randn(1, 2, 5, 64).bfloat16(), torch.randn(1, 2, 5, 32).bfloat16()
    hides = torch.ones(5, 5, dtype=torch.bool)
    for operands, mask in (((q, q, q), hides), ((q, q, q), hides.double()), ((q, q, k), None), ((q, k, k), None)):
        with pytest.raises(RuntimeError):
            ops.attention(*operands, attn_mask=mask)


def test_queries_that_are_not_there_change_nothing():
    q, k, v = (torch.rand(1, 1, n, 64).bfloat16() for n in (3, 70, 70))
    k[0, 0, 3] = -torch.inf
    out, lse = fused.FLASH(q, k, v)
    for f in (ops.attention_backward, fused.FLASH_BACKWARD):
        _, gk, gv = f(torch.ones_like(out), q, k, v, out, lse, 0.0, False)
        assert not gk.isnan().any() and not gv.isnan().any()


@pytest.mark.starts
def test_a_step_of_whole_layers_in_bfloat16():
    torch.manual_seed(0)
    losses = []
    for level in ("O0", "O2"):
        config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
                                          intermediate_size=96, vocab_size=96)  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).bfloat16()
        step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), zoo.tokens(4), cluster="cpu:1",
                                 level=level)  # fmt: skip
        losses.append([step(zoo.tokens(4)).item() for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def graph_with(dtype, width):
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("grad", "q", "k", "v", "out", "lse")]
    for node in inputs:
        node.meta["val"] = torch.empty(1, 2, 8, width, dtype=dtype, device="meta")
    forward = graph.call_function(fused.FLASH, (*inputs[1:4], 0.0, True))
    graph.output((forward, graph.call_function(fused.FLASH_BACKWARD, (*inputs, 0.0, True))))
    return graph


@pytest.mark.parametrize(
    "dtype, width, fast, used",
    [(torch.bfloat16, 64, True, True), (torch.bfloat16, 40, True, False), (torch.float32, 64, True, False),
     (torch.bfloat16, 64, False, False)],
)  # fmt: skip
def test_of_graphs(monkeypatch, dtype, width, fast, used):
    monkeypatch.setattr(compat, "multiplies_bfloat16", lambda: fast)
    graph = graph_with(dtype, width)
    fused.use(graph)
    calls = [node.target for node in graph.nodes if node.op == "call_function"]
    ours, theirs = (ops.attention, ops.attention_backward), (fused.FLASH, fused.FLASH_BACKWARD)
    assert calls == ([x.default for x in ours] if used else list(theirs))

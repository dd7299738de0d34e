import pytest
import torch

from tutti.nn import adam

HYPER = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True, "maximize": False}
STEP = torch.tensor(3)
LR = torch.tensor(0.01, dtype=torch.float64)


def rows(shapes=((4, 6), (5,), (0, 3), ()), dtype=torch.float32, moments=2):
    torch.manual_seed(0)
    return [
        (
            torch.randn(s, dtype=dtype),
            torch.randn(s, dtype=dtype),
            *(torch.rand(s, dtype=dtype) for _ in range(moments)),
        )
        for s in shapes
    ]


def formula(param, grad, m, v, decoupled=True):
    """The docstring's formula in float64, at step 3 with HYPER."""
    param, grad, m, v = (t.double() for t in (param, grad, m, v))
    if decoupled:
        param = param - 0.01 * 0.1 * param
    else:
        grad = grad + 0.1 * param
    m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
    return param - 0.01 / (1 - 0.9**3) * m / (v.sqrt() / (1 - 0.99**3) ** 0.5 + 1e-8), m, v


@pytest.mark.parametrize("decoupled", [True, False])
def test_formula(decoupled):
    for param, grad, m, v in rows():
        before = [t.clone() for t in (param, grad, m, v)]
        new = torch.ops.tutti.adam(param, grad, m, v, STEP, LR, **{**HYPER, "decoupled": decoupled})
        for ours, exact in zip(new, formula(param, grad, m, v, decoupled), strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(before, (param, grad, m, v), strict=True))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize(
    "numbers", [(), (None, torch.tensor(0.3)), (torch.tensor(1.0), torch.tensor(torch.nan))], ids=str
)
@pytest.mark.parametrize("hyper", [{}, {"decoupled": False}, {"maximize": True}], ids=str)
def test_in_plain_aten(dtype, tolerance, numbers, hyper):
    for moments, forward in ((2, adam.forward), (3, adam.forward_amsgrad)):
        op = torch.ops.tutti.adam if moments == 2 else torch.ops.tutti.adam_amsgrad
        for row in rows(dtype=dtype, moments=moments):
            plain = forward(*row, STEP, LR, *numbers, **HYPER | hyper)
            exact = op(*row, STEP, LR, *numbers, **HYPER | hyper)
            torch.testing.assert_close(plain, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("moments", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_in_place_equals_functional(moments, dtype):
    table = rows(dtype=dtype, moments=moments)
    name = "adam" if moments == 2 else "adam_amsgrad"
    expected = [getattr(torch.ops.tutti, name)(*row, STEP, LR, **HYPER) for row in table]
    getattr(torch.ops.tutti, name + "_")(*(list(c) for c in zip(*table, strict=True)), STEP, LR, **HYPER)
    for row, new in zip(table, expected, strict=True):
        param, _, *state = row
        assert all(torch.equal(a, b) for a, b in zip((param, *state), new, strict=True))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_memory_order(which):
    """The fused kernels ignore strides; a transposed or holey tensor still gives the same numbers."""
    for respell in (lambda t: t.t().contiguous().t(), lambda t: torch.stack([t, t], -1)[..., 0]):
        [row] = rows(shapes=((4, 6),))
        expected = torch.ops.tutti.adam(*row, STEP, LR, **HYPER)
        odd = [respell(t) if i == which else t for i, t in enumerate(row)]
        for ours, exact in zip(torch.ops.tutti.adam(*odd, STEP, LR, **HYPER), expected, strict=True):
            assert torch.equal(ours, exact)
        torch.ops.tutti.adam_(*([t] for t in odd), STEP, LR, **HYPER)
        param, _, m, v = odd
        assert all(torch.equal(a, b) for a, b in zip((param, m, v), expected, strict=True))


@pytest.mark.parametrize("scale", [None, torch.tensor(0.3)])
def test_gradients_are_cast_and_scaled_in_pieces(monkeypatch, scale):
    monkeypatch.setitem(adam.PIECE, "cpu", 256)
    table = rows(shapes=((40, 16), (5,), (), (0, 3), (16, 16), (30,)))
    low = [(param, grad.bfloat16(), *state) for param, grad, *state in table]
    low[4] = tuple(t.t() for t in low[4])  # lies in another order
    wide = [
        (param.clone(), grad.float() * (1 if scale is None else scale), *(t.clone() for t in state))
        for param, grad, *state in low
    ]
    numbers = [[part.numel() for part, *_ in piece] for piece in adam._pieces(low, 256)]
    assert numbers == [[256], [256], [128, 5, 1, 0], [256], [30]]
    for those, factor in ((low, scale), (wide, None)):
        torch.ops.tutti.adam_(*(list(c) for c in zip(*those, strict=True)), STEP, LR, None, factor, **HYPER)
    for ours, exact in zip(low, wide, strict=True):
        for i in (0, 2, 3):
            torch.testing.assert_close(ours[i], exact[i], rtol=1e-6, atol=0)


def test_schemas_and_fakes_agree_with_the_kernels():
    [row] = rows(shapes=((4, 6),))
    torch.library.opcheck(torch.ops.tutti.adam, (*row, STEP, LR), HYPER)
    torch.library.opcheck(torch.ops.tutti.adam_, (*([t] for t in row), STEP, LR, None, torch.tensor(0.5)), HYPER)
    [row] = rows(shapes=((4, 6),), moments=3)
    torch.library.opcheck(torch.ops.tutti.adam_amsgrad, (*row, STEP, LR), HYPER)
    numbers = STEP, LR, None, torch.tensor(0.5)
    torch.library.opcheck(torch.ops.tutti.adam_amsgrad_, (*([t] for t in row), *numbers), HYPER)


def test_nothing_to_update():
    torch.ops.tutti.adam_([], [], [], [], STEP, LR, **HYPER)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_gradient_is_scaled_in_the_dtype_of_its_parameter(dtype):
    grad, scale = torch.randn(3, 5).to(dtype), torch.tensor(0.3, dtype=torch.float64)
    product = torch.empty(3, 5)
    adam._multiply(grad, scale, product)
    assert torch.equal(product, grad.float().mul_(scale))

"""Slots of experts with a capacity, against loops over groups, choices and tokens."""

import pytest
import torch

import tutti.nn.experts.slots  # noqa: F401

ops = torch.ops.tutti
GROUPS, TOKENS, CHOICES, EXPERTS, WIDTH = 3, 10, 2, 4, 5


def drawn(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(GROUPS, TOKENS, EXPERTS, generator=generator).topk(CHOICES).indices


def slots_by_hand(index, capacity):
    slot = torch.full_like(index, -1)
    for g in range(GROUPS):
        used = [0] * EXPERTS
        for j in range(CHOICES):
            for s in range(TOKENS):
                e = int(index[g, s, j])
                if used[e] < capacity:
                    slot[g, s, j] = e * capacity + used[e]
                used[e] += 1
    return slot


@pytest.mark.parametrize("capacity", [1, 3, 5, 20])
def test_first_choices_come_first(capacity):
    for seed in range(5):
        index = drawn(seed)
        slot = ops.slots(index, EXPERTS, capacity)
        assert torch.equal(slot, slots_by_hand(index, capacity))
        taken = slot[slot >= 0].view(-1)
        assert torch.equal(taken // capacity, index[slot >= 0])


def test_groups_do_not_know_of_one_another():
    index = drawn()
    assert torch.equal(ops.slots(index, EXPERTS, 3)[1:], ops.slots(index[1:], EXPERTS, 3))


def operands(capacity: int = 3):
    torch.manual_seed(0)
    slot = ops.slots(drawn(), EXPERTS, capacity)
    x = torch.randn(GROUPS, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    buffer = torch.randn(GROUPS, EXPERTS, capacity, WIDTH, dtype=torch.float64, requires_grad=True)
    return x, buffer, slot, torch.rand(slot.shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("weighted", [True, False])
def test_dispatch_and_combine_by_hand(weighted):
    x, buffer, slot, weight = operands()
    weight = weight if weighted else None
    sent, back = torch.zeros_like(buffer).flatten(1, 2), torch.zeros_like(x)
    for g, s, j in (slot >= 0).nonzero().tolist():
        row, w = int(slot[g, s, j]), 1 if weight is None else weight[g, s, j].item()
        sent[g, row] = w * x[g, s].detach()
        back[g, s] += w * buffer.flatten(1, 2)[g, row].detach()
    torch.testing.assert_close(ops.dispatch(x, slot, weight, EXPERTS, 3).flatten(1, 2).detach(), sent)
    torch.testing.assert_close(ops.combine(buffer, slot, weight).detach(), back)


def test_gradients():
    x, buffer, slot, weight = operands()
    check = torch.autograd.gradcheck
    assert check(lambda x, w: ops.dispatch(x, slot, w, EXPERTS, 3), (x, weight))
    assert check(lambda x: ops.dispatch(x, slot, None, EXPERTS, 3), (x,))
    assert check(lambda b, w: ops.combine(b, slot, w), (buffer, weight))
    assert check(lambda b: ops.combine(b, slot, None), (buffer,))


def test_some_experts_are_elsewhere():
    x, buffer, slot, weight = operands()
    whole = ops.dispatch(x, slot, weight, EXPERTS, 3)
    assert torch.equal(ops.dispatch(x, slot, weight, 2, 3, first=1), whole[:, 1:3])
    parts = [ops.combine(buffer[:, e : e + 1], slot, weight, first=e) for e in range(EXPERTS)]
    torch.testing.assert_close(sum(parts), ops.combine(buffer, slot, weight))
    products = [ops.slot_products(x, buffer[:, e : e + 2], slot, first=e) for e in (0, 2)]
    torch.testing.assert_close(sum(products), ops.slot_products(x, buffer, slot))


def test_schemas_and_fakes_agree_with_the_kernels():
    x, buffer, slot, weight = operands()
    torch.library.opcheck(ops.slots, (drawn(), EXPERTS, 3))
    torch.library.opcheck(ops.dispatch, (x, slot, weight, EXPERTS, 3))
    torch.library.opcheck(ops.combine, (buffer, slot, weight))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.slot_products, (x.detach(), buffer.detach(), slot), test_utils=checks)

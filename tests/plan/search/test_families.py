"""The named plans for a cluster: all that may win, and no others."""

from dataclasses import replace

from tutti.plan.pipeline.schedule import SPLIT
from tutti.plan.search.families import Limits, divisors, families
from tutti.plan.textbook import parse_name

LIMITS = Limits(devices=16, node=8, batch=64, counts=tuple(divisors(64)), depth=32, stages=34, experts=8,
                residuals=True, attention=True)  # fmt: skip
FAMILIES = list(families(LIMITS))


def test_all_devices_are_used_and_the_batch_divides():
    for book, count in FAMILIES:
        assert book.pipe.devices * book.dp * book.cp * book.ep * book.tp == 16
        assert 64 % (count * book.dp * book.ep) == 0


def test_what_experts_use_is_among_them():
    names = {str(book) for book, _ in FAMILIES}
    assert {"dp16xzero3", "pp4-interleaved4xdp2xtp2xzero1", "pp2xdp2xep4xzero1xrecompute", "dp2xep8xzero1"} <= names
    assert {"dp2xtp8xspxzero1", "pp4xdp2xtp2xspxzero1xrecompute-attention", "dp4xtp4xexperts8xzero1"} <= names
    assert all(parse_name(str(book), 16) == book for book, _ in FAMILIES)


def test_forms_that_a_model_lacks_are_not():
    others = families(replace(LIMITS, experts=0, residuals=False, attention=False))
    assert not any(book.sp or book.folded or book.again or book.ep > 1 for book, _ in others)


def test_what_never_wins_is_not():
    assert not any(book.recompute and book.pipe.schedule in SPLIT for book, _ in FAMILIES)
    assert not any(book.zero == 2 and count == 1 for book, count in FAMILIES)
    assert not any(book.cp > 1 for book, _ in FAMILIES)  # there is a sequence for every device

import numpy as np
import pytest

from tutti.data.order import Order

BLOCKS = np.cumsum([0, *[3, 7, 1, 5, 4, 4, 6, 2, 8, 5, 3, 9]])


@pytest.mark.parametrize("shuffle", ("rows", "blocks", None))
def test_every_row_once_an_epoch(shuffle):
    n = int(BLOCKS[-1])
    order = Order(n, (1, 2), shuffle, BLOCKS)
    rows = order.rows(np.arange(3 * n)).reshape(3, n)
    assert (np.sort(rows) == np.arange(n)).all()
    assert (rows[0] == rows[1]).all() == (shuffle is None)
    assert [order.rows(np.array([k]))[0] for k in (0, 70, n)] == [rows[0][0], rows.ravel()[70], rows[1][0]]


def test_blocks_stay_within_groups_of_eight():
    order = Order(int(BLOCKS[-1]), (5,), "blocks", BLOCKS)
    blocks = np.searchsorted(BLOCKS, order.rows(np.arange(int(BLOCKS[-1]))), side="right") - 1
    first = list(dict.fromkeys(blocks))
    sizes = np.diff(BLOCKS)
    assert set(blocks[: sum(sizes[b] for b in set(blocks[:5]))]) <= set(first[:8])
    assert len(set(blocks[: sum(sorted(sizes)[:4])])) > 1  # rows of several blocks, mixed
    edge = sum(sizes[list(dict.fromkeys(blocks))[:8]])
    assert not set(blocks[:edge]) & set(blocks[edge:])


def test_no_rows_and_no_blocks_are_errors():
    with pytest.raises(ValueError, match="a source without rows"):
        Order(0, (1,), "rows")
    with pytest.raises(ValueError, match="needs a source with blocks, such as Parquet"):
        Order(3, (1,), "blocks")

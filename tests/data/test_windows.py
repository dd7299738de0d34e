import numpy as np
import pytest

from tutti.data.windows import Windows


def test_windows_cover_the_tokens_without_the_rest():
    windows = Windows(np.arange(11, dtype=np.uint16), 4)
    assert [row["input_ids"].tolist() for row in windows] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_too_few_tokens_are_an_error():
    with pytest.raises(ValueError, match="3 tokens, fewer than a window of 4"):
        Windows(np.arange(3), 4)

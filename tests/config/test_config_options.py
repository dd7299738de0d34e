from functools import partial

import pytest

from tutti.config.options import call_verb, call_with_options, whole_lines

DOCSTRING = """Compute a sum
    of numbers.

    An example:

        tutti sum 1
        tutti sum 2

    - one
    - two

    Args:
        first: The first number, which is described
            by `several` lines
            (three).
        second: The second.

    Raises ValueError.
    """


def test_paragraphs_and_parameters_become_lines():
    assert whole_lines(DOCSTRING).splitlines() == [
        "Compute a sum of numbers.", "",
        "An example:", "",
        "    tutti sum 1",
        "    tutti sum 2", "",
        "- one", "- two", "",
        "Args:",
        "    first: The first number, which is described by `several` lines (three).",
        "    second: The second.", "",
        "Raises ValueError.",
    ]  # fmt: skip


def add(first: int, second: int = 2) -> int:
    return first + second


add.__doc__ = DOCSTRING


@pytest.mark.parametrize(
    ("function", "words"), [(add, ["--first", "3"]), (partial(add, 3), []), (partial(add, first=3), [])]
)
def test_a_function_is_called_with_options(function, words, capsys):
    assert call_with_options(function, "tutti sum", words) == 5
    with pytest.raises(SystemExit) as ended:
        call_with_options(function, "tutti sum", ["--help"])
    assert ended.value.code == 0 and "Compute a sum of numbers." in capsys.readouterr().out


def test_a_verb_is_called_with_options(capsys):
    assert call_verb({"sum": add, "again": add}, "tutti", "Sums.", ["sum", "--first", "1", "--second", "4"]) == 5
    for words, code in ((["sum", "--third", "1"], 2), (["product"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            call_verb({"sum": add, "again": add}, "tutti", "Sums.", words)
        assert ended.value.code == code


def listen(keys: tuple[str, ...] = (), port: int = 1) -> tuple[tuple[str, ...], int]:
    """Listen.

    Args:
        keys: Who may ask.
        port: Where.
    """
    return keys, port


@pytest.mark.parametrize("words", [["--keys"], ["--keys", "--port", "2"], ["--port", "2", "--keys"]])
def test_an_option_of_several_values_has_one(words):
    with pytest.raises(ValueError, match="--keys has no value; is a variable of the shell empty"):
        call_with_options(listen, "tutti listen", words)
    with pytest.raises(ValueError, match="--keys has no value"):
        call_verb({"listen": listen, "sum": add}, "tutti", "Servers.", ["listen", *words])
    with pytest.raises(SystemExit):
        call_with_options(listen, "tutti listen", [*words, "--help"])
    assert call_with_options(listen, "tutti listen", ["--keys", "a", "b", "--port", "2"]) == (("a", "b"), 2)

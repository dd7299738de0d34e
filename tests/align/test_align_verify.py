"""Rewards that check texts, and the sandbox that runs code: what they say of right, wrong and hostile completions."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tutti.align.rewards import sandbox, schema, verify
from tutti.align.rewards.sandbox import Limits, run
from tutti.align.rewards.scoring import Completed, Rewards


def _works(limits: Limits) -> bool:
    """Whether the sandbox works for this user on this system."""
    try:
        return run("pass", limits=limits).kind == "passed"
    except RuntimeError:
        return False


SHORT = Limits(seconds=2, cpu_seconds=1, memory_bytes=256 * 2**20, processes=8)
APART = pytest.mark.skipif(not _works(replace(SHORT, seconds=20)), reason="there are no user namespaces here")
WITHOUT = pytest.mark.skipif(
    not _works(replace(SHORT, seconds=20, namespaces=False)), reason="the user has rights of root"
)


def completed(texts, **columns):
    rows = [dict(zip(columns, x, strict=True)) for x in zip(*columns.values(), strict=True)] or [{}] * len(texts)
    return Completed(["?"] * len(texts), texts, [[1]] * len(texts), [[2] * len(str(x)) for x in texts], rows)


def test_exact_match():
    reward = verify.exact_match(extract=r"#### (.+?)$")
    texts = ["#### 1\n#### Two  words", "Two words", "#### two words"]
    assert Rewards(reward)(completed(texts, answer=["two words"] * 3)).flatten().tolist() == [0, 0, 1]
    boxed = verify.exact_match("right", extract=verify.boxed, normalize=verify.number)
    texts = [r"so \boxed{\frac{1}{2}}", r"\boxed{1} or \boxed{$1,200.50}", r"\boxed{1,200", r"\boxed{7}"]
    assert boxed(texts, right=[r"\frac{1}{2}", "1200.5", "1200", ["6", 7]]) == [1, 1, 0, 1]
    assert boxed(["a"], right=[None]) == [None]
    message = [{"role": "assistant", "content": " Yes "}]
    assert verify.exact_match()([message], answer=["yes"]) == [1]
    assert verify.exact_match(normalize=None)([message], answer=["yes"]) == [0]
    with pytest.raises(ValueError, match="no column answer; it has other"):
        verify.exact_match()(["a"], other=["b"])


@pytest.mark.parametrize(("text", "expected"), [("+007.50", "7.5"), ("-0.0", "0"), ("-.5", "-0.5"), ("3.", "3"),
                                                ("1e5", "1e5"), ("9" * 9999, "9" * 9999), ("-12%", "-12"),
                                                ("-1,234,567.8", "-1234567.8"), ("3,4", "3,4")])  # fmt: skip
def test_numbers(text, expected):
    assert verify.number(text) == expected


def test_regex_and_lengths():
    assert verify.regex(r"<think>.*</think>")(["a <think>\n</think>", "<think>"]) == [1, 0]
    assert verify.regex(r"\d+", full=True)(["12", "12 "]) == [1, 0]
    lengths = [[0] * n for n in (0, 6, 8, 10, 11)]
    assert verify.overlong(10, 4)(lengths) == [0, 0, -0.5, -1, -1]
    assert verify.length_penalty(0.5)(lengths)[1] == -3
    with pytest.raises(ValueError, match="expected 1 to 10"):
        verify.overlong(10, 11)
    names = Rewards([verify.regex("a"), verify.regex("b"), verify.overlong(10, 4), verify.unit_tests()]).names
    assert names == ["regex-0", "regex-1", "overlong", "unit_tests"]


POINT = {
    "$defs": {"number": {"type": "number", "minimum": 0, "exclusiveMaximum": 10}},
    "type": "object", "required": ["x"], "additionalProperties": False,
    "properties": {"x": {"$ref": "#/$defs/number"},
                   "name": {"type": ["string", "null"], "pattern": "^a", "maxLength": 3},
                   "more": {"type": "array", "prefixItems": [{"const": 1}], "items": {"enum": [True, "b", [2]]},
                            "minItems": 1, "uniqueItems": True}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"x": 1}', 1), ('{"x": 10}', 0), ('{"x": -1}', 0), ('{"x": true}', 0), ("{}", 0), ('{"x": 1, "y": 1}', 0),
        ('{"x": 0, "name": "abc"}', 1), ('{"x": 0, "name": null}', 1), ('{"x": 0, "name": "abcd"}', 0),
        ('{"x": 0, "name": "b"}', 0), ('{"x": 0, "more": [1.0, true, "b", [2]]}', 1), ('{"x": 0, "more": [true]}', 0),
        ('{"x": 0, "more": [1, 1]}', 0), ('{"x": 0, "more": [1, "b", "b"]}', 0), ('{"x": 0, "more": []}', 0),
        ('Here:\n```json\n{"x": 2.5}\n```\nDone.', 1), ('{"x": NaN}', 0), ("[" * 100_000, 0), ("1" * 10_000, 0),
        ('{"x": 1}{', 0), ("", 0),
    ],
)  # fmt: skip
def test_json_schema(text, right):
    assert verify.json_schema(POINT)([text]) == [right]


def test_schemas_combine_and_others_are_refused():
    even = {"type": "integer", "multipleOf": 2}
    assert [schema.fits(x, {"anyOf": [even, {"type": "string"}]}) for x in (2, 2.0, 3, "a")] == [1, 1, 0, 1]
    assert [schema.fits(x, {"oneOf": [even, {"minimum": 3}]}) for x in (2, 4, 5)] == [1, 0, 1]
    assert [schema.fits(x, {"allOf": [even], "not": {"const": 4}}) for x in (2, 4)] == [1, 0]
    of_rows = ['{"type": "integer"}', {"type": "integer"}, None]
    assert verify.json_schema(column="of")(["1", '"a"', "1"], of=of_rows) == [1, 0, None]
    for wrong, message in (({"if": {}}, "has if at #"), ({"properties": {"a": {"type": "int"}}}, "#/properties/a"),
                           ({"$ref": "#/a"}, "is to nothing"), ({"items": 3}, "expected an object")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            verify.json_schema(wrong)


FORKS = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
HOG = "kept = []\nwhile True:\n    kept.append(bytearray(10**6))"
HOSTILE = {
    "passes": ("def f(x):\n    return x + 1", "passed"),
    "wrong": ("def f(x):\n    return x", "failed"),
    "no code": ("def f(", "error"),
    "raises": ("raise KeyError('a')", "error"),
    "exits": ("import sys; sys.exit(0)", "error"),
    "exits at once": ("import os; os._exit(0)", "error"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "error"),
    "recurses": ("def g(): g()\ng()", "error"),
    "computes forever": ("while True: pass", "timeout"),
    "sleeps": ("import time; time.sleep(99)", "timeout"),
    "prints forever": ("while True: print('x' * 1000)", "timeout"),
    "takes memory": (HOG, "memory"),
    "takes memory at once": ("x = [0] * 10**10", "memory"),
    "forks forever": (FORKS, "timeout"),
    "fills the disk": ("open('x', 'wb').write(bytes(10**8))", "error"),
    "ends its group": ("import os; os.killpg(0, 9)", "error"),
    "sits on its tests": ("def f(x):\n    while True: pass", "timeout"),
}


@APART
@pytest.mark.parametrize("kind", HOSTILE)
def test_code_that_means_harm_does_none(kind):
    code, expected = HOSTILE[kind]
    begin = time.monotonic()
    patient = replace(SHORT, seconds=20, cpu_seconds=20)  # the machine may be busy while memory is taken
    outcome = run(code, ["assert f(1) == 2"], patient if expected == "memory" else SHORT)
    assert outcome.kinds == [expected], outcome
    assert time.monotonic() - begin < 30 and len(outcome.output) <= SHORT.output_bytes


@APART
def test_what_code_finds(tmp_path):
    """An empty environment and folder, which are gone afterwards."""
    os.environ["A_SECRET"] = "1"
    try:
        trial = run("import os, sys\nprint(os.getcwd()); print(os.listdir('.'), sorted(os.environ), sys.stdin.read())\n"
                    "open('a', 'w').write('b')", ["assert open('a').read() == 'b'"])  # fmt: skip
    finally:
        del os.environ["A_SECRET"]
    folder, rest = trial.output.split("\n", 1)
    assert trial.kind == "passed" and not Path(folder).exists()
    assert rest in ("[] ['LC_CTYPE'] \n", "[] [] \n")


def test_namespaces(tmp_path):
    target = tmp_path / "written"
    outcome = run(f"open({str(target)!r}, 'w').write('x')", limits=SHORT)
    if not outcome.isolated:
        pytest.skip("this system allows no user namespaces")
    assert outcome.kind == "error" and not target.exists()
    network = run("import socket\nsocket.create_connection(('127.0.0.1', 1), 1)", limits=SHORT)
    assert "unreachable" in network.output
    assert run("import os\nassert os.getpid() == 1 and os.getppid() == 0", limits=SHORT).kind == "passed"
    code = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(98.76543)"
    assert run(code, limits=SHORT).kind == "passed" and not sleepers("98.76543")
    assert run("import threading as t\nx = t.Thread(target=print)\nx.start(); x.join()", limits=SHORT).kind == "passed"


def sleepers(marker):
    """Processes whose command has a marker."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in path.read_text() and int(path.parent.name) != os.getpid():
                pids.append(path.parent.name)
        except OSError:
            continue
    return pids


@WITHOUT
@pytest.mark.parametrize("kind", ["passes", "takes memory", "forks forever", "sleeps", "ends its group"])
def test_without_namespaces(kind):
    """Limits hold, and code can begin no process."""
    code, expected = HOSTILE[kind]
    limits = Limits(seconds=2, cpu_seconds=1, memory_bytes=256 * 2**20, namespaces=False)
    patient = replace(limits, seconds=20, cpu_seconds=20) if expected == "memory" else limits
    assert run(code, ["assert f(1) == 2"], patient).kinds == [expected]
    assert "Errno 11" in run("import os; os.fork()", limits=limits).output
    watcher = run("import os; os.kill(os.getppid(), 9)", ["pass", "pass"], limits)
    assert watcher.kinds in (["error"] * 2, ["passed"] * 2)


@APART
def test_unit_tests():
    patient = replace(SHORT, seconds=20, cpu_seconds=20)  # the machine may be busy; a second of its time is enough
    good, bad = "Sure:\n```python\ndef f(x): return 2 * x\n```\nas\n```bash\nls\n```", "```\ndef f(x): return 4\n```"
    tests = ["assert f(2) == 4", "assert f(3) == 6"]
    reward = verify.unit_tests(limits=patient)
    assert reward([good, bad, good, ""], tests=[tests, tests, None, tests]) == [1, 0, None, 0]
    assert reward.counts == {"passed": 1, "failed": 1, "error": 1}
    assert reward.measures()["unit_tests/passed"] == pytest.approx(1 / 3)
    assert reward.outcomes[1] is not None and reward.outcomes[1].kinds == ["passed", "failed"]
    share = verify.unit_tests(partial=True, limits=patient)
    hangs = "def f(x):\n    while x == 3: pass\n    return 4"
    rewards = Rewards([verify.regex("def"), share])
    assert rewards(completed([bad, hangs], tests=[tests, tests])).tolist() == [[1, 0.5], [1, 0.5]]
    assert rewards.measures()["rewards/unit_tests/timeout"] == 0.5
    with pytest.raises(ValueError, match="seconds is 0"):
        Limits(seconds=0)
    assert set(reward.counts) <= set(sandbox.KINDS)

"""The accounts of a corpus as a table, JSON and a page with pictures."""

from __future__ import annotations

import html
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tutti.data.corpus.accounts import Account
from tutti.data.corpus.files import atomic, write_json


def write_report(out: Path, accounts: list[Account], faults: list[dict[str, str]], domains: dict[str, int]) -> None:
    """Write `report.json` and `report.html` into a folder."""
    write_json(out / "report.json", {"steps": [asdict(a) for a in accounts], "faults": faults, "domains": domains})
    with atomic(out / "report.html") as file:
        file.write(page(accounts, faults, domains).encode())


def rows(accounts: list[Account]) -> list[tuple[str, ...]]:
    """A table: for each step documents and bytes in and out, what was dropped by reason, what was cut."""
    lines = []
    for a in accounts:
        reasons = sorted(a.dropped.items(), key=lambda x: -x[1][0])
        why = ", ".join(f"{reason} {count:,}" for reason, (count, _) in reasons) or "-"
        cut = ", ".join(f"{reason} {count:,}" for reason, (count, _) in sorted(a.cut.items(), key=lambda x: -x[1][1]))
        lines.append(
            (
                a.step,
                f"{a.documents_in:,}",
                f"{a.documents_out:,}",
                amount(a.bytes_in),
                amount(a.bytes_out),
                why,
                cut or "-",
            )
        )
    return lines


HEAD = ("step", "documents in", "out", "bytes in", "out", "dropped", "cut out of documents")


def amount(size: int) -> str:
    """Bytes with a unit: 1.2 MB."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


_STYLE = """
:root { color-scheme: light dark; --bar: #3566a8; --lost: #c4572f; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .3rem .6rem; border-bottom: 1px
solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bar { height: .8rem; background: var(--bar); } .bar.lost { background: var(--lost); } .track { width: 18rem;
max-width: 30vw; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .5rem; margin: .2rem 0; max-height:
9rem; overflow: auto; } summary { cursor: pointer; }
"""


def page(accounts: list[Account], faults: list[dict[str, str]], domains: dict[str, int]) -> str:
    """One HTML page without scripts or other files."""
    first, last = accounts[0], accounts[-1]
    share = last.bytes_out / first.bytes_in if first.bytes_in else 0
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Corpus report</title><style>{_STYLE}</style><h1>Corpus report</h1>",
        f"<p>{first.documents_in:,} records with {amount(first.bytes_in)} became {last.documents_out:,} documents with "
        f"{amount(last.bytes_out)}: {share:.1%} of the bytes.</p>",
        "<h2>What is left after each step</h2>", _funnel(accounts),
        "<h2>Why documents were dropped</h2>", _reasons(accounts),
    ]  # fmt: skip
    if any(a.cut for a in accounts):
        parts += ["<h2>What was cut out of documents that stay</h2>", _cut(accounts)]
    parts += ["<h2>Domains</h2>", _domains(domains)]
    if faults:
        parts += ["<h2>Faults of files</h2>", _table(("file", "fault", "detail"), [tuple(f.values()) for f in faults])]
    parts += ["<h2>Samples of what was dropped</h2>", *(_samples(a) for a in accounts if a.samples)]
    return "\n".join(parts)


def _bar(fraction: float, kind: str = "") -> str:
    return f"<div class=track><div class='bar {kind}' style='width:{100 * min(max(fraction, 0), 1):.2f}%'></div></div>"


def _funnel(accounts: list[Account]) -> str:
    whole = max(accounts[0].bytes_in, 1)
    time = sum(a.seconds for a in accounts)
    lines = []
    for a in accounts:
        lines.append(
            (a.step, f"{a.documents_in:,}", f"{a.documents_out:,}", amount(a.bytes_in), amount(a.bytes_out),
             _Raw(_bar(a.bytes_out / whole)), f"{a.seconds / time:.0%}" if time else "")
        )  # fmt: skip
    return _table(
        ("step", "documents in", "out", "bytes in", "out", "bytes left", "of the time"), lines, numbers=(1, 2, 3, 4, 6)
    )


def _reasons(accounts: list[Account]) -> str:
    whole = max(accounts[0].documents_in, 1)
    lines = [
        (a.step, reason, f"{count:,}", amount(size), f"{count / whole:.2%}", _Raw(_bar(count / whole, "lost")))
        for a in accounts
        for reason, (count, size) in sorted(a.dropped.items(), key=lambda x: -x[1][0])
    ]
    return _table(("step", "reason", "documents", "bytes", "of all", ""), lines, numbers=(2, 3, 4))


def _cut(accounts: list[Account]) -> str:
    lines = [(a.step, reason, f"{count:,}", amount(size)) for a in accounts for reason, (count, size) in a.cut.items()]
    return _table(("step", "what", "parts", "bytes"), lines, numbers=(2, 3))


def _domains(domains: dict[str, int]) -> str:
    whole = max(sum(domains.values()), 1)
    lines = [(d, amount(size), f"{size / whole:.1%}", _Raw(_bar(size / whole))) for d, size in domains.items()]
    return _table(("domain", "bytes", "share", ""), lines, numbers=(1, 2))


def _samples(account: Account) -> str:
    blocks = []
    for reason, samples in account.samples.items():
        items = "".join(
            f"<p>{_text(s['id'])}{': ' + _text(s['detail']) if s['detail'] else ''} ({amount(s['size'])})</p>"
            f"<pre>{_text(s['sample'])}</pre>"
            for s in samples
        )
        blocks.append(f"<details><summary>{_text(account.step)}: {_text(reason)}</summary>{items}</details>")
    return "".join(blocks)


class _Raw(str):
    """HTML that is not escaped."""


def _table(head: tuple[str, ...], lines: list[Any], numbers: tuple[int, ...] = ()) -> str:
    def cells(tag: str, line: Any) -> str:
        return "".join(
            f"<{tag}{' class=n' if k in numbers else ''}>{x if isinstance(x, _Raw) else _text(x)}</{tag}>"
            for k, x in enumerate(line)
        )

    body = "".join(f"<tr>{cells('td', line)}</tr>" for line in lines)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"


def _text(value: Any) -> str:
    return html.escape(str(value))

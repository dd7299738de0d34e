"""The report of a run in Markdown."""

from __future__ import annotations

from typing import Any

HEAD = """# Peptides: {name}

Peptides are sampled from a language model and judged by formulas and a statistical oracle. Nothing was measured on real
peptides, and no statement about biological activity, safety or use follows.

![losses, properties and calibration](peptides.png)

"""


def markdown(name: str, report: dict[str, Any]) -> str:
    """The tables of a report, as `command.run` makes it."""
    data, perplexity = report["data"], report["perplexity"]
    parts = [HEAD.format(name=name), "## Data\n", _table(("part", "peptides", "clusters"), data["parts"])]
    parts += [f"- {note}\n" for note in data["notes"]]
    parts.append(f"\nClusters hold peptides of {data['identity']:.0%} identity and more. The identity of a held-out and"
                 f" a training peptide is at most {data['largest identity']:.2f}.\n")  # fmt: skip
    parts += ["\n## Perplexity of held-out peptides\n", _table(("model", "perplexity"), perplexity.items())]
    if oracle := report.get("oracle"):
        rows = [(key, value) for key, value in oracle.items() if key != "bins"]
        parts += ["\n## Oracle\n", "It learned from peptides that the generator did not see.\n\n",
                  _table(("held out", "value"), rows)]  # fmt: skip
    columns = list(dict.fromkeys(key for row in report["sets"].values() for key in row))
    rows = [(name, *(row.get(key) for key in columns)) for name, row in report["sets"].items()]
    parts += ["\n## Samples\n", _table(("set", *columns), rows)]
    parts.append("\n## Conditions\n")
    for target, entry in report["targets"].items():
        parts.append(f"\n**{target}**: {entry['asked']}\n\n")
        rows = [(kind, x["rate"], x["plain rate"], x["ratio"], _interval(x["interval"]), _interval(x["difference"]))
                for kind, x in entry["hits"].items()]  # fmt: skip
        parts.append(
            _table(("samples", "hits", "hits unconditioned", "ratio", "95 % interval", "difference, 95 %"), rows)
        )
        if shift := entry.get("predicted shift"):
            rows = [(kind, x["shift"], _interval(x["interval"])) for kind, x in shift.items()]
            parts += ["\n", _table(("samples", "shift of the mean prediction", "95 % interval"), rows)]
    if report["label"]:
        parts.append(f"\nWhere a condition is on {report['label']}, a hit is what the oracle predicts; one outside"
                     " of its domain is no hit.\n")  # fmt: skip
    return "".join(parts)


def _interval(ends: list[float | None]) -> str:
    return " to ".join("unbounded" if x is None else f"{x:.3g}" for x in ends)


def _cell(x: Any) -> str:
    if x is None:
        return ""
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"

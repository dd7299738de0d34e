"""Peptides with asked properties: the runs of `tutti peptides`, over seeds, strengths of guidance and splits.

    python benchmarks/peptides.py [--quick]

The grammar (runs/peptides.toml) is run with three seeds of data, splits, weights and samples; numbers are means over
them. One model is then sampled with other strengths of guidance. Antimicrobial peptides (runs/peptides_modlamp.toml)
are run once, and once more with a split of single peptides instead of clusters, which says how much near-copies
flatter. All numbers are of held-out peptides, or of 1,000 samples a set.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import harness
from tutti.science.peptides.command import Run
from tutti.science.peptides.config import PeptidesConfig

RUNS = Path(__file__).parents[1] / "runs"
SEEDS, GUIDANCE = 3, (1.5, 2.0)


def measured(config: PeptidesConfig, folder: Path, quick: bool) -> dict[str, Any]:
    """The report of a run; quick ones learn and sample little."""
    if quick:
        config = replace(config, training=replace(config.training, steps=60),
                         sampling=replace(config.sampling, count=100))  # fmt: skip
    folder.mkdir(exist_ok=True)
    return Run(config, RUNS / "peptides.toml", folder).run()


def row(report: dict[str, Any], target: str) -> dict[str, Any]:
    """What is told of a run, and of its first target."""
    plain, asked = report["sets"]["unconditioned"], report["sets"][target]
    entry = report["targets"][target]
    hits, shift = entry["hits"], entry["predicted shift"]
    return {
        "perplexity": report["perplexity"],
        "oracle": {key: report["oracle"][key] for key in ("ROC-AUC", "MCC", "calibration error")},
        "unconditioned": {key: plain[key] for key in ("validity", "uniqueness", "novelty", "near copies", "diversity")},
        "conditioned": {key: asked[key] for key in ("validity", "uniqueness", "novelty", "near copies", "diversity")},
        "hits": {
            "unconditioned": hits["conditioned"]["plain rate"],
            **{kind: x["rate"] for kind, x in hits.items()},
        },
        "shift": {kind: x["shift"] for kind, x in shift.items()},
        "identity": report["data"]["largest identity"],
    }


def mean(rows: list[Any]) -> Any:
    """The mean of numbers in equal nested tables."""
    if isinstance(rows[0], dict):
        return {key: mean([x[key] for x in rows]) for key in rows[0]}
    return statistics.mean(rows)


def grammar(folder: Path, quick: bool) -> dict[str, Any]:
    config = PeptidesConfig.load(RUNS / "peptides.toml")
    target, rows = config.targets[0].name, []
    for seed in range(1 if quick else SEEDS):
        seeded = replace(config, data=replace(config.data, seed=seed), training=replace(config.training, seed=seed),
                         sampling=replace(config.sampling, seed=seed))  # fmt: skip
        rows.append(row(measured(seeded, folder / f"grammar-{seed}", quick), target))
        harness.say(f"grammar, seed {seed}: {rows[-1]['perplexity']}, {rows[-1]['hits']}")
    guided = {}
    for guidance in GUIDANCE:
        (folder / "grammar-0" / "samples.json").unlink()
        other = replace(config, sampling=replace(config.sampling, guidance=guidance))
        x = row(measured(other, folder / "grammar-0", quick), target)
        guided[f"{guidance:g}"] = {"hits": x["hits"]["conditioned"], "validity": x["conditioned"]["validity"],
                                   "diversity": x["conditioned"]["diversity"]}  # fmt: skip
        harness.say(f"guidance {guidance}: {guided[f'{guidance:g}']}")
    return {"seeds": len(rows), "mean": mean(rows), "guidance": guided}


def modlamp(folder: Path, quick: bool) -> dict[str, Any]:
    config = PeptidesConfig.load(RUNS / "peptides_modlamp.toml")
    parts = {}
    for name, identity in {"clusters": config.data.identity, "single peptides": 0.999}.items():
        split = replace(config, data=replace(config.data, identity=identity))
        parts[name] = row(measured(split, folder / f"modlamp-{identity}", quick), config.targets[1].name)
        harness.say(f"modlamp, {name}: {parts[name]}")
    return parts


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    python = harness.environment_of("modlamp", ["modlamp==4.3.3"])
    sys.path += map(str, (python.parents[1] / "lib").glob("python*/site-packages"))  # its data files are read
    with tempfile.TemporaryDirectory() as name:
        return {"grammar": grammar(Path(name), quick), "modlamp": modlamp(Path(name), quick)}


if __name__ == "__main__":
    harness.main(run, __file__, ("rapidfuzz", "transformers"))

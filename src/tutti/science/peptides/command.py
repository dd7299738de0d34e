"""The work of `tutti peptides`: data, oracle, training, samples and their report, stage by stage.

What a stage wrote into the folder is not computed again, so that the same command goes on where it was interrupted.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tutti.launch.launch import world_size
from tutti.launch.progress import progress
from tutti.science.folder import differing, note
from tutti.science.peptides import evaluate, figures, grammar, ngrams, scores
from tutti.science.peptides.conditions import OPEN, Conditions
from tutti.science.peptides.config import PeptidesConfig
from tutti.science.peptides.data import Peptides, fasta, table
from tutti.science.peptides.generator import Generator, Row, Training
from tutti.science.peptides.oracle import Oracle, Prediction
from tutti.science.peptides.properties import PROPERTIES, properties
from tutti.science.peptides.report import markdown
from tutti.science.peptides.similarity import clusters, nearest, split
from tutti.whole_files import write_text

CONSOLE = Console(highlight=False, soft_wrap=True)
PARTS = ("train", "oracle", "validation", "held out")
LEAST = 100  # peptides
LATER = ("targets", "fine_tuning", "sampling")  # sections that leave the model and the oracle as they are


def run(path: Path, out: str = "") -> None:
    """Run the config in a folder, by default out/peptides/NAME. What the folder has is not computed again.

    Other targets, fine-tuning or sampling use the folder's model. Raises ValueError for a folder with the run of
    another config or other data.
    """
    if world_size() > 1:
        raise ValueError("tutti peptides runs in one process; training.cluster and training.plan divide its training")
    config = PeptidesConfig.load(path)
    folder = Path(out) if out else Path("out/peptides") / path.stem
    folder.mkdir(parents=True, exist_ok=True)
    differ = _differing(config, folder)
    stages = Run(config, path, folder)
    if differ:
        CONSOLE.print(f"{folder}: another {', '.join(differ)}; the trained model stays")
        for name in ("fine_tuned", "fine_tuning"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("samples.json", "report.json", "fine_tuned.json"):
            (folder / name).unlink(missing_ok=True)
    note(asdict(config), folder / "config.json")
    if (folder / "report.json").exists():
        CONSOLE.print(f"{folder}: the run is complete; its report is {folder / 'report.md'}")
        return
    stages.run()
    CONSOLE.print(f"wrote {', '.join(sorted(p.name for p in folder.iterdir() if p.is_file()))} in {folder}")


def _begun(folder: Path) -> bool:
    return any((folder / x).exists() for x in ("oracle", "training", "model"))


def _differing(config: PeptidesConfig, folder: Path) -> list[str]:
    """Keys of later stages in which the folder's run has another config. Raises ValueError for other keys."""
    differ = differing(asdict(config), folder / "config.json") if _begun(folder) else []
    if other := [x for x in differ if x.partition(".")[0] not in LATER]:
        raise ValueError(f"{folder} has a run with another {', '.join(other)}; choose another folder by --out, or"
                         " remove it")  # fmt: skip
    return differ


class Run:
    """The stages of a run."""

    def __init__(self, config: PeptidesConfig, path: Path, folder: Path):
        self.config, self.folder, self.name, data = config, folder, path.stem, config.data
        self.peptides = config.peptides(path.parent)
        if len(self.peptides) < LEAST:
            sizes = f"{data.shortest} to {data.longest} residues"
            raise ValueError(f"{path}: {data.source} has {len(self.peptides)} peptides of {sizes}; {LEAST} are the"
                             " least")  # fmt: skip
        self.groups = clusters(self.peptides.sequences, data.identity)
        fractions = (data.oracle, data.validation, data.held_out)
        self.rows = dict(zip(PARTS, split(self.groups, fractions, data.seed), strict=True))
        self._note_data()
        self.parts = {part: self.peptides.take(rows) for part, rows in self.rows.items()}
        train = self.parts["train"]
        choice = {k: x if isinstance(x, int) else tuple(x) for k, x in config.condition.bins.items()}
        self.conditions = Conditions.fit(self._values(train), choice)
        self.targets = {x.name: self.conditions.target(x.bins) for x in config.targets}
        CONSOLE.print(
            f"{len(self.peptides):,} peptides: " + ", ".join(f"{len(x):,} {p}" for p, x in self.parts.items())
        )

    def _note_data(self) -> None:
        """Write the fingerprint of the data. Raises ValueError if the folder has the run of other data."""
        path, text = self.folder / "data.json", sha256()
        for part in (self.peptides.sequences, {k: x.tolist() for k, x in self.peptides.values.items()}):
            text.update(json.dumps(part).encode())
        fingerprint = json.dumps({"peptides": len(self.peptides), "sha256": text.hexdigest()}) + "\n"
        if _begun(self.folder) and path.exists() and path.read_text() != fingerprint:
            raise ValueError(f"{self.config.data.source} has changed since the run in {self.folder} began; choose"
                             " another folder by --out, or remove it")  # fmt: skip
        write_text(path, fingerprint)

    def _values(self, peptides: Peptides) -> dict[str, np.ndarray]:
        return properties(peptides.sequences) | peptides.values

    def run(self) -> dict[str, Any]:
        """All stages. Returns the report."""
        oracle = self._oracle()
        generator = self._trained()
        samples, losses = self._samples(generator), self._losses("model")
        if self.config.fine_tuning.steps:
            losses["fine-tuning"] = self._losses("fine_tuned")["training"]
        report, values = self._measure(generator, oracle, samples)
        shown = {name: x for name, x in values.items() if name in self.conditions.edges}
        figures.draw(self.folder / "peptides.png", losses, shown, self.conditions.edges, report.get("oracle", {}))
        write_text(self.folder / "report.md", markdown(self.name, report))
        write_text(self.folder / "report.json", json.dumps(report, indent=1) + "\n")
        self._say(report)
        return report

    # --- stages ---

    def _oracle(self) -> Oracle | None:
        part, label = self.parts["oracle"], self.config.data.label
        if not label:
            return None
        if (self.folder / "oracle" / "oracle.json").exists():
            return Oracle.load(self.folder / "oracle")
        with progress("oracle"):
            oracle = Oracle.fit(part.sequences, part.values[label], self.groups[self.rows["oracle"]],
                                self.config.data.seed)  # fmt: skip
        oracle.save(self.folder / "oracle")
        return oracle

    def _trained(self) -> Generator:
        """The generator, trained on the training peptides, their conditions in front."""
        sizes, train = self.config.model, self.parts["train"]
        if (self.folder / "model.json").exists():
            return Generator.load(self.folder / "model")
        options, longest = self.config.training, max(map(len, self.peptides.sequences))
        generator = Generator.create(self.conditions, longest, sizes.width, sizes.layers, sizes.heads, sizes.dropout,
                                     options.seed)  # fmt: skip
        rows, validation = (
            generator.rows(part.sequences, self.conditions.bins(self._values(part)), seed=options.seed)
            for part in (train, self.parts["validation"])
        )
        self._train(generator, rows, options, "model", "training", validation)
        return generator

    def _fine_tuned(self) -> Generator:
        """The model, trained further without conditions on the peptides that come nearest to the first target."""
        if (self.folder / "fine_tuned.json").exists():
            return Generator.load(self.folder / "fine_tuned")
        generator = Generator.load(self.folder / "model")
        train, fine = self.parts["train"], self.config.fine_tuning
        closeness = _closeness(self.conditions, next(iter(self.targets.values())), self._values(train))
        best = train.take(np.argsort(-closeness, kind="stable")[: max(1, round(fine.best * len(train)))])
        rows = generator.rows(best.sequences, np.full((len(best), len(self.conditions.edges)), OPEN), drop=False)
        training = replace(self.config.training, steps=fine.steps, learning_rate=fine.learning_rate)
        self._train(generator, rows, training, "fine_tuned", "fine_tuning")
        return generator

    def _train(self, generator: Generator, rows: list[Row], training: Training, name: str, checkpoints: str,
               validation: list[Row] | None = None) -> None:  # fmt: skip
        what = checkpoints.replace("_", "-")
        losses = generator.train(rows, self.folder / checkpoints, training, what, validation)
        generator.save(self.folder / name)
        write_text(self.folder / f"{name}.json", json.dumps(losses) + "\n")
        shutil.rmtree(self.folder / checkpoints)
        best = min((loss, step) for step, loss in losses["validation"]) if validation else None
        chosen = f"; the best validation loss, {best[0]:.3f}, is that of step {best[1]:,}" if best else ""
        CONSOLE.print(f"{what}: {training.steps:,} steps, loss {losses['training'][-1][1]:.3f}{chosen}")

    def _losses(self, name: str) -> dict[str, list[tuple[int, float]]]:
        return json.loads((self.folder / f"{name}.json").read_text())

    def _samples(self, generator: Generator) -> dict[str, list[str]]:
        """Set -> samples, "" for those that are no peptides."""
        path, options = self.folder / "samples.json", self.config.sampling
        if path.exists():
            return json.loads(path.read_text())
        samples: dict[str, list[str]] = {}

        def draw(name: str, model: Generator, asked: dict[str, int], guidance: float = 1.0) -> None:
            seed = options.seed + 1000 * len(samples)
            with progress(f"samples: {name}"):
                samples[name] = model.sample(asked, options.count, seed, options.temperature, options.top_k, guidance)

        draw("unconditioned", generator, {})
        for target in self.config.targets:
            draw(target.name, generator, target.bins, options.guidance)
        if self.config.fine_tuning.steps:
            draw("fine-tuned", self._fine_tuned(), {})
        write_text(path, json.dumps(samples) + "\n")
        return samples

    # --- measures ---

    def _measure(self, generator: Generator, oracle: Oracle | None,
                 samples: dict[str, list[str]]) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:  # fmt: skip
        """The report, and property -> set -> values."""
        train, held_out, label = self.parts["train"], self.parts["held out"], self.config.data.label
        bins = self.conditions.bins(self._values(held_out))
        report: dict[str, Any] = {
            "data": self._data(),
            "label": label,
            "perplexity": {
                "language model": generator.perplexity(held_out.sequences, np.full_like(bins, OPEN)),
                "language model, conditions given": generator.perplexity(held_out.sequences, bins),
                **{name: ngrams.perplexity(n, train.sequences, held_out.sequences)
                   for n, name in enumerate(("unigram", "bigram", "trigram"), 1)},
            },
        }  # fmt: skip
        if self.config.data.source == "grammar":
            report["perplexity"]["the grammar itself"] = grammar.perplexity(held_out.sequences)
        if oracle:
            prediction = oracle.predict(held_out.sequences)
            report["oracle"] = scores.assess(prediction, held_out.values[label], oracle.binary)
        sizes = [len(x) for x in train.sequences]
        lengths = (min(sizes), max(sizes))
        sets = {"held out": list(held_out.sequences), **samples}
        valid = {name: [x for x in peptides if lengths[0] <= len(x) <= lengths[1]] for name, peptides in sets.items()}
        values: dict[str, dict[str, np.ndarray]] = {name: {} for name in (*PROPERTIES, *([label] if label else []))}
        predictions: dict[str, Prediction] = {}
        report["sets"] = {}
        for name, peptides in sets.items():
            with progress(f"measures of {name}"):
                row: dict[str, Any] = evaluate.assess(peptides, train.sequences, held_out.sequences, lengths)
            for key, x in properties(valid[name]).items():
                values[key][name] = x
                if key in self.conditions.edges and len(x):
                    row[f"mean {key}"] = float(x.mean())
            if oracle:
                predictions[name] = prediction = oracle.predict(valid[name])
                values[label][name] = prediction.mean
                row |= {"inside of the oracle's domain": float(prediction.inside.mean()) if len(valid[name]) else None,
                        f"predicted {label}": _mean(prediction.mean)}  # fmt: skip
            report["sets"][name] = row
        report["targets"] = {name: self._target(name, samples, values, predictions) for name in self.targets}
        self._write(valid, values, predictions)
        return report, values

    def _data(self) -> dict[str, Any]:
        sizes = [(part, len(rows), len(set(self.groups[rows].tolist()))) for part, rows in self.rows.items()]
        near = nearest(self.parts["held out"].sequences, self.parts["train"].sequences)
        return {"parts": sizes, "notes": list(self.peptides.notes), "identity": self.config.data.identity,
                "largest identity": float(near.max())}  # fmt: skip

    def _target(self, name: str, samples: dict[str, list[str]], values: dict[str, dict[str, np.ndarray]],
                predictions: dict[str, Prediction]) -> dict[str, Any]:  # fmt: skip
        target = self.targets[name]
        kinds = {"conditioned": name}
        if name == next(iter(self.targets)) and "fine-tuned" in samples:
            kinds["fine-tuned"] = "fine-tuned"

        def count(of: str) -> int:
            bins = self.conditions.bins({key: x[of] for key, x in values.items()})
            return int(evaluate.hits(bins, target).sum())

        plain, of_plain = count("unconditioned"), len(samples["unconditioned"])
        hits = {kind: evaluate.lift(count(of), len(samples[of]), plain, of_plain) for kind, of in kinds.items()}
        entry: dict[str, Any] = {"asked": self.conditions.said(target), "hits": hits}
        if predictions:
            base = predictions["unconditioned"].mean
            entry["predicted shift"] = {kind: evaluate.shift(predictions[of].mean, base) for kind, of in kinds.items()}
        return entry

    def _write(self, valid: dict[str, list[str]], values: dict[str, dict[str, np.ndarray]],
               predictions: dict[str, Prediction]) -> None:  # fmt: skip
        """peptides.csv: every valid sample. peptides.fasta: the new and different ones of the targets."""
        train = self.parts["train"].sequences
        generated = [name for name in valid if name != "held out"]
        columns: dict[str, list[Any]] = {
            "set": [name for name in generated for _ in valid[name]],
            "sequence": [x for name in generated for x in valid[name]],
            "nearest_identity": [round(x, 3) for name in generated for x in nearest(valid[name], train).tolist()],
        }
        for key in PROPERTIES:
            columns[key] = [round(x, 4) for name in generated for x in values[key][name].tolist()]
        if predictions:
            label = self.config.data.label
            for key, field in {f"predicted_{label}": "mean", "low": "low", "high": "high"}.items():
                numbers = [x for name in generated for x in getattr(predictions[name], field).tolist()]
                columns[key] = ["" if np.isnan(x) else round(x, 4) for x in numbers]
        write_text(self.folder / "peptides.csv", table(columns))
        training = set(train)
        text = [fasta([x for x in dict.fromkeys(valid[name]) if x not in training], name.replace(" ", "_"))
                for name in self.targets]  # fmt: skip
        write_text(self.folder / "peptides.fasta", "".join(text))

    def _say(self, report: dict[str, Any]) -> None:
        perplexity = report["perplexity"]
        CONSOLE.print(f"held-out perplexity {perplexity['language model']:.2f}, trigram {perplexity['trigram']:.2f}")
        if "ROC-AUC" in report.get("oracle", {}):
            CONSOLE.print(f"oracle: ROC-AUC {report['oracle']['ROC-AUC']:.3f} on held-out peptides")
        for name, entry in report["targets"].items():
            x, row = entry["hits"]["conditioned"], report["sets"][name]
            CONSOLE.print(f"{name}: {x['rate']:.1%} hit {entry['asked']}, {x['plain rate']:.1%} unconditioned; "
                          f"{row['validity']:.1%} valid, {row.get('novelty', 0):.1%} of these new")  # fmt: skip


def _closeness(conditions: Conditions, target: np.ndarray, values: dict[str, np.ndarray]) -> np.ndarray:
    """(peptides,) how near peptides come to a target: a sum over the properties asked for, in standard deviations. In
    the highest bin it is the value, in the lowest minus the value, between them minus the distance to the middle."""
    total = np.zeros(len(next(iter(values.values()))))
    for (name, edges), i in zip(conditions.edges.items(), target.tolist(), strict=True):
        x, scale = values[name], max(values[name].std(), 1e-12)
        if i == len(edges):
            total += x / scale
        elif i == 0:
            total -= x / scale
        elif i != OPEN:
            total -= np.abs(x - (edges[i - 1] + edges[i]) / 2) / scale
    return total


def _mean(x: np.ndarray) -> float | None:
    return None if np.isnan(x).all() else float(np.nanmean(x))

"""A peptide language model: samples that are valid, new and different, and a shift of their properties by fine-tuning.

1. Helical peptides are made at random: some have hydrophobic residues on one side of the helix.
2. A language model learns them. Of its samples are measured: validity (amino acids only, the length of a peptide, an
   end), novelty (not among the peptides it learned) and uniqueness (different from one another).
3. It learns the best decile of the peptides by the sum of two standardized properties, and is sampled again.

The properties are formulas, so that no predictor has to be trusted:

    net charge at pH 7   Henderson-Hasselbalch with the pK values of EMBOSS (Rice et al. 2000, program `iep`)
    hydrophobic moment   Eisenberg et al. 1982, with the consensus scale of Eisenberg et al. 1984, 100 degrees a residue

    python runs/peptides.py                    # about two minutes on two cores
    python runs/peptides.py --quick            # seconds; the model learns little
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from support import Results, arguments, curve, options, picture, train

import tutti
from tutti.models.peptides import RESIDUES, PeptideConfig, PeptideForCausalLM, peptide_tokenizer

SHORTEST, LONGEST = 10, 24
POSITIVE = {"K": 10.8, "R": 12.5, "H": 6.5}  # pK of the side chain
NEGATIVE = {"D": 3.9, "E": 4.1, "C": 8.5, "Y": 10.1}
AMINO_END, CARBOXYL_END = 8.6, 3.6
CONSENSUS = {
    "A": 0.62, "R": -2.53, "N": -0.78, "D": -0.90, "C": 0.29, "Q": -0.85, "E": -0.74, "G": 0.48, "H": -0.40, "I": 1.38,
    "L": 1.06, "K": -1.50, "M": 0.64, "F": 1.19, "P": 0.12, "S": -0.18, "T": -0.05, "W": 0.81, "Y": 0.26, "V": 1.08,
}  # fmt: skip
"""Hydrophobicity of amino acids, dimensionless."""
HYDROPHOBIC, POLAR = "AILMFWV", "KRHEDNQST"


def net_charge(peptide: str, ph: float = 7.0) -> float:
    """Mean net charge of a peptide with free ends, in elementary charges."""
    bases = [AMINO_END, *(POSITIVE[x] for x in peptide if x in POSITIVE)]
    acids = [CARBOXYL_END, *(NEGATIVE[x] for x in peptide if x in NEGATIVE)]
    return sum(1 / (1 + 10 ** (ph - pk)) for pk in bases) - sum(1 / (1 + 10 ** (pk - ph)) for pk in acids)


def hydrophobic_moment(peptide: str, angle: float = 100.0) -> float:
    """Length of the mean of hydrophobicities as vectors around a helix, `angle` degrees apart."""
    turned = [(CONSENSUS[x], math.radians(angle) * i) for i, x in enumerate(peptide)]
    return math.hypot(sum(h * math.cos(a) for h, a in turned), sum(h * math.sin(a) for h, a in turned)) / len(peptide)


def made_peptides(count: int, seed: int = 0) -> list[str]:
    """Different peptides. The hydrophobic residues of some face one side of the helix, more or less strictly."""
    draw, found = np.random.default_rng(seed), {}
    while len(found) < count:
        strict, positive = draw.random(), draw.random()
        weights = np.array([3 * positive + 0.3, 2 * positive + 0.2, 0.3, 1 - positive, 1 - positive, 1, 1, 1, 1])
        peptide = ""
        for i in range(int(draw.integers(SHORTEST, LONGEST + 1))):
            inside = math.cos(math.radians(100) * i) > 0
            inside = inside if draw.random() < strict else bool(draw.random() < 0.5)
            polar = draw.choice(list(POLAR), p=weights / weights.sum())
            peptide += str(draw.choice(list(HYDROPHOBIC)) if inside else polar)
        found[peptide] = None
    return list(found)


def is_valid(peptide: str, ended: bool) -> bool:
    """Whether a sample is a peptide: amino acids only, a length that was learned, and an end."""
    return ended and SHORTEST <= len(peptide) <= LONGEST and set(peptide) <= set(RESIDUES)


def features(peptides: list[str], tokenizer: Any) -> list[dict[str, list[int]]]:
    """Tokens of peptides with begin and end, and the same as labels."""
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(peptides)["input_ids"]]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch, padded to the longest peptide there is."""
    size = LONGEST + 2
    filled = {"input_ids": 0, "labels": -100}
    made = {key: torch.tensor([x[key] + [value] * (size - len(x[key])) for x in rows]) for key, value in filled.items()}
    return made | {"attention_mask": (made["labels"] != -100).long()}


@torch.no_grad()
def sample(model: Any, tokenizer: Any, count: int, seed: int) -> list[tuple[str, bool]]:
    """(peptide, whether it has an end) of samples at temperature 1."""
    torch.manual_seed(seed)
    first = torch.full((count, 1), tokenizer.bos_token_id, device=model.device)
    made = model.eval().generate(first, attention_mask=torch.ones_like(first), max_new_tokens=LONGEST + 2,
                                 do_sample=True, top_k=0)  # fmt: skip
    ended = (made == tokenizer.eos_token_id).any(1).tolist()
    return list(zip(tokenizer.batch_decode(made, skip_special_tokens=True), ended, strict=True))


def properties(peptides: list[str]) -> np.ndarray:
    """(peptides, 2): net charge and hydrophobic moment."""
    return np.array([[net_charge(x), hydrophobic_moment(x)] for x in peptides])


def summary(samples: list[tuple[str, bool]], known: set[str]) -> dict[str, Any]:
    """Fractions of valid samples, and among these of new and different ones; properties of the valid ones."""
    valid = [peptide for peptide, ended in samples if is_valid(peptide, ended)]
    found: dict[str, Any] = {"samples": len(samples), "validity": len(valid) / len(samples)}
    if valid:
        values = properties(valid)
        found |= {
            "novelty": sum(x not in known for x in valid) / len(valid),
            "uniqueness": len(set(valid)) / len(valid),
            "charge": float(values[:, 0].mean()),
            "moment": float(values[:, 1].mean()),
            "charges": values[:, 0].round(3).tolist(),
            "moments": values[:, 1].round(3).tolist(),
        }
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    run = options(__doc__, "out/peptides", argv)
    results, tokenizer = Results(run.out), peptide_tokenizer()
    peptides = made_peptides(200 if run.quick else 4000)
    values = properties(peptides)
    score = ((values - values.mean(0)) / values.std(0)).sum(1)
    best = [peptides[i] for i in np.argsort(-score)[: len(peptides) // 10]]
    known, count = set(peptides), 64 if run.quick else 1000

    width, layers = (32, 1) if run.quick else (96, 3)
    torch.manual_seed(0)
    model = PeptideForCausalLM(PeptideConfig(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers))
    found, losses = {}, {}
    for name, data, steps, rate in (("all", peptides, 40 if run.quick else 1200, 3e-3),
                                    ("best decile", best, 10 if run.quick else 150, 5e-4)):  # fmt: skip
        args = arguments(run, name.replace(" ", "_"), steps, rate, 32)
        trainer = tutti.Trainer(model, args, pad, features(data, tokenizer), processing_class=tokenizer)
        losses[name] = train(trainer)
        found[name] = results.get(name, lambda: summary(sample(model, tokenizer, count, 0), known))
    trainer.save_model(str(run.out / "model"))
    data = results.get("data", lambda: {"charge": float(values[:, 0].mean()), "moment": float(values[:, 1].mean())})
    shift = results.get("shift", lambda: {x: found["best decile"].get(x, math.nan) - found["all"].get(x, math.nan)
                                          for x in ("charge", "moment")})  # fmt: skip
    for name in found:
        print(name, {key: round(x, 3) for key, x in found[name].items() if not isinstance(x, list)})
    print("data", data, "shift", shift)

    def histogram(key: str, column: int) -> Any:
        def draw(axes: Any) -> None:
            series = {"data": values[:, column].tolist()} | {name: x.get(key, []) for name, x in found.items()}
            for name, numbers in series.items():
                axes.hist(numbers, 30, density=True, histtype="step", label=name)
            axes.legend()

        return draw

    picture(run.out, {"losses": lambda axes: curve(axes, losses),
                                      "net charge at pH 7": histogram("charges", 0),
                                      "hydrophobic moment": histogram("moments", 1)})  # fmt: skip
    return results.values


if __name__ == "__main__":
    main()

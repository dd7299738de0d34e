"""S-parameters of Sheen's microstrip low-pass filter (1990) by FDTD.

python runs/microstrip_filter.py           # 3000 steps, seconds
python runs/microstrip_filter.py --quick   # 2000 steps, until the pulse has just left
"""

from __future__ import annotations

from typing import Any

import torch
from support import Results, options, picture

from tutti.science.em.fdtd import microstrip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    run = options(__doc__, "out/microstrip_filter", argv, training=False)
    results = Results(run.out)
    frequencies = torch.linspace(0.1e9, 20e9, 399)

    def measure() -> dict[str, list[float]]:
        s = microstrip.solve(frequencies, 2000 if run.quick else 3000)
        return {name: (20 * torch.log10(x.abs())).tolist() for name, x in zip(("S11", "S21"), s, strict=True)}

    found = results.get("decibels", measure)

    def draw(axes: Any) -> None:
        for name, values in found.items():
            axes.plot((frequencies / 1e9).tolist(), values, label=name)
        axes.set(xlabel="GHz", ylabel="dB", ylim=(-50, 2))
        axes.legend()

    for name, values in found.items():
        least = min(range(98, len(values)), key=values.__getitem__)
        print(f"{name} above 5 GHz is least at {frequencies[least] / 1e9:.2f} GHz: {values[least]:.1f} dB")
    picture(run.out, {"low-pass filter": draw})
    return results.values


if __name__ == "__main__":
    main()

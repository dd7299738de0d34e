"""Inverse scattering with a differentiable FDTD solver: two discs from fields at eight receivers.

python runs/inverse_scattering.py          # 100 steps of Adam, about ten seconds on two cores
python runs/inverse_scattering.py --quick  # 5 steps
"""

from __future__ import annotations

from typing import Any

from support import Results, image, options, picture

from tutti.science.em.fdtd import inverse


def main(argv: list[str] | None = None) -> dict[str, Any]:
    run = options(__doc__, "out/inverse_scattering", argv, training=False)
    results = Results(run.out)

    def measure() -> dict[str, Any]:
        eps, losses = inverse.reconstruct(5 if run.quick else 100)
        truth = inverse.truth()
        return {"losses": losses, "psnr": inverse.psnr(eps, truth), "ssim": inverse.ssim(eps, truth),
                "eps_r": eps.tolist()}  # fmt: skip

    found = results.get("reconstruction", measure)

    def losses(axes: Any) -> None:
        axes.semilogy(found["losses"])
        axes.set(xlabel="step of Adam", ylabel="sum of squares of the fields' errors")

    def map_of(values: Any) -> Any:
        return image(values, (1, 1), "m", "eps_r", vmin=1, vmax=4)

    picture(run.out, {
        "truth": map_of(inverse.truth().tolist()),
        f"found, PSNR {found['psnr']:.2f} dB": map_of(found["eps_r"]),
        "loss": losses,
    }, "quick run: 5 of 100 steps" if run.quick else "")  # fmt: skip
    print(f"loss {found['losses'][0]:.6e} to {found['losses'][-1]:.6e}, PSNR {found['psnr']:.3f} dB, "
          f"SSIM {found['ssim']:.4f}")  # fmt: skip
    return results.values


if __name__ == "__main__":
    main()

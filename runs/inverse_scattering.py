"""Inverse scattering with a differentiable FDTD solver: two discs from fields at eight receivers.

python runs/inverse_scattering.py          # 100 steps of Adam, about ten seconds on two cores
python runs/inverse_scattering.py --quick  # 5 steps
"""

from __future__ import annotations

from typing import Any

from support import Results, options, picture

from tutti.science.em.fdtd import inverse


def main(argv: list[str] | None = None) -> dict[str, Any]:
    run = options(__doc__ or "", "out/inverse_scattering", argv)
    results = Results(run.out)

    def measure() -> dict[str, Any]:
        eps, losses = inverse.reconstruct(5 if run.quick else 100)
        truth = inverse.truth()
        return {"losses": losses, "psnr": inverse.psnr(eps, truth), "ssim": inverse.ssim(eps, truth),
                "eps_r": eps.tolist()}  # fmt: skip

    found = results.get("reconstruction", measure)

    def image(values: Any) -> Any:
        return lambda axes: axes.imshow(values, origin="lower", vmin=1, vmax=4, extent=(0, 1, 0, 1))

    picture(run.out / "picture.png", {
        "truth": image(inverse.truth().T.tolist()),
        f"PSNR {found['psnr']:.2f} dB": image([list(x) for x in zip(*found["eps_r"], strict=True)]),
        "loss": lambda axes: axes.semilogy(found["losses"]),
    })  # fmt: skip
    print(f"loss {found['losses'][0]:.6e} to {found['losses'][-1]:.6e}, PSNR {found['psnr']:.3f} dB, "
          f"SSIM {found['ssim']:.4f}")  # fmt: skip
    return results.values


if __name__ == "__main__":
    main()

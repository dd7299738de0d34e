import pytest
import torch

from tutti.models.edsr import EDSRConfig, EDSRForSuperResolution, psnr

TINY = {"num_blocks": 2, "features": 8}


def make(**options):
    torch.manual_seed(0)
    return EDSRForSuperResolution(EDSRConfig(**(TINY | options)))


@pytest.mark.parametrize(("options", "published"), [
    ({"scale": 2}, 1_369_859), ({"scale": 3}, 1_554_499), ({"scale": 4}, 1_517_571),
    ({"scale": 2, "num_blocks": 32, "features": 256, "residual_scale": 0.1}, 40_729_603),
])  # fmt: skip
def test_parameters_are_those_of_the_published_models(options, published):
    with torch.device("meta"):
        model = EDSRForSuperResolution(EDSRConfig(**options))
    assert sum(p.numel() for p in model.parameters()) == published


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_images_grow(scale):
    assert make(scale=scale)(torch.rand(2, 3, 6, 5)).reconstruction.shape == (2, 3, 6 * scale, 5 * scale)
    with pytest.raises(ValueError, match="must be 2, 3 or 4"):
        EDSRConfig(scale=5)


def test_psnr():
    wanted = torch.full((2, 3, 8, 8), 0.5)
    torch.testing.assert_close(psnr(wanted + torch.tensor([0.1, 0.01]).view(2, 1, 1, 1), wanted),
                               torch.tensor([20.0, 40.0]))  # fmt: skip
    wrong = wanted.clone()
    wrong[..., 0] = 0
    assert psnr(wrong + 0.1, wanted, border=1) == pytest.approx(20.0)


def test_it_learns_and_plans_do_not_change_losses(trains_alike):
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(4, 3, 8, 8, generator=draw)
    small = torch.nn.functional.avg_pool2d(images, 2)
    trains_alike(make(), {"pixel_values": small, "labels": images})


def test_saved_models_load(comes_back):
    comes_back(make(residual_scale=0.1), {"pixel_values": torch.rand(1, 3, 4, 4)},
               EDSRForSuperResolution.from_pretrained)  # fmt: skip

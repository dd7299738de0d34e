"""Notice writes into a model through `.data`, which torch does not count, while a step trains its own copies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SAMPLES = 16  # elements of each parameter


def sampled(model: nn.Module) -> dict[str, Tensor]:
    """Some elements of each parameter, evenly spaced, as bytes on the CPU."""
    return {name: _sample(p.detach()) for name, p in model.named_parameters() if p.numel()}


def check_unwritten(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Raise ValueError if a parameter differs from its sample."""
    for name, p in model.named_parameters():
        if name in before and not torch.equal(_sample(p.detach()), before[name]):
            raise ValueError(
                f"parameter {name!r} of the model was written into during training, by a callback perhaps. The step "
                "trains its own copies, so this has no effect: read them with trainer.step.state_dict(), and load "
                "others with trainer.step.load_training_state"
            )


def _sample(x: Tensor) -> Tensor:
    places = torch.linspace(0, x.numel() - 1, min(SAMPLES, x.numel()), dtype=torch.float64).long()
    return torch.take(x, places.to(x.device)).cpu().view(torch.uint8)

"""LAMB."""

from torch.optim.optimizer import ParamsT

from tutti.optim.pure import PureOptimizer, check_betas, check_range


class Lamb(PureOptimizer):
    """LAMB: Adam with a trust ratio per parameter tensor, for large batches.

    The formula is in `tutti.tracing.optimizers.formulas.lamb`.

    params: parameters, named parameters, or groups.
    lr: length of a step relative to the norm of a parameter.
    betas: decay of first and second moments.
    eps: added to the square root of second moments.
    weight_decay: decoupled: p <- p - lr weight_decay p.
    maximize: ascend instead of descend.

    Raises ValueError for values out of range.

    You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (2020).
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-6, weight_decay: float = 0.0, *, maximize: bool = False):  # fmt: skip
        check_range("lr", lr)
        check_betas(betas)
        check_range("eps", eps)
        check_range("weight_decay", weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

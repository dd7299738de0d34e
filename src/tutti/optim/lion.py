"""Lion."""

from torch.optim.optimizer import ParamsT

from tutti.optim.pure import PureOptimizer, check_betas, check_range


class Lion(PureOptimizer):
    """Lion: steps of equal size in every element, in the direction of an interpolated momentum.

    It keeps one tensor per parameter. Its learning rate is usually 3 to 10 times smaller than AdamW's, and its weight
    decay as many times larger. The formula is in `tutti.tracing.optimizers.formulas.lion`.

    params: parameters, named parameters, or groups.
    lr: size of a step in each element.
    betas: decay of the momentum in the direction of a step, and in the state.
    weight_decay: decoupled: p <- p - lr weight_decay p.
    maximize: ascend instead of descend.

    Raises ValueError for values out of range.

    Chen et al., "Symbolic discovery of optimization algorithms" (2023).
    """

    def __init__(self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
                 weight_decay: float = 0.0, *, maximize: bool = False):  # fmt: skip
        check_range("lr", lr)
        check_betas(betas)
        check_range("weight_decay", weight_decay)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

"""Adam and AdamW with moments of one byte per element."""

from torch.optim.optimizer import ParamsT

from tutti.optim.pure import PureOptimizer, check_betas, check_range


class Adam8bit(PureOptimizer):
    """Adam with block-wise quantized moments: 2 bytes per parameter and 8 per block, instead of 8 bytes per parameter.

    The encoding is in `tutti.tracing.optimizers.formulas.adam_8bit`.

    params: parameters, named parameters, or groups.
    lr, betas, eps, weight_decay, decoupled_weight_decay, maximize: as for `torch.optim.Adam`.
    block_size: most elements of a block, which share a scale.
    smallest: parameters with fewer elements keep float32 moments.

    Raises ValueError for values out of range.

    Dettmers et al., "8-bit optimizers via block-wise quantization" (2022).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        block_size: int = 256,
        smallest: int = 4096,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
    ):
        check_range("lr", lr)
        check_betas(betas)
        check_range("eps", eps)
        check_range("weight_decay", weight_decay)
        check_range("block_size", block_size, low=1)
        check_range("smallest", smallest)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "block_size": block_size,
            "smallest": smallest,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)


class AdamW8bit(Adam8bit):
    """AdamW with block-wise quantized moments. Arguments are those of `Adam8bit`; weight decay is decoupled."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block_size: int = 256,
        smallest: int = 4096,
        maximize: bool = False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, block_size=block_size, smallest=smallest,
                         decoupled_weight_decay=True, maximize=maximize)  # fmt: skip

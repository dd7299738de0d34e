"""DLRM: deep learning recommendation model (Naumov et al. 2019, arXiv:1906.00091).

Embeddings of categories and a vector made from dense features interact by dot products. An MLP gives the logit of a
click.

    from tutti.models.dlrm import DLRM, DLRMConfig

    model = DLRM(DLRMConfig(tables=(1000, 500, 20), num_dense=4, embedding_size=8, bottom=(16,), top=(16,)))
    model(dense=torch.rand(2, 4), categories=torch.randint(20, (2, 3))).logits  # (2,)
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

CRITEO_KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Categories of each column of the Criteo Kaggle data, as in the published benchmark."""


class DLRMConfig(PreTrainedConfig):
    """Sizes of a DLRM: by default those of the paper's experiment on the Criteo Kaggle data, about 540 M parameters.

    tables: categories of each categorical feature.
    bottom: inner widths of the MLP of dense features; its output has the embedding size. top: those of the last MLP.
    """

    model_type = "dlrm"

    num_dense: int = 13
    tables: tuple[int, ...] | list[int] = CRITEO_KAGGLE
    embedding_size: int = 16
    bottom: tuple[int, ...] | list[int] = (512, 256, 64)
    top: tuple[int, ...] | list[int] = (512, 256)


def mlp(sizes: list[int], last: bool) -> nn.Sequential:
    """Linear layers with ReLU behind each but the last, and behind that if `last`."""
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(inputs, outputs)]
        layers += [nn.ReLU()] if last or i + 2 < len(sizes) else []
    return nn.Sequential(*layers)


class DLRM(PreTrainedModel):
    """A DLRM; the loss is the binary cross-entropy of clicks."""

    config_class = DLRMConfig
    main_input_name = "dense"
    accepts_loss_kwargs = False

    def __init__(self, config: DLRMConfig):
        super().__init__(config)
        width = config.embedding_size
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in config.tables)
        self.bottom = mlp([config.num_dense, *config.bottom, width], last=True)
        vectors = len(config.tables) + 1
        self.top = mlp([width + vectors * (vectors - 1) // 2, *config.top, 1], last=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """As in the published code: normal weights of variance 2 / (inputs + outputs); embeddings of n rows uniform in
        +-1 / sqrt(n)."""
        if isinstance(module, nn.Linear):
            outputs, inputs = module.weight.shape
            nn.init.normal_(module.weight, std=(2 / (inputs + outputs)) ** 0.5)
            nn.init.normal_(module.bias, std=(1 / outputs) ** 0.5)
        elif isinstance(module, nn.EmbeddingBag):
            edge = module.num_embeddings**-0.5
            nn.init.uniform_(module.weight, -edge, edge)

    def forward(self, dense: Tensor, categories: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """dense: (batch, features). categories: (batch, tables) int64, or (batch, tables, several), whose embeddings
        are added. labels: (batch,), 1 for a click. Logits: (batch,)."""
        x = self.bottom(dense)
        bags = categories if categories.dim() == 3 else categories[:, :, None]
        vectors = torch.stack([x, *(table(bags[:, i]) for i, table in enumerate(self.tables))], 1)
        rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        dots = (vectors @ vectors.transpose(1, 2))[:, rows, columns]
        logits = self.top(torch.cat([x, dots], 1)).squeeze(1)
        loss = None
        if labels is not None:
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        return SequenceClassifierOutput(loss=loss, logits=logits)


AutoConfig.register("dlrm", DLRMConfig)

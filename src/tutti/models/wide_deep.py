"""Wide & Deep: a linear model of crossed features beside an MLP of embeddings (Cheng et al. 2016, arXiv:1606.07792).

from tutti.models.wide_deep import WideDeep, WideDeepConfig

model = WideDeep(WideDeepConfig(tables=(100, 20), num_dense=4, crosses=((0, 1),), buckets=1000))
model(dense=torch.rand(2, 4), categories=torch.randint(20, (2, 2))).logits  # (2,)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from tutti.models.dlrm import mlp

FACTOR, PRIME = 1_103_515_245, 2_147_483_647  # of the hash of a cross, which stays below 2**62


class WideDeepConfig(PreTrainedConfig):
    """Sizes of a Wide & Deep model; the defaults of `embedding_size` and `deep` are those of the paper.

    tables: categories of each categorical feature.
    crosses: features whose combinations are features of the wide part.
    buckets: rows of the wide part of each cross, which combinations share by a hash.
    """

    model_type = "wide_deep"

    num_dense: int = 4
    tables: tuple[int, ...] | list[int] = (1000, 100, 10)
    crosses: tuple[tuple[int, ...], ...] | list[list[int]] = ((0, 1),)
    buckets: int = 10_000
    embedding_size: int = 32
    deep: tuple[int, ...] | list[int] = (1024, 512, 256)


class WideDeep(PreTrainedModel):
    """A Wide & Deep model; the loss is the binary cross-entropy.

    The paper trains the wide part with FTRL and the deep part with AdaGrad. `wide_parameters` and `deep_parameters`
    give the parameters of each, for groups of an optimizer.
    """

    config_class = WideDeepConfig
    main_input_name = "dense"
    accepts_loss_kwargs = False

    def __init__(self, config: WideDeepConfig):
        super().__init__(config)
        width, dense = config.embedding_size, config.num_dense
        for cross in config.crosses:
            if len(cross) < 2 or not all(0 <= i < len(config.tables) for i in cross):
                raise ValueError(f"the cross {tuple(cross)} needs two or more features below {len(config.tables)}")
        rows = [*config.tables, *(config.buckets for _ in config.crosses)]
        self.wide = nn.ModuleList(nn.Embedding(n, 1) for n in rows)
        self.wide_dense = nn.Linear(dense, 1)
        self.tables = nn.ModuleList(nn.Embedding(n, width) for n in config.tables)
        self.deep = mlp([dense + width * len(config.tables), *config.deep, 1], last=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding) and module.embedding_dim == 1:
            nn.init.zeros_(module.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)

    def wide_parameters(self) -> list[nn.Parameter]:
        """The parameters of the linear model."""
        return [*self.wide.parameters(), *self.wide_dense.parameters()]

    def deep_parameters(self) -> list[nn.Parameter]:
        """The parameters of embeddings and MLP."""
        return [*self.tables.parameters(), *self.deep.parameters()]

    def crossed(self, categories: Tensor) -> Tensor:
        """Hashes of combinations, (batch, crosses) int64 in [0, buckets)."""
        columns = []
        for cross in self.config.crosses:
            key = torch.zeros_like(categories[:, 0])
            for i in cross:
                key = (key + 1 + categories[:, i]) * FACTOR % PRIME
            columns.append(key % self.config.buckets)
        return torch.stack(columns, 1) if columns else categories[:, :0]

    def forward(self, dense: Tensor, categories: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """dense: (batch, features). categories: (batch, tables) int64. labels: (batch,), 0 or 1. Logits: (batch,)."""
        keys = torch.cat([categories, self.crossed(categories)], 1)
        wide = self.wide_dense(dense)
        for i, table in enumerate(self.wide):
            wide = wide + table(keys[:, i])
        embedded = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        logits = (wide + self.deep(torch.cat([dense, *embedded], 1))).squeeze(1)
        loss = None
        if labels is not None:
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        return SequenceClassifierOutput(loss=loss, logits=logits)


AutoConfig.register("wide_deep", WideDeepConfig)

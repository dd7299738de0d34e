"""A variational autoencoder of resistivity columns: few numbers, near a standard normal, stand for a column.

Kingma and Welling, 2014. The loss of a column c is  KL(q(z|c) || N(0, 1)) / capacity + weighted squared error: with
`noise`, the standard deviation that a decoded column may differ by, it is the negative evidence lower bound.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from tutti.checkpoint.values import read_values, write_values
from tutti.science.em.descent import descend
from tutti.science.em.mt.inverse.columns import Columns

NETWORKS = ("dense", "convolutional")


def _block(channels: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(channels):
        layers += [nn.Conv1d(a, b, 3, padding=1), nn.BatchNorm1d(b), nn.SiLU()]
    return nn.Sequential(*layers, nn.MaxPool1d(2))


class Convolutional(nn.Module):
    """The published network: three blocks of two convolutions, and transposed convolutions back. rows: cells of a
    column, a multiple of 8."""

    def __init__(self, rows: int, codes: int) -> None:
        super().__init__()
        if rows % 8:
            raise ValueError(f"the convolutional network halves columns three times: {rows} rows are no multiple of 8")
        inner = 64 * rows // 8
        self.encoder = nn.Sequential(_block((1, 16, 16)), _block((16, 32, 32)), _block((32, 64, 64)), nn.Flatten())
        self.code = nn.Linear(inner, 2 * codes)
        self.wide = nn.Sequential(nn.Linear(codes, inner), nn.SiLU(), nn.Unflatten(1, (64, rows // 8)))
        layers: list[nn.Module] = []
        for a, b in ((64, 32), (32, 16)):
            layers += [nn.ConvTranspose1d(a, b, 2, stride=2), nn.SiLU()]
            layers += [layer for _ in range(2) for layer in (nn.Conv1d(b, b, 3, padding=1), nn.SiLU())]
        self.decoder = nn.Sequential(*layers, nn.ConvTranspose1d(16, 1, 2, stride=2), nn.Conv1d(1, 1, 3, padding=1))

    def encode(self, columns: Tensor) -> Tensor:
        return self.code(self.encoder(columns[:, None]))

    def decode(self, codes: Tensor) -> Tensor:
        return self.decoder(self.wide(codes))[:, 0]


class Dense(nn.Module):
    """Two hidden layers each way."""

    def __init__(self, rows: int, codes: int, width: int = 256) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(rows, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
                                    nn.Linear(width, 2 * codes))  # fmt: skip
        self.decode = nn.Sequential(nn.Linear(codes, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
                                    nn.Linear(width, rows))  # fmt: skip


class VAE(nn.Module):
    """Codes of columns. rows: cells of a column. codes: numbers of a code. network: one of NETWORKS.

    `encode` and `decode` map (n, rows) log10 ohm-m to (n, codes) and back; columns are standardised inside.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor

    def __init__(self, rows: int, codes: int = 16, network: str = "dense") -> None:
        super().__init__()
        if network not in NETWORKS:
            raise ValueError(f"network must be one of {NETWORKS}; got {network!r}")
        self.rows, self.codes, self.network = rows, codes, network
        self.source = ""  # what it was learned from, in words; saved with it
        self.net = Dense(rows, codes) if network == "dense" else Convolutional(rows, codes)
        self.register_buffer("mean", torch.zeros(rows))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("weight", torch.ones(rows))  # of rows in the loss

    def encode(self, columns: Tensor) -> Tensor:
        """The mean codes of columns (n, rows). Returns (n, codes)."""
        return self.moments(columns)[0]

    def moments(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the codes, each (n, codes)."""
        mean, logvar = self.net.encode((columns - self.mean) / self.scale).chunk(2, 1)
        return mean, logvar.clamp(-12, 6)

    def decode(self, codes: Tensor) -> Tensor:
        return self.net.decode(codes) * self.scale + self.mean

    def forward(self, columns: Tensor, noise: Tensor, sd: Tensor) -> Tensor:
        """The loss: nats of a column. noise: (n, codes), standard normal."""
        mean, logvar = self.moments(columns)
        decoded = self.decode(mean + noise * (0.5 * logvar).exp())
        divergence = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum(1)
        error = (self.weight * (decoded - columns) ** 2).sum(1) / (2 * sd**2)
        return (divergence + error).mean()

    @torch.no_grad()
    def error(self, columns: Tensor) -> float:
        """Root mean square difference of columns from their reconstruction, decades."""
        return (self.decode(self.encode(columns)) - columns).square().mean().sqrt().item()

    def fit(self, columns: Columns, *, samples: int = 40_000, epochs: int = 30, batch: int = 256, lr: float = 1.5e-3,
            noise: float = 0.03, seed: int = 0, thickness: Tensor | None = None) -> VAE:  # fmt: skip
        """Learn a distribution. noise: the difference of decoded columns that counts as one standard deviation,
        decades. thickness: thickness of each row, for rows to count by its log10; by default all count the same.
        Returns itself, in eval mode.
        """
        if samples < batch or epochs < 1:
            raise ValueError(f"{samples} samples and {epochs} epochs: at least a batch of {batch}, and 1, are needed")
        generator = torch.Generator().manual_seed(seed)
        data = columns.sample(samples, generator).float()
        if data.shape[1] != self.rows:
            raise ValueError(f"columns have {data.shape[1]} rows, and this VAE {self.rows}")
        self.mean.copy_(data.mean(0))
        self.scale.copy_(data.std())
        if thickness is not None:
            weight = thickness.log10().clamp_min(0.1)
            self.weight.copy_(weight / weight.mean())
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Conv1d | nn.ConvTranspose1d | nn.BatchNorm1d):
                    module.reset_parameters()
        steps = epochs * (samples // batch)
        optimizer = torch.optim.Adam(self.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1,
                                                       cycle_momentum=False)  # fmt: skip
        sd = torch.tensor(noise)

        def drawn() -> tuple[Tensor, Tensor, Tensor]:
            rows = torch.randint(samples, (batch,), generator=generator)
            return data[rows], torch.randn(batch, self.codes, generator=generator), sd

        self.train()
        descend(self, optimizer, schedule, drawn, lambda model, batch: model(*batch), steps, what="learning the prior")
        return self.eval()

    def save(self, path: str | Path) -> None:
        facts = {"rows": self.rows, "codes": self.codes, "network": self.network}
        write_values({"facts": facts, "source": self.source, "state": self.state_dict()}, path)

    @staticmethod
    def load(path: str | Path) -> VAE:
        """What `save` wrote. Raises ValueError for other files."""
        try:
            saved = read_values(path)
            vae = VAE(**saved["facts"])
            vae.load_state_dict(saved["state"])
            vae.source = saved["source"]
        except (LookupError, TypeError, RuntimeError, ValueError):
            raise ValueError(f"{path} is no prior that this version saved: delete it, or name another file") from None
        return vae.eval()

"""Tiny models in plain torch, as their papers' authors would write them. Dims divide by 2 and 3."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from models import BATCH, LENGTH, VOCABULARY, Case, images, integers, mean_squared, random, tokens


def classes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of a model that is called with `x`."""
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def labelled(x: Tensor) -> dict[str, Tensor]:
    return {"x": x, "labels": integers(BATCH, below=12)}


# ---- sequences ----------------------------------------------------------------------------------------------------


class S4D(nn.Module):
    """A diagonal state space (Gu et al. 2022) whose convolution is computed with the FFT."""

    def __init__(self, width: int = 12, states: int = 6):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(width) - 4)
        self.c = nn.Parameter(torch.randn(width, states, 2) * 0.5**0.5)
        self.log_a_real = nn.Parameter(torch.log(0.5 * torch.ones(width, states)))
        self.a_imag = nn.Parameter(math.pi * torch.arange(states).repeat(width, 1))
        self.d = nn.Parameter(torch.randn(width))
        self.out = nn.Linear(width, 2 * width)

    def forward(self, u: Tensor) -> Tensor:
        """(batch, length, width) -> the same"""
        u = u.transpose(1, 2)
        length, dt = u.shape[-1], self.log_dt.exp()
        a = -self.log_a_real.exp() + 1j * self.a_imag
        dta = a * dt[:, None]
        c = torch.view_as_complex(self.c) * (dta.exp() - 1) / a
        kernel = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(dta[..., None] * torch.arange(length))).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length), n=2 * length)
        y = F.gelu(y[..., :length] + u * self.d[:, None])
        return F.glu(self.out(y.transpose(1, 2)), -1)


class S4Classifier(nn.Module):
    def __init__(self, width: int = 12):
        super().__init__()
        self.encoder = nn.Linear(3, width)
        self.layers = nn.ModuleList(S4D(width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.head(x.mean(1))


def s4d() -> Case:
    return S4Classifier(), labelled(random(BATCH, 24, 3)), classes


class Recognizer(nn.Module):
    """Convolutions and an LSTM with connectionist temporal classification."""

    def __init__(self, width: int = 24, symbols: int = 12):
        super().__init__()
        self.conv = nn.Conv1d(6, width, 3, stride=2, padding=1)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, symbols)

    def forward(self, audio: Tensor) -> Tensor:
        states, _ = self.lstm(F.relu(self.conv(audio)).transpose(1, 2))
        return self.head(states).log_softmax(-1).transpose(0, 1)  # (time, batch, symbols)


def ctc() -> Case:
    batch = {"audio": random(BATCH, 6, 36), "targets": integers(BATCH, 6, below=11) + 1,
             "lengths": integers(BATCH, below=4) + 3}  # fmt: skip

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        log_probs = model(b["audio"])
        times = torch.full((log_probs.shape[1],), log_probs.shape[0], dtype=torch.int64)
        return F.ctc_loss(log_probs, b["targets"], times, b["lengths"])

    return Recognizer(), batch, loss


class TCN(nn.Module):
    """Dilated causal convolutions with residuals and weight normalization (Bai et al. 2018)."""

    def __init__(self, width: int = 24):
        super().__init__()
        widths = [3, width, width]
        self.convs = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(i, o, 3, dilation=2**d))
            for d, (i, o) in enumerate(pairwise(widths))
        )
        self.skips = nn.ModuleList(nn.Conv1d(i, o, 1) for i, o in pairwise(widths))
        self.head = nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        for d, (conv, skip) in enumerate(zip(self.convs, self.skips, strict=True)):
            x = F.relu(F.relu(conv(F.pad(x, (2 * 2**d, 0)))) + skip(x))
        return self.head(x[:, :, -1])


def tcn() -> Case:
    return TCN(), labelled(random(BATCH, 3, 24)), classes


class WaveNet(nn.Module):
    """Gated dilated convolutions, residual and skip connections (van den Oord et al. 2016)."""

    def __init__(self, width: int = 12, skip: int = 24, layers: int = 3):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(layers))
        self.residuals = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.skips = nn.ModuleList(nn.Conv1d(width, skip, 1) for _ in range(layers))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(skip, skip, 1), nn.ReLU(), nn.Conv1d(skip, VOCABULARY, 1))

    def forward(self, ids: Tensor) -> Tensor:
        x, skips = self.embed(ids).transpose(1, 2), 0
        for i, (gate, residual, skip) in enumerate(zip(self.gates, self.residuals, self.skips, strict=True)):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            y = a.tanh() * b.sigmoid()
            x, skips = x + residual(y), skips + skip(y)
        return self.head(skips)


def wavenet() -> Case:
    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(b["ids"])[:, :, :-1], b["ids"][:, 1:])

    return WaveNet(), {"ids": integers(BATCH, LENGTH, below=VOCABULARY)}, loss


class Seq2Seq(nn.Module):
    """A GRU encoder, and a GRU cell that attends to its states (Bahdanau et al. 2015)."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(width, width)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)
        self.cell = nn.GRUCell(3 * width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states, last = self.encoder(self.source(source))
        h, keys, logits = self.bridge(last[1]).tanh(), self.key(states), []
        for t in range(target.shape[1] - 1):
            weights = self.score(torch.tanh(self.query(h)[:, None] + keys)).softmax(1)
            h = self.cell(torch.cat([self.target(target[:, t]), (weights * states).sum(1)], 1), h)
            logits.append(self.head(h))
        return F.cross_entropy(torch.stack(logits, 2), target[:, 1:])


def gru_seq2seq() -> Case:
    batch = {"source": tokens()["input_ids"], "target": integers(BATCH, 6, below=VOCABULARY, seed=3)}
    return Seq2Seq(), batch, None


class TransformerXL(nn.Module):
    """Attention to a memory of the segment before, which is kept in buffers (after Dai et al. 2019)."""

    def __init__(self, width: int = 24, layers: int = 2, memory: int = 8):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.attentions = nn.ModuleList(nn.MultiheadAttention(width, 6, batch_first=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("memory", torch.zeros(layers, BATCH, memory, width))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, memories, length = self.embed(input_ids), [], self.memory.shape[2]
        mask = torch.ones(x.shape[1], x.shape[1] + length, dtype=torch.bool).triu(length + 1)
        for i, (attention, norm) in enumerate(zip(self.attentions, self.norms, strict=True)):
            past = torch.cat([self.memory[i], x], 1)
            memories.append(x[:, -length:].detach())
            x = norm(x + attention(x, past, past, attn_mask=mask, need_weights=False)[0])
        self.memory.copy_(torch.stack(memories))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def transformer_xl() -> Case:
    return TransformerXL(), tokens(), None


# ---- images -------------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Skip connections, batch norm and transposed convolutions (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 12, classes: int = 6):
        super().__init__()

        def block(i: int, o: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
            )  # fmt: skip

        self.down1, self.down2, self.middle = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1 = (nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2),
                              nn.ConvTranspose2d(2 * width, width, 2, stride=2))  # fmt: skip
        self.merge2, self.merge1 = block(4 * width, 2 * width), block(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.merge2(torch.cat([b, self.up2(c)], 1))
        return self.head(self.merge1(torch.cat([a, self.up1(b)], 1)))


def unet() -> Case:
    return UNet(), {"x": images(24), "labels": integers(BATCH, 24, 24, below=6)}, classes


class GAN(nn.Module):
    """Generator and discriminator of DCGAN; both are trained at once through a reversed gradient."""

    def __init__(self, latent: int = 12, width: int = 12):
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(latent, 2 * width, 4, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(width, 2 * width, 4, 2, 1)), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 4),
        )  # fmt: skip


def gan() -> Case:
    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        fake = model.generator(b["z"])
        real, synthetic = model.discriminator(b["image"]), model.discriminator(fake.detach())
        critic = F.softplus(-real).mean() + F.softplus(synthetic).mean()
        frozen = {k: p.detach() for k, p in model.discriminator.named_parameters()}
        return critic + F.softplus(-functional_call(model.discriminator, frozen, (fake,))).mean()

    return GAN(), {"z": random(BATCH, 12, 1, 1), "image": images(16).tanh()}, loss


class VAE(nn.Module):
    """Reparameterized; the noise comes with the batch."""

    def __init__(self, pixels: int = 36, hidden: int = 24, latent: int = 6):
        super().__init__()
        self.encoder, self.moments = nn.Linear(pixels, hidden), nn.Linear(hidden, 2 * latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:
        mean, logvar = self.moments(F.relu(self.encoder(image))).chunk(2, -1)
        decoded = self.decoder(mean + (0.5 * logvar).exp() * noise)
        kl = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(-1)
        return F.binary_cross_entropy_with_logits(decoded, image, reduction="none").sum(-1).add(kl).mean()


def vae() -> Case:
    return VAE(), {"image": random(BATCH, 36).sigmoid(), "noise": random(BATCH, 6, seed=3)}, None


class VQVAE(nn.Module):
    """A codebook with a straight-through gradient, updated by moving averages (van den Oord et al. 2017)."""

    def __init__(self, width: int = 12, codes: int = 24):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
        self.decoder = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
                                     nn.ConvTranspose2d(width, 3, 4, 2, 1))  # fmt: skip
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, image: Tensor) -> Tensor:
        z = self.encoder(image).permute(0, 2, 3, 1)
        flat = z.reshape(-1, z.shape[-1])
        nearest = torch.cdist(flat, self.codes).argmin(1)
        code = F.embedding(nearest, self.codes).view_as(z)
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(nearest, len(self.codes)).to(flat.dtype)
                self.counts.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(one_hot.T @ flat, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])
        commitment = F.mse_loss(z, code.detach())
        code = z + (code - z).detach()
        return F.mse_loss(self.decoder(code.permute(0, 3, 1, 2)), image) + 0.25 * commitment


def vq_vae() -> Case:
    return VQVAE(), {"image": images(12)}, None


class MoCo(nn.Module):
    """A momentum encoder and a queue of negatives (He et al. 2020)."""

    def __init__(self, width: int = 24, queue: int = 36):
        super().__init__()
        self.online, self.target = (
            nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, 12)) for _ in range(2)
        )
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(12, queue), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        q = F.normalize(self.online(a), dim=1)
        with torch.no_grad():
            for p, m in zip(self.online.parameters(), self.target.parameters(), strict=True):
                m.mul_(0.99).add_(p, alpha=0.01)
            k = F.normalize(self.target(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.07
        with torch.no_grad():
            columns = (self.pointer + torch.arange(len(k))) % self.queue.shape[1]
            self.queue[:, columns] = k.T
            self.pointer.copy_((self.pointer + len(k)) % self.queue.shape[1])
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def moco() -> Case:
    return MoCo(), {"a": random(BATCH, 24), "b": random(BATCH, 24, seed=2)}, None


class BYOL(nn.Module):
    """Predicts what an average of its own weights says of another view (Grill et al. 2020), with batch norm."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.online, self.target = (
            nn.Sequential(nn.Linear(24, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 12))
            for _ in range(2)
        )
        self.predictor = nn.Sequential(nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 12))
        for p in self.target.parameters():
            p.requires_grad = False

    @torch.no_grad()
    def follow(self) -> None:
        for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
            q.data.lerp_(p.data, 0.1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        self.follow()
        total = torch.zeros(())
        for x, y in ((a, b), (b, a)):
            with torch.no_grad():
                target = self.target(y)
            total = total + 2 - 2 * F.cosine_similarity(self.predictor(self.online(x)), target, dim=-1).mean()
        return total


def byol() -> Case:
    return BYOL(), {"a": random(BATCH, 24), "b": random(BATCH, 24, seed=2)}, None


class Mixer(nn.Module):
    """MLPs over patches and over channels in turn (Tolstikhin et al. 2021)."""

    def __init__(self, width: int = 24, patches: int = 16):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 6, 6), nn.Linear(width, 12)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n)) for n in (patches, width) * 2
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        for i, (norm, mlp) in enumerate(zip(self.norms, self.mlps, strict=True)):
            x = x + (mlp(norm(x).mT).mT if i % 2 == 0 else mlp(norm(x)))
        return self.head(x.mean(1))


def mlp_mixer() -> Case:
    return Mixer(), labelled(images(24)), classes


class ConvLSTM(nn.Module):
    """Predicts the next frame (Shi et al. 2015)."""

    def __init__(self, channels: int = 2, width: int = 6):
        super().__init__()
        self.width = width
        self.gates = nn.Conv2d(channels + width, 4 * width, 3, padding=1)
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, frames: Tensor) -> Tensor:
        """(batch, time, channels, height, width) -> the same, one later"""
        h = c = frames.new_zeros(len(frames), self.width, *frames.shape[3:])
        outputs = []
        for frame in frames.unbind(1):
            i, f, o, g = self.gates(torch.cat([frame, h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(self.head(h))
        return torch.stack(outputs, 1)


def conv_lstm() -> Case:
    frames = random(BATCH, 5, 2, 12, 12)
    return ConvLSTM(), {"frames": frames[:, :-1], "next": frames[:, 1:]}, mean_squared("", "next")


class Capsules(nn.Module):
    """Dynamic routing between capsules (Sabour et al. 2017) with the margin loss."""

    def __init__(self, kinds: int = 6):
        super().__init__()
        self.conv, self.primary = nn.Conv2d(3, 12, 5), nn.Conv2d(12, 6 * 4, 5, 2)
        self.weight = nn.Parameter(0.1 * torch.randn(6 * 6 * 6, kinds, 8, 4))

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        square = (x**2).sum(-1, keepdim=True)
        return square / (1 + square) * x / (square + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        x = self.primary(F.relu(self.conv(x)))
        u = self.squash(x.view(len(x), 6, 4, -1).permute(0, 1, 3, 2).reshape(len(x), -1, 4))
        votes = torch.einsum("ikde,bie->bikd", self.weight, u)
        logits, v = torch.zeros(votes.shape[:3]), votes
        for i in range(3):
            v = self.squash((logits.softmax(2)[..., None] * votes).sum(1))
            if i < 2:
                logits = logits + (votes.detach() * v.detach()[:, None]).sum(-1)
        return v.norm(dim=-1)


def capsules() -> Case:
    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        lengths, truth = model(b["x"]), F.one_hot(b["labels"], 6).float()
        return (truth * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - truth) * F.relu(lengths - 0.1) ** 2).sum(1).mean()

    return Capsules(), {"x": images(20), "labels": integers(BATCH, below=6)}, loss


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 12, 3, 2), nn.PReLU(12), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
                                  nn.Linear(108, 24))  # fmt: skip

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        a, p, n = (F.normalize(self.body(x), dim=-1) for x in (anchor, positive, negative))
        return F.triplet_margin_loss(a, p, n, margin=1.0)


def siamese() -> Case:
    return Siamese(), {k: images(12, seed=i) for i, k in enumerate(("anchor", "positive", "negative"))}, None


# ---- densities, implicit and continuous depth ---------------------------------------------------------------------


class RealNVP(nn.Module):
    """Affine couplings with alternating masks (Dinh et al. 2017), invertible 1x1 mixings between (Glow)."""

    def __init__(self, dims: int = 6, hidden: int = 24, layers: int = 4):
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(dims, hidden), nn.Tanh(), nn.Linear(hidden, 2 * dims)) for _ in range(layers)
        )
        self.mixings = nn.ParameterList(nn.init.orthogonal_(torch.empty(dims, dims)) for _ in range(layers))
        self.register_buffer("masks", torch.stack([(torch.arange(dims) + i) % 2 for i in range(layers)]).float())

    def forward(self, x: Tensor) -> Tensor:
        """The negative log-likelihood."""
        logdet = torch.zeros(len(x))
        for net, mixing, mask in zip(self.nets, self.mixings, self.masks, strict=True):
            scale, shift = net(x * mask).chunk(2, -1)
            scale = scale.tanh() * (1 - mask)
            x = x * mask + (1 - mask) * (x * scale.exp() + shift)
            x = x @ mixing
            logdet = logdet + scale.sum(-1) + torch.linalg.slogdet(mixing)[1]
        return -(torch.distributions.Normal(0.0, 1.0, validate_args=False).log_prob(x).sum(-1) + logdet).mean()


def real_nvp() -> Case:
    return RealNVP(), {"x": random(BATCH, 6)}, None


class DEQ(nn.Module):
    """A deep equilibrium: fixed-point iterations without gradient, and a last one with it."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.inner, self.inject = nn.Linear(width, width), nn.Linear(12, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros(len(x), self.inner.in_features)
        with torch.no_grad():
            for _ in range(6):
                z = self.norm(torch.tanh(self.inner(z) + self.inject(x)))
        return self.head(self.norm(torch.tanh(self.inner(z) + self.inject(x))))


def deq() -> Case:
    return DEQ(), labelled(random(BATCH, 12)), classes


class NeuralODE(nn.Module):
    """Integrated with the classical Runge-Kutta method in fixed steps."""

    def __init__(self, width: int = 12):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(width + 1, 24), nn.Tanh(), nn.Linear(24, width))
        self.head = nn.Linear(width, 12)

    def slope(self, t: float, x: Tensor) -> Tensor:
        return self.field(torch.cat([x, torch.full_like(x[:, :1], t)], 1))

    def forward(self, x: Tensor) -> Tensor:
        h = 0.25
        for i in range(4):
            a = self.slope(i * h, x)
            b = self.slope((i + 0.5) * h, x + h / 2 * a)
            c = self.slope((i + 0.5) * h, x + h / 2 * b)
            d = self.slope((i + 1) * h, x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return self.head(x)


def neural_ode() -> Case:
    return NeuralODE(), labelled(random(BATCH, 12)), classes


# ---- gradients inside the loss ------------------------------------------------------------------------------------


class MAML(nn.Module):
    """One gradient step on support samples, differentiated through (Finn et al. 2017)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, support: Tensor, query: Tensor) -> Tensor:
        names, weights = zip(*self.net.named_parameters(), strict=True)
        inner = F.mse_loss(self.net(support[:, :6]), support[:, 6:])
        grads = torch.autograd.grad(inner, weights, create_graph=True)
        adapted = {n: w - 0.1 * g for n, w, g in zip(names, weights, grads, strict=True)}
        return F.mse_loss(functional_call(self.net, adapted, (query[:, :6],)), query[:, 6:])


def maml() -> Case:
    return MAML(), {"support": random(BATCH, 7), "query": random(BATCH, 7, seed=2)}, None


def pinn() -> Case:
    """The heat equation's residual by second derivatives with respect to inputs."""
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        x, t = b["x"].requires_grad_(), b["t"].requires_grad_()
        u = model(torch.cat([x, t], 1))
        u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        start = model(torch.cat([b["x"], torch.zeros_like(b["t"])], 1))
        return (u_t - 0.1 * u_xx).square().mean() + (start - torch.sin(math.pi * b["x"])).square().mean()

    return model, {"x": random(BATCH, 1), "t": random(BATCH, 1, seed=2).sigmoid()}, loss


class HyperNetwork(nn.Module):
    """Weights of a layer, for every sample others, made by another layer."""

    def __init__(self, width: int = 12, hidden: int = 24):
        super().__init__()
        self.task, self.width, self.hidden = nn.Embedding(6, 12), width, hidden
        self.make = nn.Linear(12, hidden * width + hidden)
        self.head = nn.Linear(hidden, 12)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        weight, bias = self.make(self.task(task)).split([self.hidden * self.width, self.hidden], 1)
        return self.head(F.relu(torch.bmm(weight.view(-1, self.hidden, self.width), x[..., None])[..., 0] + bias))


def hypernetwork() -> Case:
    batch = labelled(random(BATCH, 12)) | {"task": integers(BATCH, below=6)}
    return HyperNetwork(), batch, lambda model, b: F.cross_entropy(model(b["x"], b["task"]), b["labels"])


class WGAN(nn.Module):
    """A critic with gradient penalty (Gulrajani et al. 2017)."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(432, 1))

    def forward(self, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty


def wgan_gp() -> Case:
    batch = {"real": images(12), "fake": images(12, seed=3), "mix": random(BATCH, 1, 1, 1).sigmoid()}
    return WGAN(), batch, None


# ---- graphs, points, rays -----------------------------------------------------------------------------------------


def edges(nodes: int, count: int) -> Tensor:
    """(2, count) sources and destinations of a random graph."""
    return torch.stack([integers(count, below=nodes, seed=i) for i in (5, 6)])


class GCN(nn.Module):
    """Graph convolutions over one graph (Kipf and Welling 2017); sums with index_add."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, width, bias=False), nn.Linear(width, 6, bias=False)])

    def forward(self, x: Tensor, edge_index: Tensor, labels: Tensor) -> Tensor:
        source, target = edge_index
        degree = torch.ones(len(x)).index_add(0, target, torch.ones(len(target)))
        norm = degree.rsqrt()[source] * degree.rsqrt()[target]
        for i, layer in enumerate(self.layers):
            h = layer(x)
            x = (h / degree[:, None]).index_add(0, target, norm[:, None] * h[source])
            x = x.relu() if i == 0 else x
        return F.cross_entropy(x, labels)


def gcn() -> Case:
    batch = {"x": random(24, 12), "edge_index": edges(24, 60), "labels": integers(24, below=6)}
    return GCN(), batch, None


class GAT(nn.Module):
    """Graph attention (Velickovic et al. 2018); a softmax over the edges into each node, with scatter operators."""

    def __init__(self, heads: int = 3, width: int = 8):
        super().__init__()
        self.heads, self.width = heads, width
        self.project, self.head = nn.Linear(12, heads * width, bias=False), nn.Linear(heads * width, 6)
        self.source = nn.Parameter(0.1 * torch.randn(heads, width))
        self.target = nn.Parameter(0.1 * torch.randn(heads, width))

    def forward(self, x: Tensor, edge_index: Tensor, labels: Tensor) -> Tensor:
        source, target = edge_index
        h = self.project(x).view(-1, self.heads, self.width)
        score = F.leaky_relu((h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target], 0.2)
        index = target[:, None].expand_as(score)
        largest = torch.full((len(x), self.heads), -torch.inf).scatter_reduce(0, index, score.detach(), "amax")
        weight = (score - largest[target]).exp()
        total = torch.zeros(len(x), self.heads).scatter_add(0, index, weight)
        out = torch.zeros_like(h).index_add(0, target, (weight / total[target])[..., None] * h[source])
        return F.cross_entropy(self.head(F.elu(out.flatten(1))), labels)


def gat() -> Case:
    batch = {"x": random(24, 12), "edge_index": edges(24, 60), "labels": integers(24, below=6)}
    return GAT(), batch, None


class SchNet(nn.Module):
    """Continuous filters over distances of atoms; forces are the energy's gradient (Schuett et al. 2018)."""

    def __init__(self, width: int = 12, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(12, width), nn.Softplus(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.atoms = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 1)
        self.register_buffer("centers", torch.linspace(0, 4, 12))

    def forward(self, kinds: Tensor, positions: Tensor) -> Tensor:
        """(batch, atoms), (batch, atoms, 3) -> (batch,) energies"""
        distance = ((positions[:, :, None] - positions[:, None]).square().sum(-1) + 1e-6).sqrt()
        basis = torch.exp(-2 * (distance[..., None] - self.centers).square())
        apart = 1 - torch.eye(kinds.shape[1])[..., None]
        x = self.embed(kinds)
        for radial, atom in zip(self.filters, self.atoms, strict=True):
            x = x + atom((radial(basis) * apart * x[:, None]).sum(2))
        return self.head(x).sum((1, 2))


def schnet() -> Case:
    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        positions = b["positions"].requires_grad_()
        energy = model(b["kinds"], positions)
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
        return F.mse_loss(energy, b["energy"]) + F.mse_loss(forces, b["forces"])

    batch = {"kinds": integers(BATCH, 6, below=6), "positions": random(BATCH, 6, 3), "energy": random(BATCH),
             "forces": random(BATCH, 6, 3, seed=2)}  # fmt: skip
    return SchNet(), batch, loss


class PointNet(nn.Module):
    """A learned transform, shared MLPs with batch norm, and a maximum over points (Qi et al. 2017)."""

    def __init__(self, width: int = 24):
        super().__init__()

        def shared(i: int, o: int) -> nn.Module:
            return nn.Sequential(nn.Conv1d(i, o, 1), nn.BatchNorm1d(o), nn.ReLU())

        self.transform, self.rotate = nn.Sequential(shared(3, width), shared(width, width)), nn.Linear(width, 9)
        self.body, self.head = nn.Sequential(shared(3, width), shared(width, 2 * width)), nn.Linear(2 * width, 12)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.rotate(self.transform(x).max(2).values).view(-1, 3, 3) + torch.eye(3)
        return self.head(self.body(torch.bmm(matrix, x)).max(2)[0])


def pointnet() -> Case:
    return PointNet(), labelled(random(BATCH, 3, 18)), classes


class NeRF(nn.Module):
    """A radiance field rendered along rays (Mildenhall et al. 2020); depths come with the batch."""

    def __init__(self, width: int = 24, frequencies: int = 4):
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(frequencies))
        self.trunk = nn.Sequential(nn.Linear(3 + 6 * frequencies, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.density, self.color = nn.Linear(width, 1), nn.Sequential(nn.Linear(width + 3, 3), nn.Sigmoid())

    def forward(self, origins: Tensor, directions: Tensor, depths: Tensor) -> Tensor:
        points = origins[:, None] + depths[..., None] * directions[:, None]
        angles = (points[..., None] * self.frequencies).flatten(-2)
        h = self.trunk(torch.cat([points, angles.sin(), angles.cos()], -1))
        density = F.softplus(self.density(h)[..., 0])
        color = self.color(torch.cat([h, directions[:, None].expand_as(points)], -1))
        gaps = torch.cat([depths.diff(dim=1), torch.full_like(depths[:, :1], 1e2)], 1)
        alpha = 1 - torch.exp(-density * gaps)
        light = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return ((alpha * light)[..., None] * color).sum(1)


def nerf() -> Case:
    batch = {
        "origins": random(BATCH, 3), "directions": F.normalize(random(BATCH, 3, seed=2), dim=-1),
        "depths": random(BATCH, 12, seed=3).abs().sort(1).values, "target": random(BATCH, 3, seed=4).sigmoid(),
    }  # fmt: skip
    return NeRF(), batch, mean_squared("", "target")


# ---- recommendation -----------------------------------------------------------------------------------------------


class WideAndDeep(nn.Module):
    """Wide & Deep with a factorization machine (DeepFM) and cross layers (DCN v2)."""

    def __init__(self, fields: int = 4, rows: int = 48, width: int = 6):
        super().__init__()
        self.register_buffer("offsets", torch.arange(fields) * rows)
        self.wide, self.deep = nn.Embedding(fields * rows, 1), nn.Embedding(fields * rows, width)
        n = fields * width
        self.mlp = nn.Sequential(nn.Linear(n, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 1))
        self.cross = nn.ModuleList(nn.Linear(n, n) for _ in range(2))
        self.head = nn.Linear(n, 1)

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids + self.offsets
        v = self.deep(ids)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        x0 = x = v.flatten(1)
        for layer in self.cross:
            x = x0 * layer(x) + x
        return self.wide(ids).sum((1, 2)) + pairs + self.mlp(x0)[:, 0] + self.head(x)[:, 0]


def wide_and_deep() -> Case:
    batch = {"ids": integers(BATCH, 4, below=48), "clicked": integers(BATCH, below=2).float()}
    return WideAndDeep(), batch, lambda model, b: F.binary_cross_entropy_with_logits(model(b["ids"]), b["clicked"])


MODELS: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (s4d, ctc, tcn, wavenet, gru_seq2seq, transformer_xl, unet, gan, vae, vq_vae, moco, byol, mlp_mixer,
                 conv_lstm, capsules, siamese, real_nvp, deq, neural_ode, maml, pinn, hypernetwork, wgan_gp, gcn, gat,
                 schnet, pointnet, nerf, wide_and_deep)
}  # fmt: skip

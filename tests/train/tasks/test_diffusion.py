import diffusers
import numpy as np
import pytest
import torch
from torch import nn

import tutti
from tiny_models import colors, unet
from tutti.data.rows import Numbered
from tutti.train.tasks import get_task
from tutti.train.tasks.diffusion import STEPS, TextToImage, alphas

MEAN, DEVIATION = 0.7, 0.4


class Gaussian(nn.Module):
    """The best denoiser of data from N(0.7, 0.4^2): the conditional mean of the target, in closed form."""

    def __init__(self, prediction):
        super().__init__()
        self.prediction, self.unused = prediction, nn.Parameter(torch.zeros(()))

    def forward(self, x, time):
        time = time.view(-1, 1, 1, 1)
        if self.prediction == "flow":
            u = time / STEPS
            a, s = 1 - u, u
        else:
            square = alphas("squaredcos_cap_v2")[time.long()]
            a, s = square.sqrt(), (1 - square).sqrt()
        spread = a**2 * DEVIATION**2 + s**2
        noise = s * (x - a * MEAN) / spread
        data = MEAN + a * DEVIATION**2 * (x - a * MEAN) / spread
        return {"epsilon": noise, "v": a * noise - s * data, "flow": noise - data}[self.prediction]


@pytest.mark.parametrize("prediction", ("epsilon", "v", "flow"))
def test_the_closed_form_for_gaussian_data_has_the_least_loss_and_samples_the_data(prediction):
    task, model = get_task("diffusion", image="latents", prediction=prediction), Gaussian(prediction)
    torch.manual_seed(0)
    x = MEAN + DEVIATION * torch.randn(20_000, 1, 1, 1)

    def loss(model):
        torch.manual_seed(1)
        return task.loss(model, {"pixel_values": x})

    class Scaled(Gaussian):
        factor = 1.0

        def forward(self, x, time):
            return self.factor * super().forward(x, time)

    least = loss(model)
    for factor in (0.95, 1.05):
        other = Scaled(prediction)
        other.factor = factor
        assert loss(other) > least
    samples = task.sample(model, (4000, 1, 1, 1), steps=100)
    assert abs(samples.mean() - MEAN) < 0.03 and abs(samples.std() - DEVIATION) < 0.03


def test_what_the_loss_draws_agrees_with_the_schedulers_of_diffusers():
    x, noise, uniform = torch.randn(5, 3, 2, 2), torch.randn(5, 3, 2, 2), torch.rand(5)
    time = (uniform * 1000).long()
    sampler = diffusers.DDPMScheduler(beta_schedule="linear")
    noised, target, at = get_task("diffusion", schedule="linear").noised(x, noise, uniform)
    assert (at == time).all() and (target == noise).all()
    torch.testing.assert_close(noised, sampler.add_noise(x, noise, time))
    _, v, _ = get_task("diffusion", schedule="linear", prediction="v").noised(x, noise, uniform)
    torch.testing.assert_close(v, sampler.get_velocity(x, noise, time))
    noised, flow, at = get_task("diffusion", prediction="flow").noised(x, noise, uniform)
    torch.testing.assert_close(noised - flow * (at / 1000).view(-1, 1, 1, 1), x)


def test_noise_and_timesteps_do_not_depend_on_the_devices():
    def losses(cluster, plan):
        torch.manual_seed(0)
        model, batch = nn.Conv2d(1, 1, 3, padding=1), {"pixel_values": torch.rand(8, 1, 4, 4)}
        task = get_task("diffusion", image="latents")

        class Denoiser(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = model

            def forward(self, x, time):
                return self.inner(x) * (time / STEPS).view(-1, 1, 1, 1)

        denoiser = Denoiser()
        optimizer = torch.optim.SGD(denoiser.parameters(), 0.1)
        step = tutti.parallelize(
            denoiser, optimizer, batch, loss=task.loss, cluster=cluster, plan=plan, level="O0", seed=3
        )
        return [step(batch).item() for _ in range(3)]

    one, two = losses("cpu:1", "dp"), losses("cpu:2", "dp2")
    assert one == pytest.approx(two, rel=1e-5) and len({round(x, 4) for x in one}) == 3


def test_conditions_are_dropped_by_the_sample(tokenizer):
    task = get_task("diffusion", size=8, label="label", drop=0.3, classes=2)
    features, collate = Numbered(task.prepare(colors(300), None)), task.collator(None)
    labels = collate([features[i] for i in range(300)])["class_labels"]
    dropped = labels == 2
    assert abs(dropped.float().mean() - 0.3) < 0.08
    assert (labels[~dropped] == torch.arange(300)[~dropped] % 2).all()
    assert collate([features[7]])["class_labels"][0] == labels[7]
    text = get_task("diffusion", size=8, text="text", drop=0.5, length=6)
    features = Numbered(text.prepare(colors(40), tokenizer))
    ids = text.collator(tokenizer)([features[i] for i in range(40)])["input_ids"]
    empty = (ids == text.tokens([""], tokenizer)[0]).all(1)
    assert ids.shape == (40, 6) and 8 < empty.sum() < 32


def test_guidance_moves_away_from_the_prediction_without_a_condition():
    class Conditioned(Gaussian):
        def forward(self, x, time, class_labels):
            return super().forward(x, time) + 0.05 * (class_labels == 1).view(-1, 1, 1, 1)

    task = get_task("diffusion", prediction="flow", label="label", classes=2)
    model, labels = Conditioned("flow"), torch.ones(2, dtype=torch.long)
    plain, one, three = (
        task.sample(model, (2, 1, 1, 1), 20, labels=y, guidance=w)
        for y, w in ((torch.zeros_like(labels), 1), (labels, 1), (labels, 3))
    )
    moved = (three - plain) / (one - plain)
    torch.testing.assert_close(moved, torch.full_like(moved, 3.0), rtol=0.01, atol=0.01)


def test_options_that_do_not_fit_are_errors(tokenizer):
    with pytest.raises(ValueError, match="give classes: a dropped label becomes"):
        get_task("diffusion", label="label", drop=0.1)
    with pytest.raises(ValueError, match="prediction is 'x0'; it must be one of epsilon, v, flow"):
        get_task("diffusion", prediction="x0")
    with pytest.raises(ValueError, match="row 1: label is 1, and the model has 1 classes"):
        get_task("diffusion", label="label", classes=1).check(unet(), None, colors(2))
    with pytest.raises(ValueError, match="a text column and a TextToImage model belong together"):
        get_task("diffusion", text="text").check(unet(), tokenizer, colors(2))


def test_a_unet_learns_classes(train):
    task = get_task("diffusion", size=8, label="label", drop=0.1, classes=2)
    losses = train(task, unet(num_class_embeds=3), colors(16), None, steps=30)
    assert losses[0] > 0.8 and np.mean(losses[-5:]) < 0.4


def test_a_diffusion_transformer_learns_a_flow(train):
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=3, out_channels=6, num_layers=2, norm_num_groups=1,
        sample_size=8, patch_size=2, num_embeds_ada_norm=2,
    )  # fmt: skip
    task = get_task("diffusion", size=8, label="label", prediction="flow", classes=2)
    losses = train(task, model, colors(16), None, steps=40)
    assert losses[0] > 1.0 and np.mean(losses[-5:]) < 0.6


@pytest.mark.slow
def test_a_text_to_image_model_learns_and_samples(tokenizer, train):
    from tiny_models import clip

    model = TextToImage(
        unet("UNet2DConditionModel", cross_attention_dim=32, attention_head_dim=4), clip(tokenizer).text_model
    )
    task = get_task("diffusion", size=8, text="text", length=6, prediction="v", drop=0.1)
    losses = train(task, model, colors(16), tokenizer, steps=20)
    assert losses[0] > 0.5 and np.mean(losses[-5:]) < 0.7 * losses[0]
    images = task.sample(model, (2, 3, 8, 8), 3, texts=["red", "blue"], processor=tokenizer, guidance=2.0)
    assert images.shape == (2, 3, 8, 8) and images.isfinite().all()
    assert not any(p.requires_grad for p in model.text_encoder.parameters())


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_schedules_are_those_of_diffusers(schedule):
    wanted = diffusers.DDPMScheduler(num_train_timesteps=1000, beta_schedule=schedule).alphas_cumprod
    torch.testing.assert_close(alphas(schedule), wanted, rtol=1e-4, atol=1e-7)

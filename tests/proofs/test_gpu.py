"""On a GPU, steps at every level and under every plan train as plain PyTorch does, and the engine generates what
`transformers` generates."""

from __future__ import annotations

import pytest
import torch
import transformers

import tutti
import zoo

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # Inductor's advice differs between devices
    pytest.mark.starts,
]
STEPS = 3


def model() -> torch.nn.Module:
    return zoo.llama(2).cuda().train()


def batch() -> dict[str, torch.Tensor]:
    return {key: x.cuda() for key, x in zoo.tokens(4).items()}


def plain() -> list[float]:
    net, losses = model(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(STEPS):
        loss = net(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("level", "plan", "devices"),
    [
        ("O0", "single", 1),
        ("O1", "single", 1),
        ("O2", "single", 1),
        ("O0", "dp2", 2),
        ("O1", "tp2", 2),
        ("O0", "recompute", 1),
        ("O0", "offload", 1),
    ],
)
def test_steps_train_as_plain_pytorch_does(level, plan, devices):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    cluster = {"cluster": f"cpu:{devices}"} if devices > 1 else {}
    step = tutti.parallelize(net, optimizer, batch(), level=level, plan=plan, **cluster)
    assert [step(batch()).item() for _ in range(STEPS)] == pytest.approx(plain(), rel=1e-4)


def test_the_engine_generates_what_transformers_generates():
    from tutti.serve import Engine, Sampling

    net = zoo.llama(2).cuda().eval()
    prompts = [[1, 2, 3], [5, 6, 7, 8, 9]]
    outputs = Engine(net).generate(prompts, Sampling(max_tokens=12, temperature=0.0))
    assert isinstance(net, transformers.PreTrainedModel)
    for prompt, output in zip(prompts, outputs, strict=True):
        wanted = net.generate(torch.tensor([prompt]).cuda(), max_new_tokens=12, do_sample=False)
        assert list(output.tokens) == wanted[0, len(prompt) :].tolist()

"""Generalized knowledge distillation: its divergence, and a student that comes near its teacher."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import align_models as small
from tutti.align.algorithms.gkd import GKDConfig, GKDTrainer, jensen_shannon

ROWS = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i} is right"} for i in range(8)]


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_divergence(beta):
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    q, p = torch.softmax(student, -1), torch.softmax(teacher, -1)
    m = beta * p + (1 - beta) * q

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a / b).log()).sum(-1)

    expected = beta * kl(p, m) + (1 - beta) * kl(q, m)
    if beta in (0, 1):
        expected = kl(p, q) if beta == 0 else kl(q, p)
    divergence = jensen_shannon(student, teacher, beta)
    torch.testing.assert_close(divergence, expected)
    own, right = (torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (divergence, expected))
    torch.testing.assert_close(own, right)
    assert torch.autograd.gradcheck(lambda x: jensen_shannon(x, teacher, beta), (student,))
    assert bool((divergence >= 0).all()) and float(jensen_shannon(teacher, teacher, beta).abs().max()) < 1e-12


def test_divergence_of_certain_distributions_is_finite():
    student = torch.tensor([[0.0, -200.0]], requires_grad=True)
    for beta in (0.0, 0.5, 1.0):
        (gradient,) = torch.autograd.grad(jensen_shannon(student, torch.tensor([[-200.0, 0.0]]), beta).sum(), student)
        assert bool(gradient.isfinite().all())


def trainer_of(path: Any, rows: Any = ROWS, **more: Any) -> Any:
    options: dict[str, Any] = {
        "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "seed": 0,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "level": "O0", "plan": "single",
        "lr_scheduler_type": "constant", "max_completion_length": 12, **more,
    }  # fmt: skip
    return GKDTrainer(small.model(), small.model(seed=5), GKDConfig(str(path), **options), train_dataset=rows,
                      processing_class=small.tokenizer())  # fmt: skip


def logs(trainer: Any, name: str = "loss") -> list[float]:
    return [x[name] for x in trainer.state.log_history if name in x]


@pytest.mark.parametrize(("lmbda", "beta"), [(0.5, 0.5), (1.0, 1.0), (0.0, 0.0)])
def test_a_student_comes_near_its_teacher(lmbda, beta, tmp_path):
    trainer = trainer_of(tmp_path, lmbda=lmbda, beta=beta, max_steps=20)
    teacher = {name: x.clone() for name, x in trainer.model.teacher.state_dict().items()}
    trainer.train()
    losses, own = logs(trainer), logs(trainer, "on_policy")
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4]), losses
    assert sum(own) == 20 * lmbda if lmbda != 0.5 else 3 < sum(own) < 17
    after = {name.removeprefix("teacher."): x for name, x in trainer.model.state_dict().items() if "teacher." in name}
    assert all(torch.equal(x, after[name]) for name, x in teacher.items())
    trainer.save_model(str(tmp_path / "saved"))
    loaded = type(trainer.model).from_pretrained(tmp_path / "saved")
    assert not [name for name in loaded.state_dict() if "teacher" in name] and hasattr(trainer.model, "teacher")


def test_devices_change_nothing(tmp_path):
    whole, other = trainer_of(tmp_path / "a"), trainer_of(tmp_path / "b", plan="dp", cluster="cpu:2")
    whole.train()
    other.train()
    assert logs(other) == pytest.approx(logs(whole), abs=1e-5)


def test_the_divergence_of_completions_of_the_data_is_evaluated(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=4, lmbda=0.0)
    before = trainer.evaluate(ROWS)
    trainer.train()
    after = trainer.evaluate(ROWS)
    assert after["eval_loss"] < before["eval_loss"] and after["eval_divergence"] < before["eval_divergence"]
    with pytest.raises(ValueError, match="evaluation needs completion"):
        trainer_of(tmp_path, [{"prompt": "a"}], lmbda=1.0).evaluate([{"prompt": "a"}])


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="expected 0 to 1"):
        trainer_of(tmp_path, lmbda=1.5)
    with pytest.raises(ValueError, match="target_kl is of a divergence from a reference"):
        trainer_of(tmp_path, target_kl=0.1)
    with pytest.raises(ValueError, match="needs completion"):
        trainer_of(tmp_path, [{"prompt": "a"}]).train()
    with pytest.raises(ValueError, match="share a vocabulary"):
        GKDTrainer(small.model(), small.model(vocab_size=300), GKDConfig(str(tmp_path)), train_dataset=ROWS,
                   processing_class=small.tokenizer())  # fmt: skip

"""CTC losses that are torch's, also where all labels are one class."""

import torch

import tutti.nn.loss.ctc  # noqa: F401  (registers the operator)


def test_labels_of_one_class():
    log_probs = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    targets, lengths = torch.tensor([[3, 3], [3, 3]]), (torch.tensor([6, 6]), torch.tensor([2, 1]))
    loss = torch.ops.tutti.ctc_loss(log_probs, targets, *lengths, 0, False)[0]
    torch.testing.assert_close(loss, torch.nn.functional.ctc_loss(log_probs, targets, *lengths, reduction="none"))

"""A GPU stream for copies between device and host memory, which run while the GPU computes."""

from __future__ import annotations

import torch


class Stream:
    """Copies in the order of the calls. Computation runs on the caller's current stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self.copies = torch.cuda.Stream(device)

    def empty_like(self, x: torch.Tensor) -> torch.Tensor:
        """Device memory for a tensor."""
        return torch.empty_like(x, device=self.device)

    def copy(self, to: torch.Tensor, x: torch.Tensor, after: torch.Event | None = None) -> torch.Event:
        """Copy after an event, by default after all work that the device was given. Returns the event of its end.

        Device memory that is read is not reused before that. Host memory must not change before that, and must be
        pinned, or the process blocks.
        """
        self.copies.wait_event(after or self.now())
        with torch.cuda.stream(self.copies), torch.no_grad():
            to.copy_(x, non_blocking=True)
        if x.is_cuda:
            x.record_stream(self.copies)
        return self.copied()

    def now(self) -> torch.Event:
        """The end of all work that the device was given."""
        return torch.cuda.current_stream(self.device).record_event()

    def copied(self) -> torch.Event:
        """The end of all copies that have started."""
        return self.copies.record_event()

    def wait(self, event: torch.Event) -> None:
        """Make the device wait for an event. The process continues."""
        torch.cuda.current_stream(self.device).wait_event(event)

"""The stream of a GPU on which copies between its memory and the host's are made, while it computes on another."""

from __future__ import annotations

import torch


class Stream:
    """Copies in the order in which they are asked for. What computes is the current stream of whoever asks."""

    def __init__(self, device: torch.device):
        self.device = device
        self.copies = torch.cuda.Stream(device)

    def empty_like(self, x: torch.Tensor) -> torch.Tensor:
        """Memory of the device for a tensor."""
        return torch.empty_like(x, device=self.device)

    def copy(self, to: torch.Tensor, x: torch.Tensor, after: torch.Event | None = None) -> torch.Event:
        """Begin to copy after an event, or else after all that the device has been given to compute; when it is over.

        Memory of the device that is read is not used again before that. Memory of the host has to be pinned, or the
        process waits, and stays as it is until then.
        """
        self.copies.wait_event(after or self.now())
        with torch.cuda.stream(self.copies), torch.no_grad():
            to.copy_(x, non_blocking=True)
        if x.is_cuda:
            x.record_stream(self.copies)
        return self.copied()

    def now(self) -> torch.Event:
        """When all is over that the device has been given to compute."""
        return torch.cuda.current_stream(self.device).record_event()

    def copied(self) -> torch.Event:
        """When all copies are over that have been begun."""
        return self.copies.record_event()

    def wait(self, event: torch.Event) -> None:
        """Let the device compute no further before an event; the process goes on."""
        torch.cuda.current_stream(self.device).wait_event(event)

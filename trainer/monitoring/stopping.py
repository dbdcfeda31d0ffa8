"""A request to end early: SIGTERM or Ctrl-C. Between two steps all ranks agree on it, save, and end with code 0."""

import signal
import sys
from types import FrameType

import torch
import torch.distributed as dist


class StopRequest:
    """Heard at once while there is nothing to save, and at the end of the step while there is; a second one at once."""

    def __init__(self) -> None:
        self.asked = False
        self._training = False

    def listen(self) -> None:
        """Take over SIGTERM and SIGINT, from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait_for_step(self, training: bool) -> None:
        """From now on a request waits for the end of the step, or does not."""
        self._training = training

    def agreed(self) -> bool:
        """Whether any rank was asked. A collective, and a barrier."""
        asked = torch.tensor([self.asked], dtype=torch.int64)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked.item())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self._training:
            sys.exit(0)
        self.asked = True

"""Requests to end early, by SIGTERM or Ctrl-C. Between two steps all ranks agree on one, save, and exit with
128 + the signal's number, so that schedulers do not take the run for done.

SIGTERM may come several times, from a supervisor and from a scheduler that signals every process, and is one request.
"""

import signal
import sys
from types import FrameType

import torch
import torch.distributed as dist

from rl_async.errors import EXIT_SIGNAL
from rl_async.process.role import heeded


class StopRequest:
    """Ends the process at once while there is nothing to save, else at the end of the step.

    A Ctrl-C after a request ends it at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self.code = EXIT_SIGNAL + signal.SIGTERM  # to exit with; another rank may have had the signal
        self._training = False

    def listen(self) -> None:
        """Install the handlers of SIGTERM and SIGINT, unless ignored; call it in the main thread."""
        for number in heeded(signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait_for_step(self, training: bool) -> None:
        """Choose whether a request waits for the end of the step from now on."""
        self._training = training

    def agreed(self) -> bool:
        """Return whether any rank received a request. A collective, and a barrier."""
        requested = torch.tensor([self.requested], dtype=torch.int64)
        dist.all_reduce(requested, dist.ReduceOp.MAX)
        return bool(requested.item())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.requested and number == signal.SIGINT
        self.code = EXIT_SIGNAL + number
        self.requested = True  # even now: Python drops what a handler raises in the callback of a weak reference
        if again or not self._training:
            sys.exit(self.code)

"""The tokens of one row: those given to the policy, and those that it sampled."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_async.messages import VersionRun
from rl_async.rollout_server.api import GenerateResult


class RowTokens:
    """An append-only sequence of tokens with loss mask, log-probabilities and versions."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.token_ids: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[VersionRun] = []
        self._sampled = 0
        self.add(token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample; they are masked out of the loss."""
        self.token_ids += token_ids
        self._mask += [False] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)

    def add_sampled(self, result: GenerateResult) -> None:
        """Append sampled tokens exactly as an engine returned them, merging runs of one version."""
        self.token_ids += result.token_ids
        self._mask += [True] * len(result.token_ids)
        self._logprobs += result.logprobs
        for run in result.versions:
            start, end = self._sampled + run.start, self._sampled + run.end
            if self._versions and self._versions[-1].version == run.version:
                start = self._versions.pop().start
            self._versions.append(VersionRun(run.version, start, end))
        self._sampled += len(result.token_ids)

    def arrays(self) -> dict[str, Any]:
        """Return the fields token_ids, loss_mask, logprobs and versions of a Trajectory."""
        return {
            "token_ids": np.array(self.token_ids, np.int32),
            "loss_mask": np.array(self._mask, np.bool_),
            "logprobs": np.array(self._logprobs, np.float32),
            "versions": list(self._versions),
        }

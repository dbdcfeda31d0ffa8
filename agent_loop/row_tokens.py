"""One row in the making: its turns, the tokens given to the policy, and those that it sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_async.messages import LeasedGroup, Media, Sampling, Trajectory, Turn, VersionRun
from rl_async.rollout_server.api import GenerateResult, Image


class RowTokens:
    """An append-only sequence of tokens with loss mask, log-probabilities and versions.

    ``sampled`` counts the policy's own tokens, and ``routed`` the first tokens with a record of their experts.
    ``images`` are those among its tokens, in order.
    """

    def __init__(self, token_ids: Sequence[int] = (), images: Sequence[Image] = ()) -> None:
        self.token_ids: list[int] = []
        self.images: list[Image] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[VersionRun] = []
        self._constrained: list[tuple[int, int]] = []
        self._experts: list[np.ndarray] = []
        self._kept: list[list[int]] = []
        self.sampled = self.routed = 0
        self.add(token_ids, images)

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, token_ids: Sequence[int], images: Sequence[Image] = ()) -> None:
        """Append tokens that the policy did not sample; they are masked out of the loss.

        ``images`` are those among them, at their positions in the row.
        """
        self.images += images
        self.token_ids += token_ids
        self._mask += [False] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)

    def add_sampled(self, result: GenerateResult, *, constrained: bool = False) -> None:
        """Append sampled tokens exactly as an engine returned them, merging runs of one version.

        They are ``constrained`` if a grammar's mask restricted the sampling.
        """
        self.token_ids += result.token_ids
        self._mask += [True] * len(result.token_ids)
        self._logprobs += result.logprobs
        for run in result.versions:
            start, end = self.sampled + run.start, self.sampled + run.end
            if self._versions and self._versions[-1].version == run.version:
                start = self._versions.pop().start
            self._versions.append(VersionRun(run.version, start, end))
        if constrained and result.token_ids:
            self._constrained.append((self.sampled, self.sampled + len(result.token_ids)))
        self.sampled += len(result.token_ids)
        self._kept += [sorted(token for token, _ in place) for place in result.alternatives]
        if result.routes is not None and result.routes.start <= self.routed:
            # The first record of a token stays.
            new = result.routes.experts[self.routed - result.routes.start :]
            self._experts.append(new)
            self.routed += len(new)

    def arrays(self) -> dict[str, Any]:
        """Return these fields of a Trajectory: token_ids, loss_mask, logprobs, versions, constrained, media,
        routed_experts, and kept_tokens if the sampler truncates."""
        kept = np.full((len(self._kept), max(map(len, self._kept), default=0)), -1, np.int32)
        for row, tokens in zip(kept, self._kept, strict=True):
            row[: len(tokens)] = tokens
        return {
            "token_ids": np.array(self.token_ids, np.int32),
            "loss_mask": np.array(self._mask, np.bool_),
            "logprobs": np.array(self._logprobs, np.float32),
            "versions": list(self._versions),
            "constrained": list(self._constrained),
            "media": [Media(sha256=image.sha256, mime=image.mime, position=image.position) for image in self.images],
            "routed_experts": np.concatenate(self._experts) if self._experts else None,
            "kept_tokens": kept if self._kept else None,
        }


@dataclass
class Segment:
    """A row in the making: one unbroken history of an episode."""

    tokens: RowTokens
    turns: list[Turn] = field(default_factory=list)
    finish_reason: str = ""


def trajectories(
    rows: Sequence[Segment],
    group: LeasedGroup,
    sample: int,
    *,
    episode_id: str,
    sampling: Sampling,
    timings: Mapping[str, float],
    role: str = "",
    baseline: bool = False,
) -> list[Trajectory]:
    """Return the rows of a conversation to train on, without a reward."""
    trains = group.partition == "train" and not baseline
    return [
        Trajectory(
            task_id=group.task.task_id,
            group_id=group.group_id,
            sample=sample,
            attempt=group.attempt,
            episode_id=episode_id,
            segment=segment,
            role=role,
            partition=group.partition,
            **row.tokens.arrays()
            | ({} if trains else {"routed_experts": None})
            | ({} if trains and sampling.truncating else {"kept_tokens": None}),
            sampling=sampling,
            reward=0.0,
            baseline=baseline,
            finish_reason=row.finish_reason,
            turns=row.turns,
            timings=dict(timings),
            ground_truth=group.task.ground_truth,
            data_source=group.task.data_source,
        )
        for segment, row in enumerate(rows)
    ]

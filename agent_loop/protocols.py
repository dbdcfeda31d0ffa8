"""What agent workers and gateways need of the transfer queue and of the reward service."""

from collections.abc import Awaitable
from typing import Protocol

from rl_async.messages import Done, Leased, LeasedGroup, Refused, Renewed, SampleKey, Task, Trajectory


class SampleQueue(Protocol):
    """The agents' verbs of the transfer queue."""

    async def lease(self, max_groups: int, wait_s: float) -> Leased: ...
    async def renew(self, held: list[SampleKey]) -> Renewed: ...
    def put(self, *rows: Trajectory) -> Awaitable[Done | Refused]: ...
    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done | Refused: ...


class GatewayQueue(SampleQueue, Protocol):
    """A gateway's verbs: its leases say for how long no agent program has played or asked."""

    async def lease(self, max_groups: int, wait_s: float, *, idle_s: float | None = None) -> Leased: ...


class Runner(Protocol):
    """Plays the episodes of an agent worker."""

    async def run(self, group: LeasedGroup, sample: int) -> list[Trajectory]:
        """Return the rows of one sample, which are not scored yet. What it raises is reported to the queue."""
        ...


class RewardScorer(Protocol):
    """Fills in a trajectory's reward, and gives it to the other rows of its episode."""

    async def score(self, task: Task, trajectory: Trajectory, *others: Trajectory) -> None: ...

"""What a simulated run has used up: the share of each resource, and which of them saturates first.

A share is of the time of a step; 1 means that the step cannot be shorter without more of that resource. What bounds a
step is a sum of several if they take turns (``max_staleness=0``), so the largest share need not be near 1.
"""

from collections.abc import Sequence

import msgspec

from rl_async.launcher.capacity.costs import Costs, EpisodeShape
from rl_async.launcher.capacity.simulation import DeviceSplit, SimulationResult

# The queue's process, on a core of 2.6 GHz: docs/explanation/queue_speed.md. The first two are of
# ``python -m benchmarks.scale --workers 10000``: a group of 8 rows with its worker's polls and renewals, and a worker
# with nothing to do; the third of ``python -m benchmarks.transfer_queue``, from rows of 1,536 and of 32,768 tokens.
QUEUE_ROW_S = 1.0e-4
QUEUE_WORKER_S = 4.0e-5  # in each second
QUEUE_TOKEN_S = 1.8e-8


class Saturation(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a step's time, by resource.

    ``longest_answer``: the longest episode of a batch, decoded alone, without its tools; ``tools``: the tools of the
    episode that spends most time in them. Both may last for as many steps as the bound on staleness allows.
    """

    trainer: float
    engines: float  # of the tokens per second that full batches would yield
    queue: float  # of one processor
    publication: float  # in which engines and trainer wait for the weights
    longest_answer: float
    tools: float

    @property
    def first(self) -> str:
        """The name of the largest share."""
        shares = msgspec.structs.asdict(self)
        return max(shares, key=shares.__getitem__).replace("_", " ")

    @property
    def largest(self) -> float:
        """The largest share."""
        return max(msgspec.structs.astuple(self))


def saturation(
    costs: Costs,
    episodes: Sequence[EpisodeShape],
    layout: DeviceSplit,
    bound: int,
    rows: int,
    workers: int,
    outcome: SimulationResult,
) -> Saturation:
    """What a simulated run with this bound on staleness and ``rows`` in a batch has used of each resource."""
    tokens = sum(episode.tokens for episode in episodes) / len(episodes)
    sampled = sum(episode.sampled for episode in episodes) / len(episodes)
    rows_per_s = rows / outcome.step_s
    row_tokens = outcome.tokens_per_s / rows_per_s  # those of the simulated batches
    most = layout.engines * layout.max_batch / costs.iteration_s(layout.max_batch)
    within = (bound + 1) * outcome.step_s
    answers = [episode.turns * costs.turn_s + episode.sampled * costs.iteration_s(1) for episode in episodes]
    return Saturation(
        trainer=row_tokens * rows * costs.train_token_s / layout.ranks / outcome.step_s,
        engines=outcome.tokens_per_s * sampled / tokens / most,
        queue=rows_per_s * (QUEUE_ROW_S + row_tokens * QUEUE_TOKEN_S) + workers * QUEUE_WORKER_S,
        publication=costs.sync_s / outcome.step_s,
        longest_answer=longest(answers, rows) / within,
        tools=longest([episode.outside_s for episode in episodes], rows) / within,
    )


def longest(seconds: Sequence[float], rows: int) -> float:
    """The mean of the longest among so many draws, with replacement."""
    ordered = sorted(seconds)
    count = len(ordered)
    below = [(place / count) ** rows for place in range(count + 1)]  # the chance that all are so short
    return sum(each * (below[place + 1] - below[place]) for place, each in enumerate(ordered))

"""reasoning-gym's own scorers, for tasks that came from it."""

import functools
from typing import Any

from rl_async.reward_loop.api import Conversation, ScorerFailed

DATASET_ROWS = 1_000_000  # the data sets have no end; a row depends on its number and the seed, not on this


@functools.cache
def open_dataset(dataset: str, seed: int) -> Any:
    """A data set of reasoning-gym. Raises ModuleNotFoundError without the package, ValueError for unknown names."""
    import reasoning_gym

    return reasoning_gym.create_dataset(dataset, size=DATASET_ROWS, seed=seed)


def score(conversation: Conversation) -> float:
    """What reasoning-gym gives for the answer, 0 to 1. The task is made again from ``extra_info``."""
    extra = conversation.extra_info
    if not {"dataset", "seed", "index"} <= extra.keys():
        raise ScorerFailed("needs a task of a reasoning_gym:NAME source (extra_info: dataset, seed, index)")
    dataset = open_dataset(extra["dataset"], extra["seed"])
    try:
        return float(dataset.score_answer(conversation.solution_str.strip(), dataset[extra["index"]]))
    except ValueError:  # some scorers raise on an answer that is not a number
        return 0.0

"""reasoning-gym's own scorers, for tasks that came from it."""

import functools
import json
from typing import Any

from rl_async.reward_loop.api import Conversation, ScorerFailed

_FROM = ("dataset", "rows", "seed", "index")  # the keys of extra_info that say which row of which data set it was


def score(conversation: Conversation) -> float:
    """Return reasoning-gym's score of the answer, 0 to 1. The task is generated again from ``extra_info``."""
    if any(key not in conversation.extra_info for key in _FROM):
        raise ScorerFailed(f"needs a task of a reasoning_gym:NAME source (extra_info: {', '.join(_FROM)})")
    name, rows, seed, index = (conversation.extra_info[key] for key in _FROM)
    dataset = _open(name, rows, seed, json.dumps(conversation.extra_info.get("parameters") or {}, sort_keys=True))
    try:
        return float(dataset.score_answer(conversation.solution_str.strip(), dataset[index]))
    except ValueError:  # some scorers raise on an answer that is not a number
        return 0.0


@functools.cache
def _open(name: str, rows: int, seed: int, parameters: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=rows, seed=seed, **json.loads(parameters))

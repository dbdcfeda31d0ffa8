"""The scorers by name, and users' own reward functions.

A user's function has verl's signature, with keyword arguments: ``def compute_score(data_source, solution_str,
ground_truth, extra_info)``; it may omit parameters that it does not need, and add ``turns`` and ``finish_reason``. It
returns a number, or a mapping with ``score`` and further numbers to record. ``async def`` functions are awaited beside
each other in a process of their own; others may block, so they have processes that score one conversation at a time.
"""

import functools
import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from rl_async.errors import ConfigError, DataError
from rl_async.reward_loop.api import ENVIRONMENT, Conversation, ScorerFailed
from rl_async.reward_loop.scorers import math
from rl_async.userload import is_user_reference, load_user_object, raised_at

# The keys of extra_info that name the data set and the row of a reasoning-gym task.
_FROM = ("dataset", "rows", "seed", "index")


def score_by_reasoning_gym(conversation: Conversation) -> float:
    """Return reasoning-gym's score of the answer, 0 to 1. The task is generated again from ``extra_info``."""
    if any(key not in conversation.extra_info for key in _FROM):
        raise ScorerFailed(f"needs a task of a reasoning_gym:NAME source (extra_info: {', '.join(_FROM)})")
    name, rows, seed, index = (conversation.extra_info[key] for key in _FROM)
    dataset = _open_dataset(
        name, rows, seed, json.dumps(conversation.extra_info.get("parameters") or {}, sort_keys=True)
    )
    try:
        return float(dataset.score_answer(conversation.solution_str.strip(), dataset[index]))
    # Some scorers raise on an answer that is not a number.
    except ValueError:
        return 0.0


@functools.cache
def _open_dataset(name: str, rows: int, seed: int, parameters: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=rows, seed=seed, **json.loads(parameters))


KEY = "reward.functions"
_FIELDS = Conversation.__struct_fields__
# Descriptions quote so many characters of an error.
MOST_SAID = 2000


class ScorerSpec(NamedTuple):
    """A function of one conversation, and where it runs.

    An ``inline`` function is quick and called on the event loop; a ``process`` function may block and gets a process.
    ``awaited`` coroutine functions share a process; ``served`` ones ask a server and limit their rate themselves.
    """

    name: str
    function: Callable[[Conversation], Any]
    place: Literal["inline", "awaited", "process", "served"]


def exact_answer(conversation: Conversation) -> float:
    """Return 1 if the model's last answer equals the ground truth, ignoring surrounding white space; else 0.

    Raises DataError for an empty ground truth, which an answer that was cut off would equal.
    """
    if not (truth := conversation.ground_truth.strip()):
        raise DataError(f"{conversation.place} is empty, so the scorer exact_answer has nothing to compare with")
    return float(conversation.solution_str.strip() == truth)


def environment(conversation: Conversation) -> Mapping[str, float]:
    """Return the reward of the episode's environment."""
    if "score" not in conversation.environment:
        raise ScorerFailed("the episode's environment gave no reward: it has neither reward() nor step()")
    return conversation.environment


BUILT_IN: dict[str, ScorerSpec] = {
    "exact_answer": ScorerSpec("exact_answer", exact_answer, "inline"),
    "math": ScorerSpec("math", math.score, "process"),
    "reasoning_gym": ScorerSpec("reasoning_gym", score_by_reasoning_gym, "process"),
    ENVIRONMENT: ScorerSpec(ENVIRONMENT, environment, "inline"),
}
# Scorers that the service makes, and the sections of `reward` that they need.
SERVED = {"reward_model": "model", "judge": "judge", "code": "code"}
# Scorers with an optional dependency: its module, and the extra that installs it.
_NEEDS = {"reasoning_gym": ("reasoning_gym", "reasoning-gym")}


def get_scorer(name: str) -> ScorerSpec:
    """Return a built-in scorer or the user's ``path.py:name``. Raises ConfigError if it, or its package, is missing."""
    if is_user_reference(name):
        function = load_user_object(name, KEY)
        place: Literal["awaited", "process"] = "awaited" if _is_asynchronous(function) else "process"
        return ScorerSpec(name, _by_keyword(name, function), place)
    if name in SERVED:
        raise ConfigError(f"{KEY}: {name} needs the section reward.{SERVED[name]}")
    if name not in BUILT_IN:
        raise ConfigError(
            f"{KEY}: no scorer {name!r}; built in: {', '.join([*BUILT_IN, *SERVED])}; or path.py:function"
        )
    if name in _NEEDS:
        module, extra = _NEEDS[name]
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"{KEY}: {name} needs `pip install rl-async[{extra}]`")
    return BUILT_IN[name]


def _is_asynchronous(function: Any) -> bool:
    """Whether a function is a coroutine function, also behind decorators, or an object with ``async __call__``."""
    plain = inspect.unwrap(function) if callable(function) else function
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


def _by_keyword(name: str, function: Any) -> Callable[[Conversation], Any]:
    """Wrap ``function`` to be called with the fields of a conversation that it has parameters for."""
    if not callable(function):
        raise ConfigError(f"{KEY}: {name} is not a function")
    parameters = inspect.signature(function).parameters.values()
    wanted = [field for field in _FIELDS if any(p.name == field or p.kind is p.VAR_KEYWORD for p in parameters)]
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if required and (parameter.name not in _FIELDS or parameter.kind is parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"{KEY}: {name} has the parameter {parameter.name!r}; a reward function may have {', '.join(_FIELDS)}"
            )

    def call(conversation: Conversation) -> Any:
        return function(**{field: getattr(conversation, field) for field in wanted})

    return call


def describe(error: BaseException) -> str:
    """Describe a scorer's error in one line, with the file and line that raised it."""
    if isinstance(error, ScorerFailed):
        return str(error)
    try:
        said = str(error)[:MOST_SAID]
    except BaseException as another:
        said = f"with a text that raised {type(another).__name__}"
    text = " ".join(f"raised {type(error).__name__}: {said}".rstrip(": ").split()) + f" ({raised_at(error)})"
    # A lone surrogate could not be sent.
    return text.encode(errors="replace").decode()

"""The user's function that grades an episode: ``FUNCTION(workspace, task, stdout)``, and by name, if it has such
parameters, ``exit_code`` and ``stderr``."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_async.errors import ConfigError
from rl_async.launcher.play.program import Outcome
from rl_async.reward_loop.api import REWARD, Score, to_score
from rl_async.reward_loop.scorers.scorer_registry import describe
from rl_async.userload import load_user_object

KEY = "--reward"
DEFAULT = "grade"  # name of the function where only a file is given
Grade = Callable[..., Any]
BY_NAME = ("exit_code", "stderr")


class CannotGrade(Exception):
    """The user's function raised, or returned no usable number; the message says which."""


def load_grade(reference: str) -> Grade:
    """Load ``path.py:name``, or ``grade`` of ``path.py``. Raises ConfigError if it is missing or no function."""
    reference = f"{reference}:{DEFAULT}" if reference.endswith(".py") else reference
    try:
        function = load_user_object(reference, KEY)
    except ConfigError:
        raise
    except Exception as error:  # importing a user's file may raise anything
        raise ConfigError(f"{KEY}: loading {reference} raised {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"{KEY}: {reference} is not a function of workspace, task and stdout")
    loaded: Grade = function
    return loaded


def grade(function: Grade, workspace: Path, task: dict[str, Any], ended: Outcome) -> Score:
    """Grade an episode: a number, or a mapping with ``score``, further numbers and a ``reason`` to record.

    Raises CannotGrade.
    """
    try:
        asked = {name: getattr(ended, name) for name in BY_NAME if name in inspect.signature(function).parameters}
        score = to_score(function(workspace, task, ended.stdout, **asked))
    except Exception as error:  # the user's code may raise anything; only this episode fails
        raise CannotGrade(describe(error)) from error
    if REWARD in score.extra:
        raise CannotGrade(f"returned a number called {REWARD!r}, which is the name of the whole; call it another")
    return score

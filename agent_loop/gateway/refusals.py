"""Errors as refusals, which each dialect puts into its own shape, and what to use instead of what is not served."""

import re
from typing import NamedTuple

from rl_async.errors import EngineLost, EngineRejected, QueueLost, RequestRefused

FAILURES = (RequestRefused, RecursionError, EngineRejected, EngineLost, QueueLost)


def refusal(error: Exception) -> RequestRefused:
    """Return what a client is told: a lost engine may be asked again (503), a rejected request may not (400)."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, RecursionError):
        return RequestRefused("the request is nested too deeply", code="invalid_request")
    if isinstance(error, EngineRejected):
        return RequestRefused(str(error), code="engine_rejected")
    return RequestRefused(str(error), code=type(error).__name__, status=503)


class _Hint(NamedTuple):
    pattern: re.Pattern[str]
    text: str


_CHAT = "chat/completions, responses, completions and messages under an episode's base URL"
_HINTS = tuple(
    _Hint(re.compile(pattern), text)
    for pattern, text in (
        (r"/embeddings$", "the policy embeds nothing; use an embedding service of its own"),
        (r"/v1(beta|alpha)\d*/", f"Gemini's dialect is not served; use a client of OpenAI or Anthropic: {_CHAT}"),
        (r"/(images|audio|moderations|videos)(/|$)", f"the policy reads and writes text only: {_CHAT}"),
        (r"/responses/.+", "responses cannot be fetched or deleted; previous_response_id continues one"),
        (r"/(assistants|threads|conversations)(/|$)", f"use {_CHAT}, which keep the conversation's rows"),
        (r"/messages/batches", "batches are not served; send the messages one by one"),
        (r"/(files|batches|fine_tuning|vector_stores|uploads)(/|$)", f"nothing is stored here; use {_CHAT}"),
        (
            r"^/episodes/[^/]+/(chat/completions|responses|completions|models)",
            "the base URL of OpenAI's clients ends in /v1: `base_url` of the answer to POST /episodes",
        ),
        (r"^/v1/", "every episode has a base URL of its own: POST /episodes returns it"),
        (r"^/episodes/[^/]+/", f"served are {_CHAT}; POST /episodes/ID/reward ends the episode"),
    )
)
_OTHER = "POST /episodes begins an episode, and returns its base URLs (docs/how-to/gateway.md)"


def instead(path: str) -> str:
    """Return what a client that asked for ``path`` may use instead."""
    return next((hint.text for hint in _HINTS if hint.pattern.search(path)), _OTHER)

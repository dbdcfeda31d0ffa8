"""The responses of one episode, for requests that name them instead of sending them again."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rl_async.agent_loop.gateway.chat import ChatMessage
from rl_async.errors import RequestRefused


class _Kept(NamedTuple):
    previous: str
    messages: tuple[ChatMessage, ...]


class KeptResponses:
    """Responses by their ids, and their output items by the items' ids."""

    def __init__(self) -> None:
        self._responses: dict[str, _Kept] = {}
        self._items: dict[str, dict[str, Any]] = {}

    def keep(self, name: str, previous: str, messages: Sequence[ChatMessage], output: Sequence[dict[str, Any]]) -> None:
        """Remember what the response ``name`` adds to the conversation up to ``previous`` (empty: none)."""
        self._responses[name] = _Kept(previous, tuple(messages))
        self._items |= {item["id"]: item for item in output}

    def history(self, name: str) -> list[ChatMessage]:
        """Return the conversation up to and including a response. Raises RequestRefused if it is not kept."""
        parts: list[tuple[ChatMessage, ...]] = []
        while name:
            if (kept := self._responses.get(name)) is None:
                raise RequestRefused(
                    f"there is no response {name[:80]} in this episode, or it was made with store=false",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            parts.append(kept.messages)
            name = kept.previous
        return [message for part in reversed(parts) for message in part]

    def item(self, name: str) -> dict[str, Any]:
        """Return an output item. Raises RequestRefused if it is not kept."""
        if (found := self._items.get(name)) is None:
            raise RequestRefused(
                f"there is no item {name[:80]} in this episode, or its response was made with store=false",
                code="invalid_request",
                param="input",
            )
        return found

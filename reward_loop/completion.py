"""Answers of OpenAI-compatible servers to chat requests."""

import msgspec

from rl_async.files import UNDECODABLE
from rl_async.reward_loop.api import ScorerFailed


class Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class Choice(msgspec.Struct):
    message: Message
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    total_tokens: int = 0


class Completion(msgspec.Struct):
    """A chat completion with at least one choice."""

    choices: list[Choice]
    usage: Usage | None = None

    @property
    def tokens(self) -> int:
        """How many tokens the server counted, prompt included."""
        return self.usage.total_tokens if self.usage else 0


def read_completion(raw: bytes, url: str) -> Completion:
    """Decode what ``url`` answered. Raises ScorerFailed if it is no completion or has no choice."""
    try:
        completion = msgspec.json.decode(raw, type=Completion)
    except UNDECODABLE as error:
        raise ScorerFailed(f"{url} did not answer with a chat completion: {error}") from error
    if not completion.choices:
        raise ScorerFailed(f"{url} did not answer with a chat completion: it has no choices")
    return completion

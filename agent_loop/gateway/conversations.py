"""The conversations of one episode: which is the main one, and which are none of the work. Pure.

An agent program may hold several: sub-agents, a second agent after a handoff, a title for its list of sessions, notes
to itself once it is done. A conversation is known by its first message: what begins otherwise shares no prefix with it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_async.agent_loop.gateway.dialects.chat import ChatMessage

SEARCHED = 20_000  # characters of a message in which patterns are looked for


@dataclass
class Conversation:
    """Answers to messages that begin alike. ``asked_after``: the answers of the episode before its first request."""

    asked_after: int
    opening: Sequence[ChatMessage]  # the messages of its first request
    has_task: bool
    rows: set[int] = field(default_factory=set)
    answers: int = 0
    last_row: int = -1
    last_answer: int = -1  # among all of the episode
    said: str = ""  # at last
    finished: bool = False  # the last answer was complete and called no tool


class Conversations:
    """Collects the answers of an episode. ``task``: a text of the task that the program was given; may be empty."""

    def __init__(self, task: str = "") -> None:
        self._task = task
        self._found: dict[bytes, Conversation] = {}
        self.recorded = 0

    def add(
        self, row: int, messages: Sequence[ChatMessage], said: ChatMessage, asked_after: int, *, finished: bool
    ) -> None:
        """Note an answer in ``row`` to ``messages``; there are none before a bare prompt's."""
        key = messages[0].identity() if messages else b""
        if (one := self._found.get(key)) is None:
            told = any(self._task in message.text for message in messages if message.role == "user")
            one = self._found[key] = Conversation(asked_after, messages, bool(self._task) and told)
        one.rows.add(row)
        one.answers += 1
        one.last_row, one.last_answer = row, self.recorded
        one.said, one.finished = said.text.strip(), finished and not said.calls
        self.recorded += 1

    def untrained(self, patterns: Sequence[str], output: str | None) -> list[Conversation]:
        """Return the conversations that are left out of training.

        They are those whose first system message or first message of the user has a match of one of ``patterns``, and
        those that are certainly none of the work, see ``_is_aside``. ``output``: what the program printed, if known.
        """
        named = [one for one in self._found.values() if _matches(one, patterns)]
        rest = [one for one in self._found.values() if one not in named]
        main = _main(rest)
        return [*named, *(one for one in rest if main is not None and _is_aside(one, main, output))]

    def rows_with(self, row: int) -> set[int]:
        """Return the rows of the conversation that has ``row``."""
        return next(one.rows for one in self._found.values() if row in one.rows)

    def scored_row(self, untrained: Sequence[Conversation], output: str | None) -> int:
        """Return the row with the answer that reward functions score: the main conversation's last one.

        If the main conversation ended with a call, as one does that hands over to another agent, the answer is that of
        the conversation that went on.
        """
        left = [one for one in self._found.values() if one not in untrained]
        printed = [one for one in left if output and one.said and one.said in output]
        main = _main(printed or left)
        assert main is not None  # the episode has an answer
        while not main.finished:
            later = [one for one in left if one.asked_after > main.last_answer]
            if not later:
                break
            main = max(later, key=lambda one: one.last_answer)
        return main.last_row


def _main(conversations: Sequence[Conversation]) -> Conversation | None:
    """Return the conversation that has the task, of several the one with most answers, of these the first."""
    return max(conversations, key=lambda one: (one.has_task, one.answers, -one.asked_after), default=None)


def _is_aside(one: Conversation, main: Conversation, output: str | None) -> bool:
    """Whether a conversation is certainly none of the work.

    It began after the main conversation had come to its end, with an answer that calls nothing, and is not given that
    answer to go on with. What the program printed is the main conversation's last answer and not its own; if that is
    unknown, it has fewer answers than the main conversation. Bare prompts are no conversation, so nothing is certain.
    """
    if not (main.opening and one.opening):
        return False
    if not main.finished or one.asked_after <= main.last_answer:
        return False
    if any(main.said and main.said in message.text for message in one.opening if message.role in ("system", "user")):
        return False
    if not output:
        return one.answers < main.answers and one.has_task <= main.has_task
    return main.said in output and not (one.said and one.said in output)


def _matches(one: Conversation, patterns: Sequence[str]) -> bool:
    texts = [next((m.text for m in one.opening if m.role == role), "")[:SEARCHED] for role in ("system", "user")]
    return any(re.search(pattern, text) for pattern in patterns for text in texts)

"""Plays a game: an episode of several roles that speak in turn.

The game tells one role at a time something, and gets its answer. Each role that the policy plays has a conversation of
its own, an ``Episode``, which its own loop drives; to that loop the game is an environment that answers when it is the
role's turn again. The other roles are played by opponents.

    game ──to──> seat ──> the role's loop ──answer──> game ──to──> another seat ...
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.environments.session import OpenGame, joined
from rl_async.agent_loop.environments.speakers import Speaker, SpeechTooLong
from rl_async.agent_loop.episodes.episode import PromptTooLong
from rl_async.agent_loop.step import Step
from rl_async.errors import EnvironmentFailed

T = TypeVar("T")


class Table:
    """Whose turn it is in a game. A role waits here until the game tells it something, or is over."""

    def __init__(self, game: OpenGame) -> None:
        self._game, self._over = game, False
        self.answered = False  # a role has spoken
        self._told = {role: asyncio.Queue[list[Message] | None]() for role in game.roles}

    def begin(self, step: Step, messages: list[Message]) -> None:
        """Let the role that speaks first have its turn, by what ``reset`` returned."""
        self._tell(step, messages)

    async def answer(self, said: str) -> Step:
        """Tell the game what the role said whose turn it is, and let the next one have its turn."""
        if self._over:
            return Step(done=True)
        self.answered = True
        step, messages = await self._game.step(said)
        self._tell(step, messages)
        return step

    async def turn(self, role: str) -> list[Message] | None:
        """Wait for a role's turn; return what it is told, None if the game is over."""
        return None if self._over else await self._told[role].get()

    def end(self) -> None:
        """End the game."""
        self._over = True
        for told in self._told.values():
            told.put_nowait(None)

    def _tell(self, step: Step, messages: list[Message]) -> None:
        if step.done:
            self.end()
        else:
            self._told[step.to].put_nowait(messages)


class Seat:
    """The game as one role sees it (``Answering``)."""

    def __init__(self, table: Table, role: str) -> None:
        self._table, self.role = table, role

    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        """Return the game's answer to a turn, and once it is the role's turn again what it is told: nothing if the game
        is over."""
        step = await self._table.answer(answer)
        return step, await self._table.turn(self.role) or []


async def play_game(
    game: OpenGame,
    first: tuple[Step, list[Message]],
    prompt: Sequence[Message],
    converse: Callable[[Seat, list[Message]], Awaitable[T]],
    opponents: Mapping[str, Speaker],
    max_turns: int,
) -> dict[str, T]:
    """Play a game, from what its ``reset`` returned to its end; return what ``converse`` did for each role that had a
    turn, in the order of the roles.

    ``converse`` plays one role, from the first messages of its conversation on; when it returns, or raises
    PromptTooLong over what was said in the game, the game is over. Raises what else it or the game raises, and
    EnvironmentFailed if it had nothing to play.
    """
    table = Table(game)

    async def converses(role: str) -> T | None:
        told = await table.turn(role)
        if told is None:
            return None
        done = None
        try:
            done = await converse(Seat(table, role), beginning(prompt, told))
        except PromptTooLong:
            if not table.answered:
                raise  # the task itself is too long
        table.end()
        return done

    try:
        async with asyncio.TaskGroup() as tasks:
            for role, speaker in opponents.items():
                tasks.create_task(_oppose(table, role, speaker, prompt, max_turns), name=role)
            mine = [role for role in game.roles if role not in opponents]
            played = {role: tasks.create_task(converses(role), name=role) for role in mine}
            table.begin(*first)
    except ExceptionGroup as several:
        raise several.exceptions[0] from None  # the others were cancelled for it
    found = {role: done for role, task in played.items() if (done := task.result()) is not None}
    if not found:
        raise EnvironmentFailed(f"the game ended before the policy had a turn as {' or '.join(played)}")
    return found


async def _oppose(table: Table, role: str, speaker: Speaker, prompt: Sequence[Message], max_turns: int) -> None:
    """Play a role that the policy does not play, for ``max_turns`` turns at most."""
    told = await table.turn(role)
    said: list[Message] = [] if told is None else beginning(prompt, told)
    for _ in range(max_turns):
        if told is None:
            return
        try:
            answer = await speaker.say(said)
        except SpeechTooLong:
            break
        if not answer.whole:
            break
        await table.answer(answer.text)
        told = await table.turn(role)
        said += [{"role": "assistant", "content": answer.text}, *(told or ())]
    table.end()


def beginning(prompt: Sequence[Message], told: list[Message]) -> list[Message]:
    """Return how a role's conversation begins: with the task's prompt, unless the role is told a system message."""
    return told if told and told[0]["role"] == "system" else joined(prompt, told)

"""Which conversation of an episode is scored, and which are none of its work."""

from typing import Any

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway.chat import ChatMessage, FunctionCall
from rl_async.agent_loop.gateway.open_episodes import Ending, Program
from rl_async.agent_loop.gateway.recorder import Conversations
from rl_async.configs.schema.rollout import GatewayConfig
from tests.unit.agent_loop.fakes import ScriptedEngine, leased
from tests.unit.agent_loop.gateway.fakes import FakeQueue, ask, begin, gateway

CALL = (FunctionCall("f", "{}"),)


class Told:
    """An episode as it goes on: answers to the requests of several agents, those of each in a row."""

    def __init__(self, task: str = "fix the bug") -> None:
        self.conversations = Conversations(task)

    def say(self, row: int, opening: str, text: str, *said: ChatMessage, calls: Any = (), after: int = -1) -> None:
        """``opening``: the system message. ``after``: the answers before its request; else all so far."""
        messages = [ChatMessage("system", opening), *said]
        answer = ChatMessage("assistant", text, calls)
        asked = self.conversations.recorded if after < 0 else after
        self.conversations.add(row, messages, answer, asked, finished=True)

    def main(self) -> None:
        self.say(0, "you code", "", ChatMessage("user", "please fix the bug"), calls=CALL)
        self.say(0, "you code", "the bug is fixed")

    def ends(self, output: str | None = None, *patterns: str) -> tuple[set[int], int]:
        """The rows that are not trained, and the one that is scored."""
        untrained = self.conversations.untrained(patterns, output)
        rows = {row for one in untrained for row in one.rows}
        return rows, self.conversations.scored_row(untrained, output)


@pytest.mark.parametrize("output", [None, "", "Done: the bug is fixed\n"])
def test_notes_after_the_last_answer_are_none_of_the_work(output: str | None) -> None:
    told = Told()
    told.main()
    told.say(1, "you extract memories", "nothing to note", ChatMessage("user", "what is worth keeping?"))
    assert told.ends(output) == ({1}, 0)


def test_a_second_agent_after_a_handoff_is_work_and_is_scored() -> None:
    told = Told()
    told.main()
    told.say(0, "you code", "", calls=CALL)
    told.say(1, "you review", "all is well")
    assert told.ends() == (set(), 1)


def test_an_agent_that_gets_the_first_ones_answer_is_work() -> None:
    told = Told()
    told.main()
    told.say(1, "you review", "approved", ChatMessage("user", "review this: the bug is fixed"))
    assert told.ends() == (set(), 0)
    assert told.ends("approved") == (set(), 1), "the program printed its answer"


def test_what_the_program_printed_is_work() -> None:
    told = Told()
    told.main()
    told.say(1, "you report", "a summary", ChatMessage("user", "report"))
    assert told.ends("a summary") == (set(), 1)
    assert told.ends("something else") == (set(), 0), "nothing is certain"


def test_what_began_before_the_last_answer_is_work() -> None:
    for after in (0, 1):
        told = Told()
        told.main()
        told.say(1, "you search", "found it", after=after)
        assert told.ends() == (set(), 0)


def test_a_title_is_not_taken_for_the_work_nor_the_work_for_an_aside() -> None:
    told = Told()
    told.say(0, "you write titles", "Fixing", ChatMessage("user", "title of: fix the bug"))
    told.say(1, "you code", "the bug is fixed", ChatMessage("user", "fix the bug"))
    assert told.ends("the bug is fixed") == (set(), 1)
    assert told.ends()[0] == set(), "of two with one answer each nothing is certain"


def test_equal_conversations_are_all_work() -> None:
    told = Told()
    for row in range(4):
        told.say(row, f"part {row}", f"answer {row}", ChatMessage("user", "fix the bug"))
    assert told.ends()[0] == set()


def test_conversations_that_the_user_names_are_left_out() -> None:
    told = Told()
    told.main()
    told.say(1, "you write titles", "Fixing", after=0)
    told.say(2, "x", "y", ChatMessage("user", "Summarise: this"), after=1)
    assert told.ends(None, "write titles$", "^Summarise") == ({1, 2}, 0)
    assert told.ends(None, "titles$", "^you code") == ({0, 1}, 2)
    assert told.ends() == (set(), 0)


async def test_left_out_rows_are_not_put_and_the_main_answer_is_scored(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased("fix it")])
    engine = ScriptedEngine(renderer, ["1", "2", "7"])
    async with gateway(queue, renderer, engine) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("fix it"))
        await episode.complete(ask("fix it", "1", "on"))
        await episode.complete(ask("notes?"))
        assert (await episodes.end(episode.id, Ending(program=Program(0, "so 2")))).rows == 1
        assert episode.sampled == {"main": 4, "left_out": 2}
    ((row,),) = queue.rows
    assert renderer.decode(row.token_ids[row.loss_mask].tolist()) == "1<|im_end|>2<|im_end|>"


async def test_patterns_leave_out_what_they_match(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased("fix it")])
    options = {"gateway": GatewayConfig(untrained=("^title",))}
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["7", "1"]), **options) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("title?"))
        await episode.complete(ask("fix it"))
        assert (await episodes.end(episode.id, Ending(reward=1.0))).rows == 1
    ((row,),) = queue.rows
    assert row.turns[-1].text == "1"

"""``rl-async chat``: conversations with tools, the terminal's loop over a real model, and what ends them."""

import asyncio
import contextlib
import io
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.configs.load import dump, load_config
from rl_async.configs.schema.data import WarmStartConfig
from rl_async.errors import EXIT_USER, QueueLost, UserError
from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.runs.chat import Chats, Conversation, HeldSubject, Said, Subject
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Heard
from tests.unit.agent_loop.fakes import ScriptedEngine, run_config
from tests.unit.launcher.runs.test_replay_episode import renderer_in

CALL = '<tool_call>\n{"name":"calculator","arguments":{"expression":"2+3"}}\n</tool_call>'


class Streaming(ScriptedEngine):
    """Reports each answer token by token."""

    async def generate(self, request: GenerateRequest, *, session: str, heard: Heard | None = None) -> GenerateResult:
        result = await super().generate(request, session=session)
        for end in range(1, len(result.token_ids) + 1):
            assert heard is not None
            heard(result.token_ids[:end])
        return result


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return renderer_in(tmp_path_factory.mktemp("tokenizer"))


def subject(renderer: ChatRenderer, says: list[str], *, live: bool = False, room: int = 400) -> Subject:
    config = run_config({"max_model_len": room, "max_tokens": 200}, tools=("calculator",), max_tokens=room, max_turns=3)
    return Subject(config, renderer, Streaming(renderer, says), None, about="a script", live=live)


async def test_tools_answer_and_the_conversation_goes_on_with_the_tokens_as_sampled(renderer: ChatRenderer) -> None:
    asked, said = subject(renderer, [CALL, "5", "again 5"], live=True), list[Said]()
    conversation = Conversation(asked, "be brief")
    await conversation.say("what is 2+3?", said.append)
    await conversation.say("sure?", said.append)
    await conversation.close()
    assert isinstance(asked.source, Streaming)
    first, second, third = (request.token_ids for request in asked.source.requests)
    assert second[: len(first)] == first and third[: len(second)] == second
    assert asked.source.requests[0].request_id != asked.source.requests[2].request_id
    turns = [part for part in said if part.finish]
    assert "".join(part.text for part in said) == f"{CALL}5again 5"
    assert [(part.call, part.result) for part in said if part.call] == [("calculator", "5")]
    assert ["".join(text for text, _ in part.tokens) for part in turns] == [CALL, "5", "again 5"]
    assert {(part.finish, part.version) for part in turns} == {("stop", "0.0")}
    assert {logprob for part in turns for _, logprob in part.tokens} == {-0.5}


async def test_a_full_conversation_says_so(renderer: ChatRenderer) -> None:
    conversation = Conversation(subject(renderer, ["5", "5"], room=60))
    await conversation.say("what is 2+3?", lambda part: None)
    with pytest.raises(UserError):
        await conversation.say("what is 2+3? " * 20, lambda part: None)


async def test_a_run_that_ends_ends_the_conversation(renderer: ChatRenderer) -> None:
    lost = asyncio.Event()

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[Subject]:
        async def fails() -> None:
            await lost.wait()
            raise QueueLost("gone")

        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            yield subject(renderer, [])

    held = HeldSubject(opening())
    assert (await held.subject()).about == "a script"
    lost.set()
    with pytest.raises(UserError):
        await held.during(asyncio.Event().wait())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template."""
    from transformers import PreTrainedTokenizerFast

    from rl_async.launcher.runs.tiny_model import tiny_model

    folder = tmp_path_factory.mktemp("model")
    renderer_in(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.model_max_length = 64
    settings = WarmStartConfig(demos_path="", layers=1, hidden_size=32)
    tiny_model(settings, tokenizer).save_pretrained(folder)
    return folder


def test_lines_of_standard_input_are_answered(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n/p\n\n/new\na\n"))
    assert main(["chat", str(model), "--greedy", "rollout.max_tokens=8"]) == 0
    # Only the tokens of the second answer are shown with their probabilities, and what else was likely.
    shown = capsys.readouterr().out
    assert 1 <= len(re.findall(r"\[[01]\.\d\d\]", shown)) <= 8
    doubtful = re.findall(r'^  ".*?" ([01]\.\d\d)  of  ".*?" ([01]\.\d\d)  "', shown, re.MULTILINE)
    # A greedy answer takes the likeliest token.
    assert doubtful and all(taken == likeliest for taken, likeliest in doubtful)


async def test_the_page_continues_a_conversation_and_says_what_prevents_it(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    opened = list[str]()

    @contextlib.asynccontextmanager
    async def opening(place: str, preset: str | None) -> AsyncIterator[Subject]:
        opened.append(place)
        yield subject(renderer, ["5", "6", "7"])

    chats = Chats(opening)

    async def say(run: str, name: str, text: str) -> list[dict[str, Any]]:
        return [json.loads(line) async for line in chats.say(tmp_path / run, name, text)]

    about, *first = await say("a", "", "2+3?")
    assert about["about"] == "a script" and "".join(part.get("text", "") for part in first) == "5"
    name = about["conversation"]
    assert "".join(part.get("text", "") for part in await say("a", name, "3+3?")) == "6"
    assert [*(await say("b", name, "3+3?"))[0]] == ["error"], "another run has other conversations"
    assert (await say("b", "", "2+3?"))[0]["conversation"] != name
    await chats.close()
    assert opened == [str(tmp_path / run) for run in ("a", "b")]


async def test_an_answer_ends_with_its_reader(renderer: ChatRenderer) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    class Slow(Streaming):
        async def generate(
            self, request: GenerateRequest, *, session: str, heard: Heard | None = None
        ) -> GenerateResult:
            asked.set()
            try:
                return await asyncio.Event().wait()
            finally:
                ended.set()

    @contextlib.asynccontextmanager
    async def opening(place: str, preset: str | None) -> AsyncIterator[Subject]:
        found = subject(renderer, [])
        found.source = Slow(renderer, [])
        yield found

    chats = Chats(opening)
    lines = chats.say(Path("run"), "", "2+3?")
    assert b"conversation" in await anext(lines)
    await asked.wait()
    await lines.aclose()
    assert ended.is_set()
    await chats.close()


async def test_the_page_says_that_a_run_has_no_weights_yet(model: Path, tmp_path: Path) -> None:
    ended_run(model, tmp_path / "run")
    chats = Chats()
    lines = [json.loads(line) async for line in chats.say(tmp_path / "run", "", "hi")]
    await chats.close()
    assert [[*line] for line in lines] == [["error"]]


def ended_run(model: Path, folder: Path) -> None:
    """Make the folder of a run that has ended without a checkpoint."""
    config = msgspec.structs.replace(
        load_config({"model": {"path": str(model)}, "data": {"path": "none"}}), name=folder.name
    )
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(config))


def test_what_cannot_be_talked_to_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(tmp_path / "nothing")]) == EXIT_USER
    ended_run(model, tmp_path / "run")
    assert main(["chat", str(tmp_path / "run"), "--config", "calculator"]) == EXIT_USER
    assert "--config" in capsys.readouterr().err
    # It has ended, and has no checkpoint.
    assert main(["chat", str(tmp_path / "run")]) == EXIT_USER

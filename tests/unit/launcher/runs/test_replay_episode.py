"""``rl-async replay``: a recorded episode again, with tools and rewards as they are now."""

import asyncio
import contextlib
import io
import json
import random
import re
import shlex
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.toy_tasks import KINDS
from rl_async.configs.load import dump, load_config
from rl_async.configs.schema.data import WarmStartConfig
from rl_async.errors import EXIT_USER, QueueLost, UserError
from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.runs.chat import Chats, Conversation, HeldSubject, Said, Subject
from rl_async.launcher.runs.replay_episode import find_episode
from rl_async.recording import read_trajectories, write_trajectories
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Heard
from rl_async.transfer_queue.dataset import find_task
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config

CALL = '<tool_call>\n{"name":"price","arguments":{"item":"x"}}\n</tool_call>'


def renderer_in(folder: Path) -> ChatRenderer:
    source, shop = random.Random(5), KINDS["shop"]
    samples = [shop.sample(source) for _ in range(50)]
    assert shop.demonstrate is not None
    talks = [[{"role": "user", "content": s.prompt}, *shop.demonstrate(s, source)] for s in samples]
    tokenizer = train_tokenizer(talks, 200)
    tokenizer.save_pretrained(folder)
    return ChatRenderer(tokenizer)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one episode of two answers, whose tool says what stands in ``price.txt``."""
    run = tmp_path_factory.mktemp("run")
    (run / "price.txt").write_text("5")
    (run / "tools.py").write_text(
        "from pathlib import Path\n\n\ndef price(item: str) -> str:\n"
        '    """The price."""\n'
        '    return (Path(__file__).parent / "price.txt").read_text()\n'
    )
    tasks = [{"prompt": f"price {n}?", "reward_model": {"ground_truth": "5"}} for n in range(3)]
    (run / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    values = {
        "model": {"path": str(run / "model")},
        "data": {"path": str(run / "tasks.jsonl")},
        "agent": {"loop": "tool_agent", "tools": [f"{run}/tools.py:price"], "unprinted_tools": "allow"},
    }
    config, renderer = load_config(values), renderer_in(run / "model")
    (run / "config.yaml").write_text(dump(config))

    async def play() -> None:
        task = find_task(config, "tasks:1", "train")
        group = leased(task_id=task.task_id)
        group.task = task
        rows = await EpisodeRunner(config, renderer, ScriptedEngine(renderer, [CALL, "5"])).run(group, 0)
        async with RewardService(config.reward) as rewards:
            await rewards.score(task, rows[-1])
        write_trajectories(run / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz", rows)

    asyncio.run(play())
    return run


def test_an_episode_whose_tools_say_the_same_is_the_same(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded), "7.0"]) == 0
    out = capsys.readouterr().out
    assert "DIFFERS" not in out and 'call 0 of price: "5"' in out and 'reward: "1"' in out


def test_what_differs_is_shown_beside_what_was_recorded(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recorded / "price.txt").write_text("6")
    try:
        assert main(["replay", str(recorded), "7.0.1"]) == 1
    finally:
        (recorded / "price.txt").write_text("5")
    out = capsys.readouterr().out
    assert "call 0 of price DIFFERS" in out and 'recorded: "5"' in out and 'now     : "6"' in out
    assert 'reward: "1"' in out  # the policy said 5 all the same


@pytest.mark.parametrize("episode", ["8.0", "7", "7.0.2", "7.1"])
def test_an_episode_that_was_not_recorded_is_a_users_error(recorded: Path, episode: str) -> None:
    assert main(["replay", str(recorded), episode]) == EXIT_USER


def test_measured_times_are_not_compared(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    file = run / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz"
    (row,) = read_trajectories(file)
    row.reward_parts |= {"code/seconds": 0.5, "code/test_0_s": 0.5}
    write_trajectories(file, [row])
    assert main(["replay", str(run), "7.0"]) == 0
    assert "code/" not in capsys.readouterr().out
    row.reward_parts["code/passed"] = 1.0
    write_trajectories(file, [row])
    assert main(["replay", str(run), "7.0"]) == 1


def test_an_episode_is_found_in_the_files_of_all_ranks_of_its_newest_step(recorded: Path, tmp_path: Path) -> None:
    (row,) = read_trajectories(recorded / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz")
    for step, lineage, rank, segment in (
        (2, 9, 0, 5),
        (999_999, 10, 0, 6),
        (1_000_000, 10, 0, 1),
        (1_000_000, 10, 1, 0),
    ):
        row.segment = segment
        write_trajectories(tmp_path / f"step-{step:06d}-lineage{lineage}-rank{rank}.jsonl.gz", [row])
    assert [found.segment for found in find_episode(tmp_path, "7.0")] == [0, 1]


@pytest.mark.parametrize(
    "values",
    [
        {"agent": {"environment": "simulated_user", "user": {"system": "You want {ground_truth}."}}},
        {"reward": {"functions": [{"name": "reward_model"}], "model": {"path": "model"}}},
    ],
)
def test_what_only_the_run_had_is_a_users_error(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any]
) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    config = {"model": {"path": str(run / "model")}, "data": {"path": str(run / "tasks.jsonl")}, **values}
    (run / "config.yaml").write_text(dump(load_config(config)))
    assert main(["replay", str(run), "7.0"]) == EXIT_USER
    assert ".url" in capsys.readouterr().err


GAME = """
from pathlib import Path

from rl_async.agent_loop.tools.tool import Step


class Game:
    roles = ("speaker", "listener")

    def __init__(self, task):
        self.answers = []

    def reset(self):
        return Step("speak", to="speaker")

    def step(self, answer):
        self.answers.append(answer)
        to = self.roles[len(self.answers) % 2]
        return Step((Path(__file__).parent / "said.txt").read_text(), to=to, done=len(self.answers) == 4)

    def reward(self):
        return {"speaker": float(self.answers == ["a", "b", "c", "d"]), "listener": 0.5}
"""


def test_roles_say_again_what_each_has_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "said.txt").write_text("go on")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "a game", "reward_model": {"ground_truth": ""}}))
    values = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "tasks.jsonl")},
        "agent": {"loop": "tool_agent", "environment": f"{tmp_path}/game.py:Game", "unprinted_tools": "allow"},
        "reward": {"functions": [{"name": "environment"}]},
    }
    config, renderer = load_config(values), renderer_in(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(dump(config))

    async def play() -> None:
        group = leased(task_id="tasks:0")
        group.task = find_task(config, "tasks:0", "train")
        rows = await EpisodeRunner(config, renderer, ScriptedEngine(renderer, ["a", "b", "c", "d"])).run(group, 0)
        async with RewardService(config.reward) as rewards:
            for row in rows:
                await rewards.score(group.task, row)
        write_trajectories(tmp_path / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz", rows)

    asyncio.run(play())
    assert main(["replay", str(tmp_path), "7.0"]) == 0
    out = capsys.readouterr().out
    assert 'speaker: reward: "1"' in out and 'listener: reward: "0.5"' in out and "DIFFERS" not in out
    (tmp_path / "said.txt").write_text("stop")
    assert main(["replay", str(tmp_path), "7.0"]) == 1
    assert "listener: turn 2, user DIFFERS" in capsys.readouterr().out
    config = load_config({**values, "agent": {**values["agent"], "opponents": {"listener": {}}}})
    (tmp_path / "config.yaml").write_text(dump(config))
    assert main(["replay", str(tmp_path), "7.0"]) == EXIT_USER
    assert "agent.opponents.listener.url" in capsys.readouterr().err


# ``rl-async chat``: conversations with tools, the terminal's loop over a real model, and what ends them.


CHAT_CALL = '<tool_call>\n{"name":"calculator","arguments":{"expression":"2+3"}}\n</tool_call>'


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
    asked, said = subject(renderer, [CHAT_CALL, "5", "again 5"], live=True), list[Said]()
    conversation = Conversation(asked, "be brief")
    await conversation.say("what is 2+3?", said.append)
    await conversation.say("sure?", said.append)
    await conversation.close()
    assert isinstance(asked.source, Streaming)
    first, second, third = (request.token_ids for request in asked.source.requests)
    assert second[: len(first)] == first and third[: len(second)] == second
    assert asked.source.requests[0].request_id != asked.source.requests[2].request_id
    turns = [part for part in said if part.finish]
    assert "".join(part.text for part in said) == f"{CHAT_CALL}5again 5"
    assert [(part.call, part.result) for part in said if part.call] == [("calculator", "5")]
    assert ["".join(text for text, _ in part.tokens) for part in turns] == [CHAT_CALL, "5", "again 5"]
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


# ``rl-async data inspect``: columns, tasks, and templates that make tasks of the rows that it refuses.


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.csv"
    file.write_text('question,answer,level\n"what is 1+1?",2,easy\n"a ""quoted"" one\nover lines",007,hard\n')
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["data", "inspect", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_suggested_templates_make_tasks_of_the_rows(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, questions)
    assert code == EXIT_USER and "level" in out and "row 0" in error
    (given,) = (word for word in shlex.split(error.replace("error: ", "")) if word.startswith("data.path="))
    given = given.replace("FILE", str(questions))
    code, out, _ = run(capsys, "--config", model_config(questions.parent), given)
    assert code == 0 and 'user: a "quoted" one\nover lines\nground_truth: 007' in out


def model_config(folder: Path) -> Path:
    config = folder / "mine.yaml"
    config.write_text(f"model: {{path: {folder}/model}}\ndata: {{path: none, max_prompt_tokens: 12}}\n")
    return config


def test_a_prompt_is_shown_as_the_model_reads_it(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    renderer_in(questions.parent / "model")
    templates = f"data.path=[{{path: {questions}, prompt: '{{question}}', ground_truth: '{{answer}}'}}]"
    code, out, _ = run(capsys, "--config", model_config(questions.parent), templates)
    assert code == 0 and "<|im_start|>user\nwhat is 1+1?<|im_end|>" in out
    assert "data.max_prompt_tokens=12 tokens: 2" in out


def test_rows_of_other_commands_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": said}))
    code, out, _ = run(capsys, tmp_path / "talks.jsonl")
    assert code == 0 and "rl-async sft" in out


def test_a_missing_value_is_counted_and_its_row_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "1+1?", "reward_model": {"ground_truth": "2"}}, {"prompt": "2+2?", "reward_model": None}]
    (tmp_path / "gap.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out, error = run(capsys, tmp_path / "gap.jsonl")
    assert code == EXIT_USER and "missing in 1" in out and "row 1" in error and "template" not in error


@pytest.mark.parametrize("arguments", [[], ["x.csv", "data.shuffle=false"], ["none.csv"]])
def test_what_cannot_be_inspected_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *arguments)[0] == EXIT_USER

"""The list of processes survives a full disk."""

import asyncio
import errno
import importlib
import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rl_async.errors import DataError, UserError
from rl_async.gateway import Gateway, RemoteEpisode
from rl_async.insight.roster import ProcessState, said_last
from rl_async.launcher import supervisor
from rl_async.launcher.child_process import Roster, ThisMachine, is_full
from rl_async.launcher.plan.planning import ProcessSpec
from rl_async.launcher.play import CannotGrade, Outcome, StopPipe, arguments, environment, found_program, grade
from rl_async.launcher.supervisor import Children

SPEC = ProcessSpec(name="engine-0", role="engine", argv=())


class RosterOnAFullDisk(Roster):
    """Fails with ``number`` until there is room; ``written`` is set by what follows."""

    number = errno.ENOSPC

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        self.room = False
        self.written = asyncio.Event()

    def write(self, states: Mapping[str, ProcessState]) -> None:
        if not self.room:
            raise OSError(self.number, "cannot write")
        super().write(states)
        self.written.set()


async def test_a_full_disk_does_not_end_the_supervisor_and_the_list_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roster = RosterOnAFullDisk(tmp_path)
    monkeypatch.setattr(supervisor, "Roster", lambda run: roster)
    monkeypatch.setattr(supervisor, "ROSTER_AGAIN_S", 0.0)
    kept = Children(ThisMachine({}, tmp_path), tmp_path, [SPEC])
    kept.set_state("engine-0", "restarting", 1)
    assert not (tmp_path / "processes.json").exists()
    roster.room = True
    await asyncio.wait_for(roster.written.wait(), 60)
    assert (tmp_path / "processes.json").read_text() == "[]\n"  # none was started


async def test_another_error_of_the_list_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RosterOnAFullDisk, "number", errno.EACCES)
    monkeypatch.setattr(supervisor, "Roster", RosterOnAFullDisk)
    with pytest.raises(PermissionError):
        Children(ThisMachine({}, tmp_path), tmp_path, [SPEC]).set_state("engine-0", "restarting", 1)


# What a process said last, from its output.


TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 1, in <module>

    raise QueueLost
rl_async.errors.QueueLost: no answer
"""


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("", ""),
        ("one\ntwo\n\n", "two"),
        (TRACEBACK + "[W] process group was not destroyed\n", "rl_async.errors.QueueLost: no answer"),
        ("12:00:00 trainer-0 ERROR TrainingDiverged: step 3\n12:00:01 trainer-0 INFO closing\n", "TrainingDiverged"),
        (TRACEBACK + "\nDuring handling, another:\n\n" + TRACEBACK.replace("no answer", "again"), "again"),
        ("error: model.path: no folder\nbye\n", "error: model.path: no folder"),
        ("Loading:  0%\rLoading: 100%\r\n", "Loading: 100%"),
    ],
)
def test_the_last_error_else_the_last_line(output: str, said: str) -> None:
    assert said in said_last(output) and bool(said) == bool(said_last(output))


@pytest.mark.parametrize(("free", "full"), [(0, True), (1, False)])
def test_a_disk_is_full_whose_blocks_are_all_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, full: bool
) -> None:
    found = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([*found[:4], free, *found[5:]]))
    assert is_full(tmp_path) is full


# examples/spin.py: the answers of a data set, and the model's own.


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def spin(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("spin")


def conversations(file: Path, *rows: Any) -> str:
    file.write_text("".join(f"{json.dumps({'messages': row})}\n" for row in rows))
    return str(file)


def test_each_turn_of_the_assistant_is_an_answer(spin: Any, tmp_path: Path) -> None:
    asked, answered = ({"role": role, "content": role[0]} for role in ("user", "assistant"))
    data = conversations(tmp_path / "x.jsonl", [asked, answered, asked, answered], [asked, answered], [asked, answered])
    assert list(spin.turns(data, 2)) == [
        ([asked], "a"),
        ([asked, answered, asked], "a"),
        ([asked], "a"),
    ]
    for row in ([asked], [asked, answered | {"content": None}], None):
        with pytest.raises(DataError, match="row 0"):
            list(spin.turns(conversations(tmp_path / "y.jsonl", row), 2))


def test_answers_are_sampled_by_the_seed(spin: Any, model_folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(model_folder, tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer.save_pretrained(model)
    prompts = [[{"role": "user", "content": words}] for words in ("w3 w4", "w5", "w6 w7 w8")]
    own = spin.sampled(model, prompts, tokens=5, seed=1)
    assert len(own) == 3 and all(len(text.split()) <= 5 for text in own)
    assert spin.sampled(model, prompts, tokens=5, seed=1) == own != spin.sampled(model, prompts, tokens=5, seed=9)


# What an agent program is started with.


def episode(text: str) -> RemoteEpisode:
    task = {"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]}
    return RemoteEpisode("e", "http://10.0.0.1:8/episodes/e/v1", task, Gateway("http://10.0.0.1:8"))


def test_placeholders_are_filled_in_once_and_within_their_argument() -> None:
    words = ["agent", "{prompt}", "--in={workspace}", "{base_url} {anthropic_base_url}", '{"a": {b}}', "{}"]
    assert arguments(words, episode("{workspace} $(x) \0a b"), Path("/w")) == [
        "agent",
        "be brief\n\n{workspace} $(x) a b",
        "--in=/w",
        "http://10.0.0.1:8/episodes/e/v1 http://10.0.0.1:8/episodes/e",
        '{"a": {b}}',
        "{}",
    ]


def test_clients_of_both_vendors_find_the_episode_and_no_proxy_stands_between() -> None:
    found = environment(episode("a"), {"HOME": "/h", "OPENAI_BASE_URL": "https://elsewhere", "NO_PROXY": "x"})
    assert found["HOME"] == "/h" and found["NO_PROXY"] == "x,10.0.0.1" and found["no_proxy"] == "10.0.0.1"
    assert found["OPENAI_BASE_URL"] == found["ANTHROPIC_BASE_URL"] + "/v1" == "http://10.0.0.1:8/episodes/e/v1"
    assert {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"} <= found.keys()


@pytest.mark.parametrize("words", [[], ["no-such-program-anywhere"], ["true", "{promt}"]])
def test_a_mistake_in_the_command_line_is_named(words: list[str]) -> None:
    with pytest.raises(UserError, match="play"):
        found_program(words)


def test_a_program_is_found_from_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent").touch(0o700)
    assert found_program(["./agent", "{prompt}"]) == [str(tmp_path / "agent"), "{prompt}"]


@pytest.mark.parametrize(("stopped", "timeout_s", "reason"), [(False, 0.01, "did not end"), (True, 600.0, "stopped")])
def test_a_grader_that_hangs_holds_up_neither_its_episode_nor_the_end(
    stopped: bool, timeout_s: float, reason: str
) -> None:
    release = threading.Event()

    def hangs(workspace: Path, task: dict[str, Any], stdout: str) -> float:
        release.wait()
        return 1.0

    with StopPipe() as stop:
        if stopped:
            stop.stop()
        with pytest.raises(CannotGrade, match=reason):
            grade(hangs, Path(), {}, Outcome(""), stop, timeout_s)
        release.set()


def test_a_grader_sees_the_parts_of_the_end_that_it_names() -> None:
    with StopPipe() as stop:
        score = grade(
            lambda workspace, task, stdout, exit_code: {"score": exit_code, "said": len(stdout)},
            *(Path(), {}, Outcome("", "abc", "", 2), stop, 60.0),
        )
    assert (score.value, score.extra) == (2.0, {"said": 3.0})

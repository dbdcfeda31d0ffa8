"""What an agent program is started with."""

import threading
from pathlib import Path
from typing import Any

import pytest

from rl_async.errors import UserError
from rl_async.gateway import Gateway, RemoteEpisode
from rl_async.launcher.play import CannotGrade, Outcome, StopPipe, arguments, environment, found_program, grade


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

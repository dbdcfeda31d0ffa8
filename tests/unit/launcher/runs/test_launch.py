"""A launch: what precedes the run, what a user who stops it reads, and the token of a Ray cluster."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rl_async.configs.load import load_config
from rl_async.errors import ConfigError, QueueLost, UserError
from rl_async.launcher.cli.live_actions import add_engine, profile_steps
from rl_async.launcher.run_folder import create, hold
from rl_async.launcher.runs.launch import (
    check_chat,
    describe_stop,
    log_into,
    naming_deletion,
    present_token,
    stop_text,
    unsaved,
)
from rl_async.process.http_auth import make_tokens, run_token
from rl_async.process.run_files import Beat, Phase, beat, read_request, trace_file
from rl_async.rollout_server.vllm.client import ROUTED_BY

VLLM = ["rollout.engine=vllm"]  # whose start takes minutes


@pytest.mark.parametrize(
    "overrides",
    [["agent.unprinted_tools=allow", "agent.chat_format=plain"], ["agent.tools=[]", "agent.chat_format=gemma4"]],
)
def test_a_chat_format_that_does_not_go_with_the_model_is_found_before_engines_start(
    model_folder: Path, tmp_path: Path, overrides: list[str]
) -> None:
    with pytest.raises(ConfigError):
        check_chat(load_config("calculator", [f"model.path={model_folder}", *VLLM, *overrides]))
    check_chat(load_config("calculator", [f"model.path={tmp_path}/elsewhere", *VLLM, *overrides]))


def test_the_launcher_of_embedded_engines_leaves_that_to_the_workers(tmp_path: Path) -> None:
    """Its command imports neither torch nor Transformers, which would take a second before anything is started."""
    program = (
        "import sys; from pathlib import Path; from rl_async.configs.load import load_config;"
        "from rl_async.launcher.runs.launch import check_chat; import rl_async.launcher.runs.launch;"
        f"check_chat(load_config('calculator', ['model.path={tmp_path}']));"
        "found = {'torch', 'transformers', 'pyarrow', 'pandas'} & sys.modules.keys(); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_record_that_is_not_whole_is_found_where_the_model_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.replay"):
        check_chat(load_config("calculator", [f"model.path={tmp_path}/elsewhere", f"rollout.replay={tmp_path}"]))


def _lose(path: Path) -> None:
    raise QueueLost(str(path))


@pytest.mark.parametrize("fails", [Path.read_bytes, _lose])
def test_a_run_whose_folder_was_deleted_ends_with_its_name(tmp_path: Path, fails: Callable[[Path], object]) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    with pytest.raises((OSError, QueueLost)), log_into(folder), naming_deletion(folder):
        fails(folder / "missing")
    (folder / "config.yaml").touch()
    with pytest.raises((OSError, QueueLost)), log_into(folder), naming_deletion(folder):
        shutil.rmtree(folder / "logs")  # alone, for room
        fails(folder / "missing")
    (folder / "logs").mkdir()
    with pytest.raises(UserError, match=str(folder)), log_into(folder), naming_deletion(folder):
        shutil.rmtree(folder)
        folder.mkdir()  # as a process of the run may that goes on writing
        fails(folder / "missing")


@pytest.mark.parametrize(
    ("trained", "kept", "said"),
    [
        (0, [], ()),
        (4, [4], ()),
        (4, [2, 4], ()),
        (5, [4], ("step 4 is", "step 4")),
        (3, [], ("steps 0 to 2 are", "step 0")),
    ],
)
def test_steps_that_a_stop_could_not_save_are_named(
    tmp_path: Path, trained: int, kept: list[int], said: tuple[str, ...]
) -> None:
    lines = [f'{{"step":{step},"version":{step + 1}}}\n' for step in range(trained)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    for step in kept:
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").touch()
    text = unsaved(tmp_path)
    assert all(part in text for part in said) and bool(text) == bool(said)


NOW = 1000.0


def told(phase: str, *, step: int = 12, since: float = NOW - 20.0, train_s: float | None = 60.0, saved: int = 0) -> str:
    mine = Beat(rank=0, pid=1, step=step, phase=phase, since=since)
    return describe_stop(mine, train_s, saved, NOW, "Ctrl-C")


def test_a_running_step_is_named_with_the_time_it_takes_and_what_a_kill_loses() -> None:
    text = told("training")
    assert "step 12, about 40 s" in text and "losing 13 steps" in text
    assert "losing 1 step" in told("training", saved=12) and "steps" not in told("training", saved=12)
    assert "about 0 s" in told("training", since=NOW - 100), "it takes longer than the step before"
    assert "about" not in told("training", train_s=None), "no step has ended yet"


@pytest.mark.parametrize(
    ("phase", "last"), [("waiting for a batch", 11), ("meeting the ranks", 12), ("publishing", 12)]
)
def test_completed_steps_are_saved(phase: Phase, last: int) -> None:
    assert f"after step {last}," in told(phase) and "about" not in told(phase)


@pytest.mark.parametrize(
    "text", [told("starting"), told("waiting for a batch", saved=12), describe_stop(None, None, 0, NOW, "")]
)
def test_nothing_to_lose(text: str) -> None:
    assert "losing" not in text


def test_the_run_folder_tells_it_but_not_what_an_earlier_start_left(tmp_path: Path) -> None:
    beat(tmp_path, 0, 7, "training")
    old = tmp_path / "ranks" / "0.json"
    earlier = json.loads(old.read_text()) | {"since": 1.0}
    old.write_text(json.dumps(earlier))
    began = time.time()
    assert "losing" not in stop_text(tmp_path, began, signal.SIGINT)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 7, "time/train_s": 500.0}) + os.linesep)
    for step in (4, 6):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step:06d}" / "state.json").touch()
    beat(tmp_path, 0, 8, "training")
    text = stop_text(tmp_path, began, signal.SIGTERM)
    assert "step 8, about 500 s" in text and "losing 3 steps" in text


def wanted() -> bool:
    return True


def test_without_a_token_none_is_presented(tmp_path: Path) -> None:
    environment = {"PATH": "/bin"}
    assert not present_token(environment, tmp_path, wanted)
    assert environment == {"PATH": "/bin"}


@pytest.mark.parametrize("variable", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_of_the_environment_is_presented(tmp_path: Path, variable: str) -> None:
    environment = {variable: "x"}
    assert present_token(environment, tmp_path, wanted)
    assert environment["RAY_AUTH_MODE"] == "token"


def test_the_token_that_ray_generates_is_presented(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x")
    environment: dict[str, str] = {}
    assert present_token(environment, tmp_path, wanted)
    assert environment == {"RAY_AUTH_MODE": "token"}


def test_what_the_user_says_counts(tmp_path: Path) -> None:
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x"}
    assert not present_token(environment, tmp_path, wanted)
    assert environment["RAY_AUTH_MODE"] == "disabled"


def test_a_cluster_that_wants_no_token_gets_none(tmp_path: Path) -> None:
    environment = {"RAY_AUTH_TOKEN": "x"}
    assert not present_token(environment, tmp_path, lambda: False)
    assert environment["RAY_AUTH_MODE"] == "disabled"


# `rl-async profile` waits for what the ranks write after it asked.


def test_the_trace_of_a_step_that_was_profiled_before_counts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    create(load_config("calculator"), run)
    file, other = trace_file(run, 3, 0), trace_file(run, 2, 0)
    file.parent.mkdir()
    for former in (file, other):
        former.write_bytes(b"of a former process")

    def rank() -> None:
        while read_request(run) is None:
            time.sleep(0.01)
        unfinished = file.with_name("unfinished")
        unfinished.write_bytes(b"again")
        unfinished.replace(file)

    answering = threading.Thread(target=rank, daemon=True)
    with hold(run):
        answering.start()
        assert profile_steps(run, 1, timeout_s=10.0) == [file]
    answering.join()


# What `rl-async engine add` says of a server that no run can use.


async def refusal(run: Path, token: str, metrics: dict[str, float]) -> str:
    """The error on a server that takes ``token``, or no token if it is empty, and has these metrics."""

    async def handle(request: web.Request) -> web.Response:
        if token and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {token}":
            return web.Response(status=401, text="the token is missing or wrong")
        return web.Response(text="".join(f"{name} {value}\n" for name, value in metrics.items()))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        with pytest.raises(UserError) as caught:
            await asyncio.to_thread(add_engine, run, str(server.make_url("")).rstrip("/"), "vllm", 1.0)
    return str(caught.value)


async def test_a_missing_metric_is_named_and_the_token_is_not_blamed(tmp_path: Path) -> None:
    make_tokens(tmp_path / "keys")
    told = await refusal(tmp_path, run_token(tmp_path, "engines"), dict.fromkeys(ROUTED_BY[1:], 0.0))
    assert ROUTED_BY[0] in told and ROUTED_BY[1] not in told and "token" not in told


async def test_a_wrong_token_is_blamed(tmp_path: Path) -> None:
    make_tokens(tmp_path / "keys")
    told = await refusal(tmp_path, "of another run", dict.fromkeys(ROUTED_BY, 0.0))
    assert "RL_ASYNC_TOKEN_FILE" in told and "kind" not in told


async def test_an_engine_that_takes_requests_without_a_token_is_not_registered(tmp_path: Path) -> None:
    make_tokens(tmp_path / "keys")
    told = await refusal(tmp_path, "", dict.fromkeys(ROUTED_BY, 0.0))
    assert "RL_ASYNC_TOKEN_FILE" in told

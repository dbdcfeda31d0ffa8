"""A launch: what precedes the run, what a user who stops it reads, and the token of a Ray cluster."""

import asyncio
import errno
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoTokenizer

from rl_async.configs.load import load_config
from rl_async.errors import ConfigError, DataError, QueueLost, UserError
from rl_async.gateway import Gateway, RemoteEpisode
from rl_async.launcher import supervisor
from rl_async.launcher.cli.live_actions import add_engine, profile_steps
from rl_async.launcher.plan.planning import Plan, ProcessSpec, plan
from rl_async.launcher.play import CannotGrade, Outcome, StopPipe, arguments, environment, found_program, grade
from rl_async.launcher.ray_keeper import NodeGroup, check_sharing, folders_of, groups, interface_of
from rl_async.launcher.run_folder import create, hold
from rl_async.launcher.runs import launch
from rl_async.launcher.runs.launch import (
    check_chat,
    describe_stop,
    log_into,
    naming_deletion,
    present_token,
    stop_text,
    unsaved,
)
from rl_async.launcher.supervisor import Children, Roster, ThisMachine, is_full
from rl_async.process.http_auth import make_tokens, run_token
from rl_async.process.run_files import Beat, Phase, ProcessState, beat, read_request, said_last, trace_file
from rl_async.rollout_server.vllm.client import ROUTED_BY
from tests.support.configs import float32_config

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


# The list of processes survives a full disk.


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


EXAMPLES = Path(__file__).parents[4] / "examples"


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


# What goes where on a cluster: bundles, processes, the launcher's node, and which interface has an address.


RUN = Path("runs/x")
TWO = ["rollout.engines=2", "trainer.ranks=2", "agent.workers=2"]


def planned(*overrides: str, mode: str = "disaggregated", gpus: int = 0) -> Plan:
    return plan(float32_config("calculator", overrides, mode=mode), RUN, gpus=gpus)


def names(found: tuple[NodeGroup, ...]) -> dict[str, list[list[str]]]:
    return {
        group.name: [[resources.name for resources in bundle.processes] for bundle in group.bundles] for group in found
    }


def test_with_a_shared_run_folder_only_the_queue_stays_at_home() -> None:
    found = groups(planned(*TWO), 1, shared=True)
    assert names(found) == {
        "home": [["queue"]],
        "trainers": [["trainer-0"], ["trainer-1"]],
        "others": [["engine-0"], ["engine-1"], ["worker-0"], ["worker-1"]],
    }
    assert [group.strategy for group in found] == ["PACK", "PACK", "SPREAD"]


def test_trainers_stay_beside_a_run_folder_that_other_nodes_do_not_see() -> None:
    found = groups(planned(*TWO), 1, shared=False)
    assert names(found)["home"] == [["queue"], ["trainer-0"], ["trainer-1"]] and "trainers" not in names(found)
    assert all(bundle.home for bundle in found[0].bundles)
    assert not any(bundle.home for bundle in found[1].bundles)


def test_a_gateway_stays_where_agent_programs_look_for_it() -> None:
    assert names(groups(planned("agent.gateway.port=0"), 1, shared=True))["home"] == [["queue"], ["gateway"]]


def test_processes_on_a_cpu_take_their_threads_and_those_that_wait_take_little() -> None:
    bundles = {
        bundle.processes[0].name: bundle for group in groups(planned(), 3, shared=True) for bundle in group.bundles
    }
    assert bundles["engine-0"].resources["CPU"] == bundles["trainer-0"].resources["CPU"] == 3
    assert bundles["worker-0"].resources["CPU"] == bundles["queue"].resources["CPU"] == 0.25
    assert "GPU" not in bundles["engine-0"].resources
    assert bundles["queue"].resources["memory"] == planned().queue.memory_bytes


def test_every_gpu_is_a_bundle_and_those_who_share_it_divide_it() -> None:
    apart = groups(planned(*TWO, gpus=4), 1, shared=True)
    assert names(apart)["others"][:2] == [["engine-0"], ["engine-1"]]
    assert [bundle.resources["GPU"] for bundle in apart[1].bundles] == [1, 1]
    one = groups(planned(*TWO, gpus=1), 1, shared=True)
    (bundle,) = one[1].bundles
    assert [resources.name for resources in bundle.processes] == ["engine-0", "engine-1", "trainer-0", "trainer-1"]
    assert bundle.resources["GPU"] == 1 and {resources.gpus for resources in bundle.processes} == {0.25}


SEVERAL = ["rollout.engine=vllm", "rollout.tensor_parallel=2"]


def test_an_engine_of_several_ranks_is_one_bundle_with_all_their_gpus() -> None:
    (engine,) = groups(planned(*SEVERAL, gpus=3), 4, shared=True)[2].bundles[:1]
    assert [resources.name for resources in engine.processes] == ["engine-0"]
    assert (engine.resources["GPU"], engine.resources["CPU"], engine.processes[0].gpus) == (2, 2, 2)
    (on_cpus,) = groups(planned(*SEVERAL), 4, shared=True)[2].bundles[:1]
    assert on_cpus.resources["CPU"] == 2 * 4 and "GPU" not in on_cpus.resources


def test_ray_cannot_share_the_gpus_of_an_engine_that_has_several() -> None:
    with pytest.raises(UserError, match=r"engine-0 .*rollout\.tensor_parallel"):
        groups(planned(*SEVERAL, "trainer.ranks=2", mode="colocated", gpus=2), 1, shared=True)


def test_engines_that_take_weights_from_shared_memory_are_with_their_trainer() -> None:
    found = groups(planned(*TWO, mode="colocated", gpus=2), 1, shared=True)
    (group,) = [group for group in found if group.name == "trainers"]
    assert group.strategy == "STRICT_PACK"
    pairs = [{resources.name for resources in bundle.processes} for bundle in group.bundles]
    # They take turns on one GPU.
    assert pairs == [{"engine-0", "trainer-0"}, {"engine-1", "trainer-1"}]
    assert {resources.gpus for bundle in group.bundles for resources in bundle.processes} == {0.5}
    apart = groups(planned(*TWO, mode="colocated", gpus=2), 1, shared=False)
    assert all(bundle.home for bundle in apart[0].bundles) and len(apart[0].bundles) == 3


def test_weights_through_files_need_a_folder_that_all_see() -> None:
    config = float32_config("calculator", ["weight_sync.way=disk"])
    with pytest.raises(UserError, match=r"weight_sync.way=disk: 10.0.0.2"):
        check_sharing(config, plan(config, RUN), ["10.0.0.2"])
    check_sharing(config, plan(config, RUN), [])
    shared = float32_config("calculator", ["weight_sync.way=disk", "weight_sync.folder=/mnt/w"])
    check_sharing(shared, plan(shared, RUN), ["10.0.0.2"])
    needed = plan(shared, RUN)
    assert ("weight_sync.folder", "/mnt/w") in folders_of(shared, needed, needed.engines[0])


def test_who_loads_the_model_needs_its_folder() -> None:
    config = float32_config("calculator")
    needed = plan(config, RUN)
    model = ("model.path", "artifacts/calculator/model")
    assert folders_of(config, needed, needed.engines[0]) == folders_of(config, needed, needed.workers[0]) == [model]
    assert folders_of(config, needed, needed.queue) == []


@pytest.mark.parametrize(
    ("address", "found"), [("10.1.2.3", "eth1"), ("127.0.0.1", "lo"), ("127.0.0.2", "lo"), ("192.168.0.1", "")]
)
def test_the_interface_of_an_address(address: str, found: str) -> None:
    interfaces = {
        "lo": [("127.0.0.1", "255.0.0.0")],
        "eth0": [("10.1.2.4", "255.255.255.0")],
        "eth1": [("10.1.2.3", "255.255.255.0")],
        "tun": [("10.9.0.1", None)],
    }
    assert interface_of(address, interfaces) == found


def test_without_ray_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'rl-async\[ray\]'"):
        launch.launch_on_ray(float32_config("calculator"), tmp_path / "runs" / "x", "")
    assert "rl_async.launcher.ray_nodes" not in sys.modules and list(tmp_path.iterdir()) == []


def test_an_address_where_nobody_listens_is_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: True)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(UserError, match=f"--address {address}: "):
        launch.launch_on_ray(float32_config("calculator"), tmp_path / "runs" / "x", address)
    assert "rl_async.launcher.ray_nodes" not in sys.modules and list(tmp_path.iterdir()) == []

"""The list of processes survives a full disk."""

import asyncio
import errno
import importlib
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rl_async.errors import DataError, UserError
from rl_async.gateway import Gateway, RemoteEpisode
from rl_async.launcher import supervisor
from rl_async.launcher.plan.planning import Plan, ProcessSpec, plan
from rl_async.launcher.play import CannotGrade, Outcome, StopPipe, arguments, environment, found_program, grade
from rl_async.launcher.ray_keeper import NodeGroup, check_sharing, folders_of, groups, interface_of
from rl_async.launcher.runs import launch
from rl_async.launcher.supervisor import Children, Roster, ThisMachine, is_full
from rl_async.process.run_files import ProcessState, said_last
from tests.support.configs import float32_config

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
    assert pairs == [{"engine-0", "trainer-0"}, {"engine-1", "trainer-1"}]  # they take turns on one GPU
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

"""``launch`` around a supervisor of fake roles, the lock of its run folder, and the page beside it."""

import asyncio
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rl_async.configs.load import dump, load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.insight.doctor import MOST_STACK_BYTES, REPORT_FILE, doctor, observe, observe_processes, write_report
from rl_async.insight.live_view import View
from rl_async.launcher.plan.planning import assign_ports
from rl_async.launcher.run_folder import hold, hold_unnamed, new_run
from rl_async.launcher.runs import launch as module
from rl_async.launcher.runs.launch import PAGE_LOG, launch, log_into, make_ready, serve_beside
from rl_async.launcher.supervisor import RoleFailed
from rl_async.process.role import STACKS
from rl_async.process.run_files import ProcessRecord, beat, read_endpoints, read_stat
from tests.support.configs import float32_config
from tests.support.recordings import make_run


@pytest.fixture
def config() -> RunConfig:
    return msgspec.structs.replace(float32_config("calculator"), name="fake")


@pytest.fixture
def fake_roles(rig: Any, make_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the config says, the fake roles are started; their queue asks for no keys."""
    planned = make_plan(rig.folder)

    def ready(*_: object, resume: bool = False) -> tuple[Any, dict[str, int]]:
        return planned, assign_ports(planned.ports)

    async def nothing_to_make(*_: object) -> None:
        """The fake roles read no data."""

    monkeypatch.setattr(module, "make_ready", ready)
    monkeypatch.setattr(module, "prepare", nothing_to_make)
    monkeypatch.setattr(module, "client_keys", lambda *_: None)


@pytest.mark.usefixtures("fake_roles")
def test_a_run_ends_with_a_summary_and_0(rig: Any, config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rig.go()
    assert launch(config, rig.folder) == 0
    shown = capsys.readouterr().out
    assert f"run folder: {rig.folder}" in shown and "gateway" not in shown
    assert read_endpoints(rig.folder).queue.startswith("ipc://")
    assert "no step was trained" in shown
    assert "trainer-0 started" in (rig.folder / "logs" / "launcher.log").read_text()
    assert rig.left() == []


@pytest.mark.usefixtures("fake_roles")
def test_a_role_failing_for_good_is_raised(rig: Any, config: Any) -> None:
    rig.do("trainer", "exit 3")
    with pytest.raises(RoleFailed, match=r"trainer-0 failed \(exit code 3\)(.|\n)*something broke"):
        launch(config, rig.folder)
    assert rig.left() == []


@pytest.mark.usefixtures("fake_roles")
def test_a_view_that_fails_is_reported_and_the_run_goes_on(
    rig: Any, config: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(self: View) -> None:
        raise ValueError("no such colour")

    monkeypatch.setattr(View, "run", broken)
    rig.go()
    assert launch(config, rig.folder) == 0
    assert "ValueError('no such colour')" in capsys.readouterr().err


def test_the_log_of_the_launcher_stays_off_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    with log_into(tmp_path):
        logging.getLogger("rl_async.launcher").warning("engine-0 was restarted")
    assert "WARNING engine-0 was restarted" in (tmp_path / "logs" / "launcher.log").read_text()
    assert capfd.readouterr().err == ""
    assert logging.getLogger("rl_async").propagate


def test_getting_ready_makes_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    monkeypatch.chdir(tmp_path)
    planned, ports = make_ready(config, tmp_path / "runs" / "fake")
    assert ports.keys() == {wish.name for wish in planned.ports}
    assert (tmp_path / "runs" / "fake" / "config.yaml").is_file()
    assert (tmp_path / "runs" / "fake" / "logs").is_dir()


def test_a_folder_that_cannot_be_filled_is_removed_so_that_the_command_can_be_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    """A limit on the size of files stands for a disk that is full."""
    monkeypatch.chdir(tmp_path)
    run, before = tmp_path / "runs" / "fake", resource.getrlimit(resource.RLIMIT_FSIZE)
    for began in (False, True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
        try:
            with pytest.raises((OSError, UserError)):
                make_ready(config, run)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert run.exists() == began
        make_ready(config, run)
        assert (run / "config.yaml").is_file()


HOLDER = """
import pathlib, sys
from rl_async.launcher.run_folder import hold
with hold(pathlib.Path(sys.argv[1])):
    print(flush=True)
    input()
"""


def test_a_run_in_use_is_refused_naming_its_process_until_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(UserError, match=rf"--name: .*mine .*{holder.pid}"), hold(folder):
            pass
        with hold(tmp_path / "runs" / "other"):
            holder.kill()
            holder.wait()
    with hold(folder):
        assert not folder.exists()
        assert (tmp_path / "runs" / ".mine.lock").read_text() == f"{os.getpid()}\n"
    assert list((tmp_path / "runs").iterdir()) == []


def test_unnamed_runs_that_start_at_once_take_different_names(tmp_path: Path) -> None:
    chosen = [new_run("calculator", [f"launcher.run_dir={tmp_path}"]) for _ in range(3)]
    assert len({folder for _, folder in chosen}) == 1
    with hold_unnamed(*chosen[0]) as (first, one), hold_unnamed(*chosen[1]) as (second, two):
        one.mkdir()
        assert [first.name, second.name] == [one.name, two.name] and one != two
    two.mkdir()
    with hold_unnamed(*chosen[2]) as (third, three):
        assert third.name == three.name and three not in (one, two)


async def test_it_serves_until_it_is_cancelled(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "logs").mkdir()
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    page = asyncio.create_task(serve_beside(run, told.set_result))
    async with asyncio.timeout(60), httpx.AsyncClient(follow_redirects=True) as browser:
        address = await told
        (await browser.get(address)).raise_for_status()
        listed = (await browser.get(f"{address.partition('/open/')[0]}/api/runs")).json()
        assert [one["name"] for one in listed] == ["run"]
        page.cancel()
        await asyncio.wait([page])
        with pytest.raises(httpx.ConnectError):
            await browser.get(address)


async def test_a_page_that_does_not_start_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(UserError) as failed:  # there is no config.yaml
        await serve_beside(tmp_path, lambda address: pytest.fail(address))
    assert "tracking.view" in str(failed.value) and PAGE_LOG in str(failed.value)
    assert "config.yaml" in (tmp_path / "logs" / PAGE_LOG).read_text()


# The `rl-async` command as a process: what it imports, its exit code, a reader that goes away.


HEAVY = {"torch", "transformers", "pyarrow", "zmq", "aiohttp", "rich", "numpy"}


def cli(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "rl_async.launcher.cli", *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("command", [[], ["reward-model"]])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys\nfrom rl_async.launcher.cli.__main__ import main\n"
        f"try:\n    main({[*command, '--help']})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"found = {HEAVY!r} & sys.modules.keys()\nassert not found, found"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "usage: rl-async" in result.stdout


def test_neither_planning_nor_launching_imports_torch() -> None:
    code = "import sys, rl_async.launcher.runs.launch, rl_async.launcher.runs.launch\nassert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_a_mistake_ends_the_process_with_2_and_no_traceback() -> None:
    result = cli("launch", "--config", "calculator", "queue.max_stalness=2")
    assert result.returncode == 2
    assert "did you mean queue.max_staleness?" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "rl_async.launcher.cli", "config", "explain", "algorithm.correction"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_files_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("extends: calculator\nreward: {functions: [{name: 漢.py:f}]}\n", encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "rl_async.launcher.cli", "config", "show", str(tmp_path / "c.yaml")]
    shown = subprocess.run(command, capture_output=True, env=os.environ | plain, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert b"\\u6F22.py:f" in shown.stdout


def test_a_directory_that_is_gone_and_a_name_that_is_too_long_are_mistakes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rl_async.launcher.cli", "audit", "a" * 300]
    for script in ('rmdir "$PWD"; exec "$@"', 'exec "$@"'):
        (tmp_path / "x").mkdir(exist_ok=True)
        ended = subprocess.run(
            ["sh", "-c", script, "sh", *command], cwd=tmp_path / "x", capture_output=True, timeout=120
        )
        assert ended.returncode == 2 and ended.stderr.count(b"\n") == 1, ended.stderr


# What is seen of real processes, and of a run whose launcher is gone.


ROLE = "from rl_async.process.role import *\nanswer_with_stacks()\nimport time\nprint(1, flush=True)\ntime.sleep(60)"
BUSY = """
from rl_async.process.role import *
answer_with_stacks()
import threading, time
def work():
    while True:
        [*map(lambda n: n + 1, range(20))]
        exec(compile("a = 1", "text", "exec"))
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
print(1, flush=True)
time.sleep(60)
"""
MUTE = "import time\nprint(1, flush=True)\ntime.sleep(60)"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for folder in ("logs", "stacks"):
        (tmp_path / "run" / folder).mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(dump(load_config("calculator", [])))
    return tmp_path / "run"


@pytest.fixture
def role(run: Path) -> Iterator["subprocess.Popen[str]"]:
    with start(ROLE, run / "stacks" / "worker-0.txt") as process:
        yield process
        process.kill()


def start(code: str, stacks: Path) -> "subprocess.Popen[str]":
    env = os.environ | {STACKS: str(stacks)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    return process


def record(pid: int, name: str = "worker-0") -> ProcessRecord:
    return ProcessRecord(name=name, role="worker", pid=pid, started=read_stat(pid).started, state="running")


def test_a_process_shows_its_state_its_log_and_its_stack(run: Path, role: "subprocess.Popen[str]") -> None:
    (run / "logs" / "worker-0.log").write_text("first\nlast\n")
    (seen,) = observe_processes(run, [record(role.pid)])
    assert (seen.state, seen.log_line) == ("S", "last") and seen.log_age_s is not None
    assert 0 <= seen.age_s < 600
    assert [frame.name for frame in seen.stack] == ["<module>"]


def test_without_stacks_no_process_is_asked_and_the_file_of_those_that_are_is_bounded(
    run: Path, role: "subprocess.Popen[str]"
) -> None:
    file = run / "stacks" / "worker-0.txt"
    (seen,) = observe_processes(run, [record(role.pid)], stacks=False)
    assert seen.state == "S" and seen.stack == () and file.stat().st_size == 0
    file.write_bytes(b"x" * (MOST_STACK_BYTES + 1))
    (seen,) = observe_processes(run, [record(role.pid)])
    assert [frame.name for frame in seen.stack] == ["<module>"] and 0 < file.stat().st_size < 10_000


def test_a_process_with_busy_threads_survives_being_asked(run: Path) -> None:
    stacks = run / "stacks" / "worker-0.txt"
    with start(BUSY, stacks) as process:
        for _ in range(1000):
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.001)
        assert process.poll() is None
        assert "in <module>" in stacks.read_text()
        process.kill()


def test_a_stopped_process_is_not_signalled(run: Path, role: "subprocess.Popen[str]") -> None:
    role.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, role.pid, os.WSTOPPED)
    (seen,) = observe_processes(run, [record(role.pid)])
    assert seen.halted
    assert (run / "stacks" / "worker-0.txt").read_text() == ""


def test_a_process_that_would_die_of_the_signal_is_not_signalled(run: Path) -> None:
    (run / "stacks" / "worker-0.txt").touch()
    with start(MUTE, run / "stacks" / "worker-0.txt") as process:
        (seen,) = observe_processes(run, [record(process.pid)])
        assert seen.state == "S" and process.poll() is None
        process.kill()


def test_another_process_with_the_number_of_a_dead_one_is_not_it(run: Path, role: "subprocess.Popen[str]") -> None:
    other = ProcessRecord(name="worker-0", role="worker", pid=role.pid, started=1, state="running")
    (seen,) = observe_processes(run, [other])
    assert seen.state == "gone" and role.poll() is None


def test_a_process_on_another_machine_is_not_looked_for_here(run: Path, role: "subprocess.Popen[str]") -> None:
    stacks = run / "stacks" / "worker-0.txt"
    remote = msgspec.structs.replace(record(role.pid), host="10.0.0.2")
    (seen,) = observe_processes(run, [remote])
    assert (seen.state, seen.ended, stacks.read_text()) == ("remote", False, ""), "the number is another's here"
    (ended,) = observe_processes(run, [msgspec.structs.replace(remote, exit=1)])
    assert ended.ended


def test_a_run_that_was_killed_is_diagnosed_from_what_it_left(
    run: Path, role: "subprocess.Popen[str]", capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=str(run)):
        observe(run)
    (run / "processes.json").write_text(
        f'[{{"name":"queue","role":"queue","pid":{2**22 - 1},"started":1,"state":"running"}}]'
    )
    (run / "metrics.jsonl").write_text('{"step": 0, "time/step_s": 2.0}\n{"step": 1, "time/step_s": 4.0}\n')
    beat(run, 0, 1, "training")  # of a process that the roster does not have
    seen = observe(run)
    assert seen.ranks == ()
    assert (seen.steps_done, seen.steps, seen.usual_step_s, seen.launcher) == (2, 50, 3.0, None)
    findings = write_report(run, "a test")
    assert "2 of 50 steps" in findings
    assert (run / REPORT_FILE).read_text().count(f"verdict: {findings}") == 1
    assert doctor(run) == 1
    assert str(run / REPORT_FILE) in capsys.readouterr().out

"""What is seen of real processes, and of a run whose launcher is gone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rl_async.configs.load import dump, load_config
from rl_async.errors import UserError
from rl_async.insight.doctor import MOST_STACK_BYTES, REPORT_FILE, doctor, observe, observe_processes, write_report
from rl_async.insight.roster import ProcessRecord
from rl_async.process.kernel import read_stat
from rl_async.process.role import STACKS
from rl_async.process.run_files import beat

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

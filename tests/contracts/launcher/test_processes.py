"""Real processes: their state and stacks, ranks that start and end together, and strays that are found and killed."""

import asyncio
import fcntl
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_async.insight.doctor import request_stacks
from rl_async.launcher import supervisor as children_module
from rl_async.launcher.plan.planning import ProcessSpec
from rl_async.launcher.supervisor import Child, Children, Lifeline, RoleFailed, ThisMachine
from rl_async.process import guard, run_files
from rl_async.process.private_folder import (
    RENDEZVOUS,
    SEGMENT_PREFIX,
    SEGMENTS,
    create_segment,
    prefix_for,
    private_folder,
    sweep_segments,
)
from rl_async.process.role import ASK, STACKS
from rl_async.process.run_files import ENDED, ProcessRecord, beat, catches, read_stat, state_of, who_is_missing
from tests.contracts.launcher.test_supervisor import eventually

SLEEPER = """
import sys, threading, time
from rl_async.process.role import answer_with_stacks
answer_with_stacks()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def deep():
    print("there", flush=True)
    time.sleep(60)
deep()
"""

LEAVES_MEMORY = """
import time
from rl_async.process.private_folder import create_segment
segment = create_segment(8)
print(segment.name, flush=True)
time.sleep(60)
"""

ENDS = """
import os, sys, threading, time
from datetime import timedelta
from torch.distributed import HashStore
from rl_async.process.role import end_with

class EndsLate:
    def __del__(self):
        time.sleep(0.5)

def main(end):
    threading.Thread(target=HashStore().wait, args=(["never"], timedelta(seconds=0.3)), daemon=True).start()
    time.sleep(0.1)
    return end()

for end in (lambda: 3, lambda: sys.exit(4), lambda: sys.exit()):
    process = os.fork()
    if process == 0:
        late = EndsLate()  # keeps the interpreter's end busy while the thread comes back from its wait
        end_with(lambda: main(end))
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def test_a_stopped_rank_is_called_stopped(tmp_path: Path) -> None:
    beat(tmp_path, 0, 3, "training")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        beat(tmp_path, 1, 3, "training")
        file = tmp_path / "ranks" / "1.json"
        file.write_text(file.read_text().replace(str(os.getpid()), str(other.pid)))
        other.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        text = who_is_missing(tmp_path, 0, world=2)
        other.kill()
    assert text.startswith(f"rank 1 (pid {other.pid}) did not arrive: it is stopped (SIGSTOP), training of step 3")
    assert state_of(other.pid) == "gone" and "it is gone" in who_is_missing(tmp_path, 0, world=2)
    assert who_is_missing(tmp_path, 0, world=1) == ""


def test_a_process_that_sleeps_answers_with_its_stack(tmp_path: Path) -> None:
    file = tmp_path / "stacks" / "role.txt"
    file.parent.mkdir()
    command, env = [sys.executable, "-c", SLEEPER], os.environ | {STACKS: str(file)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as role:
        assert role.stdout is not None and role.stdout.readline() == "there\n"
        assert catches(role.pid, ASK) and not catches(role.pid, signal.SIGTERM)
        assert read_stat(role.pid).started > 0
        record = ProcessRecord(name="role", role="worker", pid=role.pid, started=0, state="running")
        found = request_stacks(tmp_path, [record])
        role.kill()
    assert [frame.name for frame in found["role"]] == ["deep", "<module>"], "the thread beside it is not the main one"


def test_a_thread_that_waits_in_torch_does_not_abort_the_end() -> None:
    """Processes that one of them forks, since each new one would import torch."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["3", "4", "0"])


async def test_shared_memory_of_a_killed_group_is_removed_also_after_the_supervisors_death(tmp_path: Path) -> None:
    async def start(lifeline: Lifeline) -> tuple[Child, Path]:
        command = [sys.executable, "-c", LEAVES_MEMORY]
        child = await Child.start("role", command, {}, tmp_path / "log", lifeline, tmp_path / "role.txt")
        async with asyncio.timeout(60):
            while "\n" not in child.output():  # noqa: ASYNC110 - a file sets no event
                await asyncio.sleep(0.02)
        return child, SEGMENTS / child.output().strip()

    with Lifeline() as lifeline:
        child, segment = await start(lifeline)
        assert segment.exists()
        await child.kill()
        assert not segment.exists()
        prefix = segment.name.rpartition("-")[0]
        left = SEGMENTS / f"{prefix}-left"
        left.touch()
        child, segment = await start(lifeline)
        assert segment.name.startswith(f"{prefix}-") and not left.exists()
        await child.kill()


@pytest.mark.parametrize("apart", [True, False])
def test_a_segment_in_use_in_another_container_is_not_swept(tmp_path: Path, apart: bool) -> None:
    """Containers with ``--ipc=host`` see one ``/dev/shm`` and may have a run folder of the same path each."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", *([] if os.getuid() == 0 else ["--map-root-user"])]
    if apart and subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("PID namespaces are not permitted here")
    command = [*(unshare if apart else ()), sys.executable, "-c", LEAVES_MEMORY]
    env = os.environ | {SEGMENT_PREFIX: (prefix := prefix_for(tmp_path / "role.txt"))}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as owner:
        assert owner.stdout is not None
        segment = SEGMENTS / owner.stdout.readline().strip()
        sweep_segments(prefix)
        assert segment.exists()
        os.killpg(owner.pid, signal.SIGKILL)
        assert owner.stdout.read() == "", "the owner has ended, and closed what it held"
    sweep_segments(prefix)
    assert not segment.exists()


def test_a_segment_swept_before_its_lock_was_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, prefix = fcntl.flock, prefix_for(tmp_path)

    def late(file: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        sweep_segments(prefix)
        flock(file, operation)

    monkeypatch.setenv(SEGMENT_PREFIX, prefix)
    monkeypatch.setattr(fcntl, "flock", late)
    segment = create_segment(8)
    sweep_segments(prefix)
    assert [file.name for file in SEGMENTS.glob(f"{prefix}*")] == [segment.name]
    segment.close()
    segment.unlink()


async def test_ranks_that_were_asked_to_stop_are_not_waited_for_once_one_failed(rig: Any) -> None:
    scripts = {"a": "trap 'exit 1' TERM; echo; while :; do sleep 0.05; done", "b": "trap '' TERM; echo; sleep 600"}
    specs = [ProcessSpec(name=name, role="trainer", argv=("sh", "-c", script)) for name, script in scripts.items()]
    with Children(ThisMachine({}, rig.folder), rig.folder, specs) as children:
        for spec in specs:
            await children.start(spec)
        await eventually(lambda: all(children[name].output() for name in scripts))
        async with asyncio.timeout(60):
            await children.finish(scripts)
        assert (children["a"].returncode, children["b"].returncode) == (1, None)
        await children.stop(scripts, 0.0)


async def test_ranks_that_were_asked_to_stop_are_all_waited_for(rig: Any) -> None:
    go = rig.folder / "go"
    scripts = {
        "a": "trap 'exit 143' TERM; echo; while :; do sleep 0.05; done",
        "b": f"trap 'while ! [ -e {go} ]; do sleep 0.05; done; exit 143' TERM; echo; while :; do sleep 0.05; done",
    }
    specs = [ProcessSpec(name=name, role="trainer", argv=("sh", "-c", script)) for name, script in scripts.items()]
    with Children(ThisMachine({}, rig.folder), rig.folder, specs) as children:
        for spec in specs:
            await children.start(spec)
        await eventually(lambda: all(children[name].output() for name in scripts))
        finishing = asyncio.create_task(children.finish(scripts))
        await eventually(lambda: children["a"].returncode == 143)
        go.touch()
        async with asyncio.timeout(60):
            await finishing
        assert children["b"].returncode == 143


async def test_ranks_meet_by_a_file_that_is_new_at_each_start(rig: Any) -> None:
    specs = [ProcessSpec(name=n, role="trainer", argv=("sh", "-c", f"echo ${RENDEZVOUS}")) for n in ("a", "b")]
    found = []
    with Children(ThisMachine({}, rig.folder), rig.folder, specs) as children:
        for restarts in (0, 1):
            ranks = [await children.start(spec, restarts=restarts) for spec in specs]
            assert [await rank.wait() for rank in ranks] == [0, 0]
            found.append({Path(rank.output().split()[-1]) for rank in ranks})
    (first,), (second,) = found
    assert first != second and first.parent == second.parent == private_folder(rig.folder)


@pytest.mark.parametrize(("healthy_s", "restarts"), [(3600.0, None), (0.0, 1)])
async def test_restarts_are_forgiven_after_a_time_of_health(
    rig: Any, monkeypatch: pytest.MonkeyPatch, healthy_s: float, restarts: int | None
) -> None:
    monkeypatch.setattr(children_module, "HEALTHY_S", healthy_s)
    spec = ProcessSpec(name="a", role="worker", argv=("sh", "-c", "exit 1"), max_restarts=3)
    with Children(ThisMachine({}, rig.folder), rig.folder, [spec]) as children:
        child = await children.start(spec, restarts=3)
        code = await child.wait()
        if restarts is None:
            with pytest.raises(RoleFailed):
                await children.before_restart(spec, child, code, 3)
        else:
            assert await children.before_restart(spec, child, code, 3) == restarts


async def test_a_process_may_be_restarted_any_number_of_times(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "LONGEST_BACKOFF_S", 0.0)
    spec = ProcessSpec(name="a", role="worker", argv=("sh", "-c", "exit 1"), max_restarts=10_000)
    with Children(ThisMachine({}, rig.folder), rig.folder, [spec]) as children:
        child = await children.start(spec)
        assert await children.before_restart(spec, child, await child.wait(), 5000) == 5001


MARK = "RL_ASYNC_TEST_STRAYS"


def test_what_has_the_variable_is_killed() -> None:
    value = os.urandom(8).hex()
    with (
        subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: value}) as marked,
        subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: "other"}) as other,
    ):
        run_files.kill_marked(MARK, value)
        assert marked.wait() < 0 and other.poll() is None
        other.kill()


def test_what_does_not_end_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    value = os.urandom(8).hex()
    with subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: value}) as marked:
        while f"{MARK}={value}".encode() not in run_files._environment(marked.pid):
            assert marked.poll() is None
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="rl_async.process"):
            # The process stays, as if it were in an uninterruptible sleep.
            patch.setattr(run_files.os, "kill", lambda pid, number: None)
            run_files.kill_marked(MARK, value, within_s=0.0)
        assert str(marked.pid) in caplog.text
        marked.kill()


KILLS = """
import ctypes, os
from subprocess import DEVNULL, PIPE, Popen
from rl_async.process.guard import kill_all
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
child = Popen(["sh", "-c", "setsid sleep 600 & echo $!; wait"], stdout=PIPE, stderr=DEVNULL)
print(child.pid, int(child.stdout.readline()), flush=True)
{then}
"""


def in_a_process(then: str) -> "subprocess.CompletedProcess[str]":
    """Run ``then`` in a process that has a child and a grandchild, whose pids it prints."""
    program = KILLS.format(then=then)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_whoever_keeps_processes_kills_all_of_them() -> None:
    done = in_a_process("kill_all()")
    assert done.returncode == 0, done.stderr
    assert all(state_of(int(pid)) in ENDED for pid in done.stdout.split()) and state_of(os.getpid()) not in ENDED


def test_and_does_not_wait_for_ever_for_one_that_does_not_end() -> None:
    immortal = "os.kill = lambda pid, number: None\nkill_all(within_s=0.1)"  # as if in an uninterruptible sleep
    done = in_a_process(immortal)
    child, grandchild = map(int, done.stdout.split())
    for pid in (child, grandchild):
        os.kill(pid, signal.SIGKILL)
    assert done.returncode == 1 and "TimeoutError" in done.stderr and str(child) in done.stderr


def test_a_guard_whose_worker_died_before_it_looked_starts_nothing(tmp_path: Path) -> None:
    """Its parent is then another process: here this one, for a worker that is this one's parent."""
    command = [sys.executable, "-I", "-S", guard.__file__, str(os.getppid()), str(tmp_path / "folder")]
    done = subprocess.run([*command, "touch", str(tmp_path / "started")], timeout=60)
    assert done.returncode == guard.CANNOT_START and list(tmp_path.iterdir()) == []

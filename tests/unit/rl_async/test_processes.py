"""Processes: their start and end, what they run beside one another, and the sockets that they are given."""

import ast
import asyncio
import errno
import gc
import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import tty
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from rl_async import concurrency
from rl_async.agent_loop.environments.session import call_user
from rl_async.concurrency import (
    MOST_IDLE,
    DaemonCalls,
    Overdue,
    contained,
    gather_or_cancel,
    time_limit,
    to_the_end,
    within,
)
from rl_async.errors import EXIT_RESTART, EXIT_USER, ConfigError, EnvironmentFailed, QueueLost, RlAsyncError
from rl_async.messages import Done, Refused, Status
from rl_async.process.allocation import importing, no_collection
from rl_async.process.role import (
    KEPT_BYTES,
    LIFELINE_FD,
    CheckedOutput,
    OutputFailed,
    ReaderGone,
    SteadyOutput,
    py_spy,
    run_role,
    steady_file,
)
from rl_async.process.run_files import ProcStat, catches, read_stat
from rl_async.reward_loop.service import RewardService
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.client import QueueClient
from tests.unit.reward_loop.outside import score
from tests.unit.reward_loop.test_service import config

# The start and end of a process: exit codes, streams whose reader goes, and signals that it was started to ignore.


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a key"), EXIT_USER),
        (ExceptionGroup("", [ExceptionGroup("", [ConfigError("a key")])]), EXIT_USER),
        (ExceptionGroup("", [QueueLost("gone")]), EXIT_RESTART),
    ],
)
def test_a_mistake_of_the_user_is_told_as_one(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise error

    assert run_role("agent", work, {RlAsyncError: EXIT_RESTART}) == code
    assert ("error: a key\n" in capsys.readouterr().err) is (code == EXIT_USER)


ENGINE, TRAINER = ["rollout_server", "--port", "0"], ["trainer", "--queue", "ipc:///nowhere"]


@pytest.mark.parametrize(
    ("role", "asked"),
    [
        (ENGINE, ""),
        (TRAINER, "active"),
        pytest.param(ENGINE, "active", marks=pytest.mark.nightly),
        pytest.param(TRAINER, "", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.slow
def test_threads_of_a_role_started_by_hand_sleep_at_barriers(role: list[str], asked: str, tmp_path: Path) -> None:
    """As OpenMP itself tells, once torch has loaded it; the roles then end for want of a config."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    variables |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": asked} if asked else {})
    command = [sys.executable, "-m", f"rl_async.{role[0]}", *role[1:], "--run", str(tmp_path)]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    assert ended.returncode == EXIT_USER
    policies = re.findall(r"OMP_WAIT_POLICY ?= ?'(\w+)'", ended.stderr)
    assert policies
    assert set(policies) == {asked.upper() or "PASSIVE"}


STARTS_ANOTHER = """
import subprocess
from rl_async.process.role import watch_lifeline
watch_lifeline()
subprocess.run(["sh", "-c", "echo; exec sleep 600"])
"""


def test_a_role_and_what_it_started_end_with_the_supervisor() -> None:
    lifeline, supervisor = os.pipe()
    env = os.environ | {LIFELINE_FD: str(lifeline)}
    command = [sys.executable, "-c", STARTS_ANOTHER]
    role = subprocess.Popen(command, env=env, pass_fds=(lifeline,), stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert role.stdout is not None
        assert role.stdout.readline() == b"\n"
        os.close(supervisor)
        # The stream ends with the last process that holds it.
        role.communicate(timeout=60)
        assert role.returncode == -signal.SIGKILL
    finally:
        with suppress(ProcessLookupError):
            os.killpg(role.pid, signal.SIGKILL)
        os.close(lifeline)


def test_processes_are_read_while_they_run_and_when_they_are_gone() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    while os.times().system * ticks < 5:
        os.listdir("/")
    used = [sum(os.times()[:2]) * ticks]
    found = read_stat(os.getpid()).cpu_ticks
    used.append(sum(os.times()[:2]) * ticks)
    # The kernel rounds down both of its parts.
    assert used[0] - 2 <= found <= used[1] + 2
    with subprocess.Popen(["true"]) as gone:
        pass
    assert read_stat(gone.pid) == ProcStat() and not catches(gone.pid, signal.SIGUSR2)
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    assert catches(os.getpid(), signal.SIGUSR2) and not catches(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGUSR2, before)


FULL = Path("/dev/full")
CLI = [sys.executable, "-P", "-m", "rl_async.launcher.cli"]


def drain(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    parts = []
    try:
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts)


def assert_all_arrives(out: SteadyOutput, reading: int) -> None:
    """Write more than a pipe or a terminal holds before ``reading`` is read, and get every byte of it."""
    lines = [b"line %06d\n" % number for number in range(2 * 65536 // 12)]
    for line in lines:
        out.write(line)
    received = drain(reading)
    while not received.endswith(lines[-1]):
        out.settle(0.0)
        received += drain(reading)
    assert received == b"".join(lines)
    out.close()
    os.close(reading)


def test_a_reader_that_is_gone_ends_nothing() -> None:
    reading, writing = os.pipe()
    out = SteadyOutput(writing, owned=True)
    os.close(reading)
    assert [out.write(b"a line\n") for _ in range(3)] == [7, 7, 7]
    out.settle()
    out.close()


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    master, terminal = pty.openpty()
    out = SteadyOutput(terminal, owned=True)
    assert out.isatty()
    os.close(master)
    assert out.write(b"a line\n") == 7
    out.close()


@pytest.mark.timeout(60)
def test_threads_write_at_the_same_time_and_every_line_arrives_once() -> None:
    """Four threads, while a fifth reads slowly."""
    reading, writing = os.pipe()
    out, errors = SteadyOutput(writing, owned=True), list[BaseException]()
    lines = {b"%d %06d\n" % (thread, number) for thread in range(4) for number in range(4_000)}

    def write(thread: int) -> None:
        try:
            for number in range(4_000):
                out.write(b"%d %06d\n" % (thread, number))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        received = b""
        while any(thread.is_alive() for thread in threads) or received.count(b"\n") < len(lines):
            received += drain(reading)
            out.settle(0.0)
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert sorted(received.splitlines(keepends=True)) == sorted(lines)
    out.close()
    os.close(reading)


@pytest.mark.timeout(60)
def test_what_a_signal_handler_prints_within_a_write_arrives_once_and_loses_nothing() -> None:
    reading, writing = os.pipe()
    out, printed, written = SteadyOutput(writing, owned=True), list[bytes](), list[bytes]()

    def handle(*_: object) -> None:
        printed.append(b"handler %06d\n" % len(printed))
        out.write(printed[-1])

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    received = b""
    try:
        while len(printed) < 500:
            written.append(b"line %06d\n" % len(written))
            out.write(written[-1])
            received += drain(reading)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    out.settle(0.0)
    received += drain(reading)
    assert sorted(received.splitlines(keepends=True)) == sorted([*printed, *written])
    out.close()
    os.close(reading)


@pytest.mark.timeout(60)
def test_a_terminal_that_nobody_reads_blocks_nothing_and_shows_every_line_later() -> None:
    master, terminal = pty.openpty()
    tty.setraw(terminal)
    out = SteadyOutput(terminal, owned=True)
    assert_all_arrives(out, master)


@pytest.mark.parametrize("blocking", [True, False], ids=["as opened", "made non-blocking by another process"])
def test_a_reader_that_sleeps_blocks_nothing_and_gets_every_byte_later(blocking: bool) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, blocking)
    out = SteadyOutput(writing, owned=True)
    assert_all_arrives(out, reading)


def test_what_nobody_reads_is_left_out_oldest_first_and_a_line_says_so() -> None:
    reading, writing = os.pipe()
    out = SteadyOutput(writing, owned=True)
    lines = [b"line %06d\n" % number for number in range(2 * KEPT_BYTES // 12)]
    for line in lines:
        out.write(line)
    received = drain(reading)
    while not received.endswith(lines[-1]):
        out.settle(0.0)
        received += drain(reading)
    words = received.split(b"\n... ")
    assert len(words) == 2
    count, _, rest = words[1].partition(b" bytes")
    assert len(words[0]) + int(count) + len(rest.partition(b"\n")[2]) == len(b"".join(lines))
    out.close()
    os.close(reading)


@pytest.mark.skipif(not FULL.exists(), reason="has no /dev/full: run it on Linux")
def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(FULL)
    file = steady_file(tmp_path / "log")
    assert file.write("a line\n") == 7
    file.flush()
    file.close()


def test_settling_waits_for_a_slow_reader() -> None:
    reading, writing = os.pipe()
    out, data, received = SteadyOutput(writing, owned=True), b"x" * (3 * 65536), bytearray()
    out.write(data)
    full = drain(reading)
    out.settle(0.0)

    def read() -> None:
        # The pipe is full again, and settling waits for this.
        over.wait(0.2)
        while not over.is_set():
            received.extend(drain(reading))

    over = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    out.settle(30.0)
    over.set()
    reader.join()
    out.close()
    assert full + received + drain(reading) == data
    os.close(reading)


def test_output_keeps_its_encoding_and_escapes_what_that_lacks() -> None:
    code = "from rl_async.process.role import *; steady_output(); print('\xfc \u20ac'); settle_output()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": "latin-1"}, capture_output=True, check=True
    )
    assert done.stdout == b"\xfc \\u20ac\n"


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    with steady_file(tmp_path / "log") as file:
        print("now", "\udcff", file=file)
    assert (tmp_path / "log").read_text() == "before\nnow \\udcff\n"


def test_checked_output_tells_its_failures_from_others() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with CheckedOutput(writing, "wb") as out, pytest.raises(ReaderGone):
        out.write(b"a line\n")
    if FULL.exists():
        with io.BufferedWriter(CheckedOutput(os.open(FULL, os.O_WRONLY), "wb")) as out:
            out.write(b"a line\n")
            with pytest.raises(OutputFailed) as failed:
                out.flush()
            assert isinstance(failed.value.__cause__, OSError) and failed.value.__cause__.errno == errno.ENOSPC
            out.raw.close()


@pytest.mark.parametrize(
    ("redirection", "code", "errors"),
    [
        ("| head -0", 0, False),
        (">&-", 0, False),
        ("2>&-", 0, False),
        ("<&- >&- 2>&-", 0, False),
        ("> /dev/full", 1, True),
        ("2> /dev/full", 0, False),
    ],
)
def test_a_report_ends_with_its_reader_and_names_an_output_that_fails(
    redirection: str, code: int, errors: bool, tmp_path: Path
) -> None:
    command = f"'{sys.executable}' -P -m rl_async.launcher.cli config list {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert ("standard output" in done.stderr) == errors
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="has no /dev/full: run it on Linux")
def test_an_error_keeps_its_exit_code_where_nobody_can_read_it(tmp_path: Path) -> None:
    with FULL.open("w") as full:
        done = subprocess.run([*CLI, "config", "show", "absent"], cwd=tmp_path, stdout=full, stderr=full, timeout=120)
    assert done.returncode == 2


@pytest.mark.skipif(not FULL.exists(), reason="has no /dev/full: run it on Linux")
def test_what_a_role_prints_raises_nothing_on_a_full_disk(tmp_path: Path) -> None:
    role = "import sys\nfrom rl_async.process.role import run_role\ndef work():\n    print('x' * 10000, flush=True)\n"
    role += "    print('y' * 10000, file=sys.stderr)\nsys.exit(run_role('role', work))"
    with FULL.open("w") as full:
        done = subprocess.run([sys.executable, "-c", role], stdout=full, stderr=full, timeout=120)
    assert done.returncode == 0


CHILD = """
import signal, subprocess, sys
from rl_async.process.role import heeded, ignore_alone
before = heeded(signal.SIGHUP, signal.SIGTERM)
ignore_alone(signal.SIGTERM, signal.SIGHUP)
assert heeded(signal.SIGHUP, signal.SIGTERM) == before
signal.raise_signal(signal.SIGTERM)
assert subprocess.run([sys.executable, "-c", "import signal; signal.raise_signal(signal.SIGTERM)"]).returncode == -15
print(*before)
"""


def test_an_ignored_signal_stays_so_and_is_not_handed_to_children() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    done = subprocess.run([sys.executable, "-c", CHILD], preexec_fn=ignore, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{int(signal.SIGHUP)}\n"), done.stderr


# Coroutines at once: their results, and what becomes of the others when one fails or the caller is cancelled.


class Work:
    """Coroutines that note how they end."""

    def __init__(self) -> None:
        self.ended: dict[str, str] = {}
        self.waiting = asyncio.Event()

    async def returns(self, name: str) -> str:
        await asyncio.sleep(0)
        self.ended[name] = "returned"
        return name

    async def raises(self, name: str) -> str:
        await asyncio.sleep(0)
        self.ended[name] = "raised"
        raise KeyError(name)

    async def waits(self, name: str) -> str:
        try:
            self.waiting.set()
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            self.ended[name] = "cancelled"
            raise
        return name


@pytest.mark.parametrize("at_once", [gather_or_cancel, to_the_end])
async def test_results_come_in_the_order_of_the_work(at_once: Callable[..., Awaitable[list[str]]]) -> None:
    work = Work()
    assert await at_once() == []
    assert await at_once(work.returns("a"), work.returns("b")) == ["a", "b"]


async def test_the_others_have_ended_when_the_error_of_one_is_raised() -> None:
    work = Work()
    with pytest.raises(KeyError, match="b"):
        await gather_or_cancel(work.waits("a"), work.raises("b"), work.waits("c"))
    assert work.ended == {"a": "cancelled", "b": "raised", "c": "cancelled"}


async def test_all_is_done_before_an_error_is_raised() -> None:
    work = Work()
    with pytest.raises(KeyError, match="a"):
        await to_the_end(work.raises("a"), work.returns("b"), work.raises("c"))
    assert work.ended == {"a": "raised", "b": "returned", "c": "raised"}


@pytest.mark.parametrize("at_once", [gather_or_cancel, to_the_end])
async def test_what_is_cancelled_leaves_nothing_behind(at_once: Callable[..., Awaitable[list[str]]]) -> None:
    work = Work()
    task = asyncio.ensure_future(at_once(work.waits("a"), work.waits("b")))
    await work.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended == {"a": "cancelled", "b": "cancelled"}


async def test_work_that_cancels_itself_cancels_the_caller() -> None:
    async def cancels() -> str:
        raise asyncio.CancelledError

    work = Work()
    with pytest.raises(asyncio.CancelledError):
        await gather_or_cancel(work.waits("a"), cancels())
    assert work.ended == {"a": "cancelled"}


def package_sources() -> list[Path]:
    package = Path(concurrency.__file__).parent
    sources = [file for file in package.glob("**/*.py") if file.name != "concurrency.py"]
    sources += [file for part in package.iterdir() if part.is_symlink() for file in part.resolve().rglob("*.py")]
    assert len(sources) > 150
    return sources


def test_the_package_runs_nothing_at_once_that_may_outlive_its_caller() -> None:
    assert [str(file) for file in package_sources() if "asyncio.gather(" in file.read_text()] == []


def _unowned(tree: ast.AST) -> list[int]:
    """The lines of tasks in local variables that may outlive their function: it stores them nowhere, and neither a
    ``finally`` nor an ``except`` names them. A task without any name is ruff's RUF006."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        kept: set[str] = set()
        for node in ast.walk(function):
            inside: list[ast.AST] = []
            if isinstance(node, ast.Try):
                inside = [*node.finalbody, *node.handlers]
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name | ast.Tuple):
                inside = [node.value]
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("add", "append", "shield"):
                inside = list(node.args)
            elif isinstance(node, ast.Assign) and (
                isinstance(node.value, ast.List) or not all(isinstance(target, ast.Name) for target in node.targets)
            ):
                inside = [node.value]
            kept |= {name.id for part in inside for name in ast.walk(part) if isinstance(name, ast.Name)}
        for node in ast.walk(function):
            # Those of a TaskGroup end with it.
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(MAKES_TASKS):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                if len(names) == len(node.targets) and not names & kept:
                    found.append(node.lineno)
    return found


MAKES_TASKS = ("asyncio.create_task(", "asyncio.ensure_future(")


def test_no_task_in_the_package_outlives_its_function_without_an_owner() -> None:
    texts = {file: file.read_text() for file in package_sources()}
    makers = {file: text for file, text in texts.items() if any(call in text for call in MAKES_TASKS)}
    found = [f"{file}:{line}" for file, text in makers.items() for line in _unowned(ast.parse(text))]
    assert found == []
    begin = "async def f():\n    task = asyncio.create_task(g())\n"
    lost, held = f"{begin}    await h()\n    await task\n", f"{begin}    try: await h()\n    finally: task.cancel()\n"
    assert (_unowned(ast.parse(lost)), _unowned(ast.parse(held))) == ([2], [])


async def test_work_that_takes_too_long_has_ended_when_that_is_raised() -> None:
    work = Work()
    with pytest.raises(Overdue):
        await within(0.05, work.waits("a"))
    assert work.ended == {"a": "cancelled"}
    assert await within(30.0, work.returns("b")) == "b"


async def test_a_time_out_of_the_work_itself_is_not_that_of_the_deadline() -> None:
    async def times_out() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError) as raised:
        await within(30.0, times_out())
    assert not isinstance(raised.value, Overdue)


ENDS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(1), asyncio.CancelledError()]


@pytest.mark.parametrize("error", ENDS, ids=repr)
async def test_an_end_that_users_code_raises_is_an_error_to_its_caller(error: BaseException) -> None:
    async def ends() -> None:
        raise error

    def ends_in_a_thread() -> None:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        await contained(ends())
    with pytest.raises(RuntimeError, match=type(error).__name__):
        await DaemonCalls("key").call(ends_in_a_thread, 30.0)


async def test_a_thread_takes_further_calls_without_the_context_of_earlier_ones() -> None:
    calls, variable, seen = DaemonCalls("key"), ContextVar("variable", default=0), set[threading.Thread]()

    def run() -> tuple[threading.Thread, int]:
        found = variable.get()
        variable.set(1)
        return threading.current_thread(), found

    # The thread of a call becomes idle a little after the call's result is there.
    for _ in range(1000):
        thread, found = await calls.call(run, 30.0)
        assert found == 0
        if thread in seen:
            return
        seen.add(thread)
    pytest.fail("each call had a thread of its own")


async def test_no_call_waits_for_another() -> None:
    calls, release = DaemonCalls("key"), threading.Event()
    waiting = [asyncio.ensure_future(calls.call(lambda: release.wait(30), 30.0)) for _ in range(MOST_IDLE + 2)]
    await asyncio.sleep(0)
    assert await calls.call(lambda: "at once", 30.0) == "at once"
    assert not any(call.done() for call in waiting)
    release.set()
    assert all(await asyncio.gather(*waiting))


async def test_an_idle_thread_keeps_nothing_of_its_calls() -> None:
    class Kept:
        pass

    calls = DaemonCalls("key")
    for _ in range(2):
        given, returned = Kept(), Kept()
        known = [weakref.ref(given), weakref.ref(returned)]
        assert await calls.call(lambda given=given, returned=returned: returned if given else None, 30.0) is returned
        del given, returned
        # The thread lets go a little after the call's result is there.
        for _ in range(1000):
            if not any(ref() for ref in known):
                break
            await asyncio.sleep(0.01)
        assert not any(ref() for ref in known)


async def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "IDLE_S", 0.01)
    thread = await DaemonCalls("key").call(threading.current_thread, 30.0)
    await asyncio.to_thread(thread.join, 30.0)
    assert not thread.is_alive()
    assert await DaemonCalls("key").call(lambda: 1, 30.0) == 1


async def test_users_code_can_be_cancelled() -> None:
    waiting = asyncio.ensure_future(contained(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


# Python does not look for cycles while a batch is decoded, and goes on to afterwards.


@pytest.fixture
def looks():
    """How often Python looked for cycles, one entry each time; it looks after ten new objects."""
    found, thresholds = [], gc.get_threshold()

    def look(phase, info):
        found.append(phase)

    gc.callbacks.append(look)
    gc.set_threshold(10)
    yield found
    gc.callbacks.remove(look)
    gc.set_threshold(*thresholds)


def test_inside_the_block_python_does_not_look_for_cycles(looks):
    with no_collection():
        looks.clear()
        kept = [[number] for number in range(1000)]
        assert not looks
    assert [[number] for number in range(1000)] == kept and looks


def test_an_error_in_the_block_ends_it(looks):
    with pytest.raises(ValueError), no_collection():
        raise ValueError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_blocks_of_threads_may_overlap_in_any_order():
    first, second = no_collection(), no_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_nothing_is_looked_for_among_what_is_imported() -> None:
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            made = [[number] for number in range(10_000)]
        assert gc.isenabled() and gc.get_freeze_count() > before + len(made)
    finally:
        gc.unfreeze()


def test_py_spy_is_found_beside_this_python_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("environment", "path"):
        (tmp_path / folder).mkdir()
    program = tmp_path / "path" / "py-spy"
    program.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "python"))
    monkeypatch.setenv("PATH", str(program.parent))
    assert py_spy() == str(program)
    (own := tmp_path / "environment" / "py-spy").touch(0o755)
    assert py_spy() == str(own)


# While this process stands still, deadlines hardly run: answers that wait are read before a timer gives them up.


LOOK_S = 0.1
LIMIT_S = 1.5
# How long the answer takes, and how long the process stands still meanwhile.
ANSWER_S, PAUSE_S = 0.3, 1.7


async def answers() -> str:
    """Take ANSWER_S of the time when this process runs."""
    for _ in range(30):
        await asyncio.sleep(ANSWER_S / 30)
    return "in time"


async def in_block(seconds: float, work: Awaitable[object]) -> object:
    async with time_limit(seconds):
        return await work


async def in_environment(seconds: float, work: Awaitable[object]) -> object:
    async def reset() -> object:
        return await work

    return await call_user("reset()", reset, timeout_s=seconds)


async def of_queue(seconds: float, work: Awaitable[object], first: Refused | None = None) -> object:
    """The queue's client, with an answer that comes when the work is done; ``first`` is answered then, if given."""
    client = QueueClient("tcp://127.0.0.1:1", role="person", name="test", timeout_s=seconds, patience_s=60.0)
    # Nothing is sent, so that the answers are the test's.
    sent = asyncio.Queue[None]()
    client._send = lambda frames: sent.put_nowait(None)  # type: ignore[method-assign]

    async def answer() -> object:
        await sent.get()
        found = await work
        for reply in (first, Done()):
            if reply is not None:
                ((request_id, pending),) = client._pending.items()
                pending.answer.set_result(wire.ReplyMessage(request_id, reply, []))
                if reply is first:
                    await sent.get()
        return found

    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(answer())
        await client.exchange(Status())
    return answering.result()


async def of_busy_queue(seconds: float, work: Awaitable[object]) -> object:
    return await of_queue(seconds, work, Refused(code=wire.BUSY, reason="as many clients as it takes"))


Limited = Callable[[float, Awaitable[object]], Awaitable[object]]
LIMITED: list[Limited] = [within, in_block, in_environment, of_queue, of_busy_queue]


@pytest.mark.parametrize("limited", LIMITED)
async def test_a_pause_counts_little(monkeypatch: pytest.MonkeyPatch, limited: Limited) -> None:
    monkeypatch.setattr(concurrency, "LOOK_S", LOOK_S)
    waiting = asyncio.ensure_future(limited(LIMIT_S, answers()))
    await asyncio.sleep(0.01)
    time.sleep(PAUSE_S)  # noqa: ASYNC251  the process is to stand still
    assert await waiting == "in time"


@pytest.mark.parametrize("limited", LIMITED)
@pytest.mark.usefixtures("simulated_time")
async def test_the_whole_limit_counts_without_a_pause(limited: Limited) -> None:
    began = time.monotonic()
    with pytest.raises((TimeoutError, EnvironmentFailed, BaseExceptionGroup)) as failed:
        await limited(7.25, asyncio.sleep(3600))
    if isinstance(failed.value, BaseExceptionGroup):
        assert failed.group_contains(QueueLost)
    assert time.monotonic() - began == pytest.approx(7.25, abs=0.01)
    assert await limited(7.25, asyncio.sleep(7.0, "in time")) == "in time"


@pytest.mark.usefixtures("simulated_time")
async def test_a_block_stays_in_its_task_and_may_have_no_limit() -> None:
    async with time_limit(None) as limit:
        await asyncio.sleep(3600)
        assert limit.when() is None
    with pytest.raises(TimeoutError):
        async with time_limit(0.0) as limit:
            await asyncio.sleep(1)
    assert limit.expired()
    task = asyncio.current_task()
    async with time_limit(5.0):
        assert asyncio.current_task() is task
    # No timer is left that would cancel the task after its block.
    await asyncio.sleep(60)


async def test_a_process_that_scores_has_no_timer_that_a_pause_would_let_run_out() -> None:
    """The kernel's timers go on while a process is stopped, and kill it when it is continued."""
    async with RewardService(config(f"{__file__}:alarm_s")) as service:
        scored = await score(service, "any")
    assert (scored.reward, scored.error) == (0.0, "")


def alarm_s(**conversation: Any) -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


# Waits that only ask again, answers that others miss as well, and reports of what is silent.
COSTS_NOTHING = """
    ANSWER_S ANSWER_S SPEED_S+ANSWER_S DIAGNOSIS_S FETCH_S HEALTH_S HEALTH_S None
    min(progress.remaining_s,BACKOFF_S) process.wait(),PAGE_END_S self._ping_s self._timeout_s timeout_s
    wait_s wait_s within_s
"""


def test_no_other_deadline_of_a_coroutine_counts_pauses() -> None:
    found = list[str]()
    for file in package_sources():
        text = file.read_text()
        if "asyncio.timeout" in text or "asyncio.wait_for" in text:
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            found += [
                ",".join(map(ast.unparse, call.args)).replace(" ", "")
                for call in calls
                if ast.unparse(call.func) in ("asyncio.timeout", "asyncio.timeout_at", "asyncio.wait_for")
            ]
    assert sorted(found) == sorted(COSTS_NOTHING.split())

"""The supervisor with fake roles as real processes: restarts, failures, signals, and that nothing is left behind."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_async.errors import ConfigError, UserError
from rl_async.launcher import ray_keeper as keepers
from rl_async.launcher import ray_keeper as remote
from rl_async.launcher.plan.planning import PortWish, assign_ports
from rl_async.launcher.ray_keeper import AllocationRequest, Keeper, KeeperGone, KeeperSilent, RemoteChild
from rl_async.launcher.supervisor import Interrupted, RoleFailed, Supervisor, ThisMachine
from rl_async.process.run_files import ENDED, read_roster, state_of

DRIVER = Path(__file__).with_name("supervisor_process.py")
SLOW = pytest.mark.slow
LATE_S = 4.0  # within which a fake engine starts, and after which a silent one counts as lost


async def supervise(
    rig: Any,
    plan: Any,
    meddle: Callable[[Supervisor], Awaitable[None]] | None = None,
    on_trouble: Callable[[str], Awaitable[None]] | None = None,
    on_stop: Callable[[int], None] | None = None,
) -> Supervisor:
    """Run a plan to its end while ``meddle`` does harm. Whatever happens, nothing may be left running."""
    ports = assign_ports(plan.ports)
    with Supervisor(
        plan, ThisMachine(ports, rig.folder), rig.folder, on_trouble=on_trouble, on_stop=on_stop
    ) as supervisor:
        meddling = asyncio.create_task(meddle(supervisor)) if meddle else None
        try:
            await supervisor.run()
        finally:
            if meddling is not None:
                meddling.cancel()
                await asyncio.wait([meddling])
    assert rig.left() == []
    for port in ports.values():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    if meddling is not None and not meddling.cancelled():
        meddling.result()
    return supervisor


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(0.02)


def state(supervisor: Supervisor, name: str) -> tuple[str, int]:
    return next((s.state, s.restarts) for s in supervisor.children.states.values() if s.name == name)


async def registered(supervisor: Supervisor) -> list[str]:
    return [record.engine_id for record in (await supervisor.queue.engines()).engines]


async def test_a_run_ends_with_its_trainer(rig: Any, make_plan: Any) -> None:
    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: state(supervisor, "engine-0") == ("running", 0))
        assert await registered(supervisor) == ["engine-0"]
        rig.go()

    supervisor = await supervise(rig, make_plan(rig.folder), meddle)
    assert {s.state for s in supervisor.children.states.values()} == {"ended"}
    assert (rig.folder / "logs" / "engine-0.log").read_text() == "engine has started\n"
    assert (rig.folder / "trainer.resumed").read_text() == "False\n"


async def test_a_killed_engine_comes_back_under_another_name(rig: Any, make_plan: Any) -> None:
    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: state(supervisor, "engine-0") == ("running", 0))
        os.kill(rig.pids("engine")[-1], signal.SIGKILL)
        await eventually(lambda: state(supervisor, "engine-0") == ("running", 1))
        assert await registered(supervisor) == ["engine-0.1"]
        rig.go()

    await supervise(rig, make_plan(rig.folder), meddle)
    assert len(rig.pids("engine")) == 2


@pytest.mark.parametrize("end", [pytest.param("once", marks=SLOW), "stuck"])
async def test_an_engine_that_is_lost_between_its_first_answers_is_replaced(rig: Any, make_plan: Any, end: str) -> None:
    rig.do("engine", end, "work")

    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: state(supervisor, "engine-0") == ("running", 1))
        rig.go()

    await supervise(rig, replace(make_plan(rig.folder), start_timeout_s=LATE_S), meddle)
    assert len(rig.pids("engine")) == 2


@pytest.mark.parametrize("role", ["engine", "reward-model"])
async def test_a_server_that_takes_requests_without_a_token_is_not_used(rig: Any, make_plan: Any, role: str) -> None:
    rig.do(role, "open")
    rig.go()
    with pytest.raises(RoleFailed, match=role):
        await supervise(rig, make_plan(rig.folder, reward_model=True))
    assert len(rig.pids(role)) == 1


async def test_an_engine_that_was_cut_off_is_replaced(rig: Any, make_plan: Any) -> None:
    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: state(supervisor, "engine-0") == ("running", 0))
        await supervisor.queue.remove_engine("engine-0", "it did not take the weights")
        await eventually(lambda: state(supervisor, "engine-0") == ("running", 1))
        rig.go()

    await supervise(rig, make_plan(rig.folder), meddle)
    assert len(rig.pids("engine")) == 2


async def test_a_killed_worker_is_started_again(rig: Any, make_plan: Any) -> None:
    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: rig.pids("worker"))
        os.kill(rig.pids("worker")[-1], signal.SIGKILL)
        await eventually(lambda: len(rig.pids("worker")) == 2)
        os.kill(rig.pids("worker")[-1], signal.SIGTERM)  # exit code 0 before the end counts as well
        await eventually(lambda: len(rig.pids("worker")) == 3)
        rig.go()

    supervisor = await supervise(rig, make_plan(rig.folder), meddle)
    assert state(supervisor, "worker-0") == ("ended", 2)


async def test_workers_wait_for_the_reward_model_and_it_comes_back(rig: Any, make_plan: Any) -> None:
    rig.do("reward-model", "exit 7", "work")

    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: state(supervisor, "reward-model") == ("running", 1))
        await eventually(lambda: rig.pids("worker"))
        os.kill(rig.pids("reward-model")[-1], signal.SIGKILL)
        await eventually(lambda: state(supervisor, "reward-model") == ("running", 2))
        rig.go()

    supervisor = await supervise(rig, make_plan(rig.folder, reward_model=True), meddle)
    assert state(supervisor, "worker-0") == ("ended", 0), "the worker outlived the reward model"
    assert len(rig.pids("reward-model")) == 3


async def test_without_a_reward_model_that_answers_no_worker_starts(rig: Any, make_plan: Any) -> None:
    rig.do("reward-model", "exit 7")
    with pytest.raises(RoleFailed, match=r"reward-model failed .*after 2 restarts"):
        await supervise(rig, make_plan(rig.folder, reward_model=True))
    assert rig.pids("worker") == []


async def test_a_trainer_that_died_resumes(rig: Any, make_plan: Any) -> None:
    async def meddle(supervisor: Supervisor) -> None:
        resumed = rig.folder / "trainer.resumed"
        await eventually(lambda: resumed.exists() and resumed.read_text())
        os.kill(rig.pids("trainer")[-1], signal.SIGKILL)
        await eventually(lambda: len(rig.pids("trainer")) == 2)
        rig.go()

    await supervise(rig, make_plan(rig.folder), meddle)
    assert (rig.folder / "trainer.resumed").read_text() == "False\nTrue\n"
    assert len(rig.pids("queue")) == 1


# 143 is the exit code of a process that somebody else asked to stop.
@pytest.mark.parametrize("end", [pytest.param("exit 0", marks=SLOW), "exit 143"])
async def test_a_trainer_that_ends_early_without_error_goes_on(rig: Any, make_plan: Any, end: str) -> None:
    rig.do("trainer", end, "work")
    rig.go()
    await supervise(rig, make_plan(rig.folder))
    assert len(rig.pids("trainer")) == 2


async def test_a_role_that_fails_too_often_fails_the_run(rig: Any, make_plan: Any) -> None:
    rig.do("worker", "exit 7")
    with pytest.raises(RoleFailed) as caught:
        await supervise(rig, make_plan(rig.folder, max_restarts=1))
    for part in ("worker-0", "exit code 7", "after 1 restarts", "launcher.max_restarts"):
        assert part in str(caught.value).splitlines()[0]
    said, log = str(caught.value).splitlines()[-2:]
    assert "worker-0" in said and "something broke" in said
    assert str(rig.folder / "logs" / "worker-0.log") in log
    assert len(rig.pids("worker")) == 2
    assert rig.left() == []


@pytest.mark.parametrize("role", ["engine", pytest.param("worker", marks=SLOW)])
async def test_a_run_goes_on_without_one_of_several_engines_or_workers(rig: Any, make_plan: Any, role: str) -> None:
    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: state(supervisor, f"{role}-1") == ("failed", 1))
        await eventually(lambda: state(supervisor, "engine-0") == ("running", 0) and rig.pids("worker"))
        rig.go()

    plan = make_plan(rig.folder, max_restarts=1)
    kept = getattr(plan, f"{role}s")
    broken = replace(kept[0], name=f"{role}-1", argv=("sh", "-c", "exit 7"))
    changes: dict[str, Any] = {f"{role}s": (*kept, broken), "ports": (*plan.ports, PortWish("engine-1"))}
    supervisor = await supervise(rig, replace(plan, **changes), meddle)
    assert {s.name: s.state for s in supervisor.children.states.values() if s.state != "ended"} == {
        f"{role}-1": "failed"
    }


@pytest.mark.parametrize(
    "role", ["queue", "trainer", *(pytest.param(role, marks=SLOW) for role in ("engine", "worker"))]
)
async def test_a_mistake_of_the_user_ends_the_run_at_once(rig: Any, make_plan: Any, role: str) -> None:
    rig.do(role, "exit 2")
    with pytest.raises(UserError, match="the data is wrong") as caught:
        await supervise(rig, make_plan(rig.folder))
    assert role in str(caught.value)
    assert len(rig.pids(role)) == 1
    assert rig.left() == []


async def test_a_trainer_that_diverged_is_not_started_again(rig: Any, make_plan: Any) -> None:
    rig.do("trainer", "exit 3")
    with pytest.raises(RoleFailed, match="trainer-0"):
        await supervise(rig, make_plan(rig.folder))
    assert len(rig.pids("trainer")) == 1


async def test_the_death_of_the_queue_ends_the_run(rig: Any, make_plan: Any) -> None:
    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: state(supervisor, "engine-0") == ("running", 0))
        os.kill(rig.pids("queue")[-1], signal.SIGKILL)

    with pytest.raises(RoleFailed, match=r"queue failed \(killed by SIGKILL\)"):
        await supervise(rig, make_plan(rig.folder), meddle)
    assert rig.left() == []


async def test_a_queue_whose_journal_outlives_it_is_started_again(rig: Any, make_plan: Any) -> None:
    """Until it has answered, that is a first start again: what the first was to forget may not be in the journal."""
    rig.do("queue", "exit 7", "work")

    async def meddle(supervisor: Supervisor) -> None:
        for restarts in (1, 2, 3):
            await eventually(lambda restarts=restarts: state(supervisor, "queue") == ("running", restarts))
            await eventually(lambda: state(supervisor, "engine-0") == ("running", 0))
            assert await registered(supervisor) == ["engine-0"], "the registry outlived the queue"
            if restarts < 3:
                os.kill(rig.pids("queue")[-1], signal.SIGKILL)
        await eventually(lambda: rig.pids("worker"))
        rig.go()

    supervisor = await supervise(rig, make_plan(rig.folder, queue_restarts=3), meddle)
    assert state(supervisor, "queue") == ("ended", 3)
    assert (rig.folder / "queue.relaunched").read_text().split() == ["True", "True", "False", "False"]
    assert len(rig.pids("engine")) == len(rig.pids("worker")) == len(rig.pids("trainer")) == 1


async def test_engines_start_beside_the_queue_and_its_clients_once_it_answers(rig: Any, make_plan: Any) -> None:
    rig.do("queue", "mute", "work")

    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: bool(rig.pids("engine") and rig.pids("queue")))
        assert state(supervisor, "worker-0") == state(supervisor, "trainer-0") == ("waiting", 0)
        os.kill(rig.pids("queue")[0], signal.SIGKILL)
        await eventually(lambda: state(supervisor, "trainer-0") == state(supervisor, "engine-0") == ("running", 0))
        assert await registered(supervisor) == ["engine-0"]
        await eventually(lambda: rig.pids("worker"))
        rig.go()

    await supervise(rig, make_plan(rig.folder, queue_restarts=1), meddle)
    assert (rig.folder / "queue.relaunched").read_text().split() == ["True", "True"]
    assert len(rig.pids("engine")) == len(rig.pids("worker")) == len(rig.pids("trainer")) == 1


async def test_a_queue_that_dies_too_often_ends_the_run(rig: Any, make_plan: Any) -> None:
    rig.do("queue", "exit 7")
    with pytest.raises(RoleFailed, match=r"queue failed \(exit code 7 after 1 restarts\)"):
        await supervise(rig, make_plan(rig.folder, queue_restarts=1))
    assert rig.left() == []


class Trouble:
    """Keeps what the supervisor says of it, and who lived and was listed in ``processes.json`` at that moment."""

    def __init__(self, rig: Any) -> None:
        self._rig = rig
        self.said: list[str] = []
        self.alive: list[set[int]] = []
        self.listed: list[set[int]] = []

    async def sees_folder(self, why: str) -> None:
        self.said.append(why)
        self.alive.append(set(self._rig.alive()))
        self.listed.append({record.pid for record in read_roster(self._rig.folder)})


async def test_an_engine_that_is_late_is_looked_at_before_it_is_killed(rig: Any, make_plan: Any) -> None:
    rig.do("engine", "mute", "work")
    trouble = Trouble(rig)

    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: state(supervisor, "engine-0") == ("running", 1))
        rig.go()

    plan = replace(make_plan(rig.folder), start_timeout_s=LATE_S)
    await supervise(rig, plan, meddle, trouble.sees_folder)
    assert trouble.said == [f"engine-0 did not answer within {LATE_S:g} s"]
    late = rig.pids("engine")[0]
    assert late in trouble.alive[0] and late in trouble.listed[0]


async def test_when_the_queue_is_lost_the_others_are_looked_at_before_they_are_stopped(
    rig: Any, make_plan: Any
) -> None:
    trouble = Trouble(rig)

    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: state(supervisor, "engine-0") == ("running", 0))
        await eventually(lambda: rig.pids("worker") and rig.pids("trainer"))
        os.kill(rig.pids("queue")[-1], signal.SIGKILL)

    with pytest.raises(RoleFailed, match="queue failed"):
        await supervise(rig, make_plan(rig.folder), meddle, trouble.sees_folder)
    (why,) = trouble.said
    assert why.startswith("queue failed (killed by SIGKILL")
    others = {rig.pids(kind)[-1] for kind in ("engine", "worker", "trainer")}
    assert others <= trouble.alive[0] and others | {rig.pids("queue")[-1]} <= trouble.listed[0]


async def test_what_a_role_started_ends_with_it(rig: Any, make_plan: Any) -> None:
    rig.do("worker", "grandchild")

    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: rig.pids("grandchild"))
        os.kill(rig.pids("worker")[-1], signal.SIGKILL)
        await eventually(lambda: len(rig.pids("grandchild")) == 2)
        rig.go()

    await supervise(rig, make_plan(rig.folder), meddle)
    assert len(rig.pids("grandchild")) == 2


async def test_a_preparation_passes_its_lines_on(rig: Any, make_plan: Any) -> None:
    plan = make_plan(rig.folder)
    rig.do("prepare", "exit 0", "exit 2", "exit 1")
    lines: list[str] = []
    executor = ThisMachine({}, rig.folder)
    with Supervisor(plan, executor, rig.folder) as supervisor:
        await supervisor.run_once(plan.prepare, lines.append)
        assert lines == ["prepare has started", "something broke"]
        await supervisor.children.beside(executor.allocate())
        supervisor.children.write_roster()
        assert [(record.name, record.state, record.exit) for record in read_roster(rig.folder)] == [
            ("prepare", "ended", 0)
        ]
        with pytest.raises(UserError, match="the data is wrong"):
            await supervisor.run_once(plan.prepare, lines.append)
        with pytest.raises(RoleFailed, match="something broke"):
            await supervisor.run_once(plan.prepare, lines.append)


@pytest.fixture
def driver(rig: Any, until: Any) -> Any:
    """A supervisor in a process of its own, all of whose roles run."""
    process: list[subprocess.Popen[bytes]] = []

    def start(*ignored: signal.Signals) -> subprocess.Popen[bytes]:
        def ignore() -> None:
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        process.append(subprocess.Popen([sys.executable, str(DRIVER), str(rig.folder)], preexec_fn=ignore))
        until(lambda: all(rig.pids(kind) for kind in ("queue", "engine", "worker", "trainer")))
        return process[0]

    yield start
    for one in process:
        one.kill()
        one.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=SLOW)])
def test_one_signal_stops_everything_cleanly(rig: Any, driver: Any, number: int) -> None:
    process = driver()
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert rig.left() == []


def test_signals_that_were_ignored_at_the_start_stay_ignored(rig: Any, driver: Any) -> None:
    process = driver(signal.SIGINT, signal.SIGHUP)
    for number in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    rig.go()
    assert process.wait(60) == 0
    assert rig.left() == []


@pytest.mark.parametrize("times", [1, 2])
async def test_a_trainer_that_is_asked_to_stop_has_the_time_of_its_step(rig: Any, make_plan: Any, times: int) -> None:
    rig.do("trainer", "saves")
    told: list[int] = []

    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: state(supervisor, "worker-0") == ("running", 0) and rig.pids("trainer"))
        await eventually((rig.folder / "trainer.resumed").exists)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
            await eventually((rig.folder / "trainer.asked").exists)
        await asyncio.sleep(3 * plan.stop_timeout_s)
        rig.go()

    plan = make_plan(rig.folder, stop_timeout_s=0.3)
    with pytest.raises(Interrupted):
        await supervise(rig, plan, meddle, on_stop=told.append)
    assert (rig.folder / "trainer.saved").exists()
    assert told == [signal.SIGTERM]


async def test_a_trainer_has_time_to_save_when_another_role_fails(rig: Any, make_plan: Any) -> None:
    rig.do("trainer", "saves")

    async def meddle(supervisor: Supervisor) -> None:
        await eventually(lambda: state(supervisor, "worker-0") == ("running", 0) and rig.pids("worker"))
        await eventually((rig.folder / "trainer.resumed").exists)
        os.kill(rig.pids("worker")[-1], signal.SIGKILL)
        await eventually((rig.folder / "trainer.asked").exists)
        rig.go()

    with pytest.raises(RoleFailed, match="worker-0"):
        await supervise(rig, make_plan(rig.folder, max_restarts=0), meddle)
    assert (rig.folder / "trainer.saved").exists()


def test_a_second_signal_kills_what_does_not_listen(rig: Any, driver: Any, until: Any) -> None:
    rig.do("worker", "stubborn")
    process = driver()
    process.send_signal(signal.SIGINT)
    until(lambda: not any(map(rig_running, rig.pids("trainer"))))
    assert any(map(rig_running, rig.pids("worker")))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert rig.left() == []


def test_nothing_outlives_a_killed_supervisor(rig: Any, driver: Any, until: Any) -> None:
    process = driver()
    process.kill()
    process.wait(60)
    until(lambda: not rig.alive())


def rig_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# A keeper and the supervisor's view of its process, without Ray: the line between them is a call, and can be cut.


HOST = "127.0.0.1"
TALK = "import sys, time; print('one', flush=True); print('two', file=sys.stderr, flush=True); time.sleep({})"


class DirectClient:
    """Calls the keeper, unless ``cut`` says what happens instead; counts the calls."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper, self.cut, self.asked = keeper, None, 0

    cut: Exception | None

    async def ask(self, method: str, *arguments: Any, timeout_s: float = 10.0) -> Any:
        self.asked += 1
        if self.cut is not None:
            raise self.cut
        return await getattr(self._keeper, method)(*arguments)

    def tell(self, method: str) -> None:
        asyncio.get_running_loop().create_task(getattr(self._keeper, method)())


@pytest.fixture
async def keeper() -> AsyncIterator[Keeper]:
    made = Keeper(lambda: HOST)
    yield made
    await made.close()


def request(folder: Path, **changes: Any) -> AllocationRequest:
    given: dict[str, Any] = {
        "name": "engine-0",
        "cwd": str(folder),
        "run": "runs/x",
        "token": ".token",
        "files": {"config.yaml": b"seed: 1\n", "keys/run.key": b"secret"},
        "folders": [],
        "ports": [("engine-0", 0, "rollout.port")],
    }
    return AllocationRequest(**given | changes)


async def begin(keeper: Keeper, folder: Path, code: str) -> tuple[RemoteChild, DirectClient]:
    await keeper.allocate(request(folder))
    line = DirectClient(keeper)
    started = await keeper.start(["", "-c", code], {})
    return RemoteChild("engine-0", line, started, "10.0.0.2", folder / "engine-0.log"), line


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - files and processes set no event
            await asyncio.sleep(0.02)


async def test_output_and_exit_code_come_to_the_supervisor(keeper: Keeper, tmp_path: Path) -> None:
    (tmp_path / "engine-0.log").write_text("of an earlier process\n")
    child, _ = await begin(keeper, tmp_path, "print('lines ' * 100_000); raise SystemExit(7)")
    assert await child.wait() == 7 and child.returncode == 7 and not child.lost
    assert child.output().endswith("lines \n") and "earlier" not in child.output()
    assert (tmp_path / "engine-0.log").stat().st_size == len("of an earlier process\n") + 6 * 100_000 + 1


async def test_a_process_starts_again_after_another_keeper_of_its_node_has_closed(
    keeper: Keeper, tmp_path: Path
) -> None:
    reads = "import pathlib; print(pathlib.Path('runs/x/config.yaml').read_text())"
    other = Keeper(lambda: HOST)
    await other.allocate(request(tmp_path))
    child, line = await begin(keeper, tmp_path, reads)
    assert await child.wait() == 0
    await other.close()
    assert not (tmp_path / "runs" / "x" / "config.yaml").exists()
    again = RemoteChild("engine-0", line, await keeper.start(["", "-c", reads], {}), "10.0.0.2", tmp_path / "again.log")
    assert await again.wait() == 0 and "seed: 1" in again.output()


async def test_a_process_is_stopped_and_killed_there(keeper: Keeper, tmp_path: Path) -> None:
    child, _ = await begin(keeper, tmp_path, TALK.format(600))
    await until(lambda: child.output() == "one\ntwo\n")
    assert await child.stop(10.0) == -signal.SIGTERM
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + TALK.format(600)
    child, _ = await begin(keeper, tmp_path, stubborn)
    await until(lambda: child.output() == "one\ntwo\n")
    assert await child.stop(0.1) == -signal.SIGKILL
    child, _ = await begin(keeper, tmp_path, TALK.format(600))
    child.kill_now()
    assert await child.wait() == -signal.SIGKILL


async def test_a_keeper_that_is_gone_is_a_killed_process(keeper: Keeper, tmp_path: Path) -> None:
    child, line = await begin(keeper, tmp_path, TALK.format(600))
    line.cut = KeeperGone("its node has died")
    assert await child.wait() == -signal.SIGKILL and child.lost
    assert child.tail().endswith("engine-0 was lost with its node: its node has died")
    assert await child.kill() == await child.stop(1.0) == -signal.SIGKILL


async def test_short_silence_is_forgiven_and_long_silence_is_not(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.01)
    child, line = await begin(keeper, tmp_path, TALK.format(600))
    await until(lambda: child.output() == "one\ntwo\n")
    before, line.cut = line.asked, KeeperSilent("no answer")
    await until(lambda: line.asked >= before + 3)
    line.cut = None
    assert await child.stop(10.0) == -signal.SIGTERM and not child.lost
    monkeypatch.setattr(remote, "LOST_S", 0.1)
    child, line = await begin(keeper, tmp_path, TALK.format(600))
    line.cut = KeeperSilent("no answer")
    assert await child.wait() == -signal.SIGKILL and child.lost


async def test_a_process_that_nobody_asks_for_is_ended_by_its_keeper(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the supervisor takes it for lost, so that it never runs twice."""
    assert keepers.ORPHANED_S < remote.LOST_S
    await keeper.allocate(request(tmp_path))
    monkeypatch.setattr(keepers, "ORPHANED_S", 0.2)
    started = await keeper.start(["", "-c", TALK.format(600)], {})
    await until(lambda: state_of(started.pid) in ENDED)


async def test_a_node_without_the_run_folder_is_lent_its_files(keeper: Keeper, tmp_path: Path) -> None:
    allocation = await keeper.allocate(request(tmp_path))
    assert not allocation.shared
    key = tmp_path / "runs" / "x" / "keys" / "run.key"
    assert key.read_bytes() == b"secret" and stat.S_IMODE(key.stat().st_mode) == 0o600
    await keeper.close()
    assert not key.exists() and not (tmp_path / "runs" / "x" / "config.yaml").exists()


async def test_files_of_another_run_are_neither_replaced_nor_removed(keeper: Keeper, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "x" / "config.yaml"
    other.parent.mkdir(parents=True)
    other.write_text("seed: 2\n")
    with pytest.raises(UserError, match=r"127\.0\.0\.1 .*config\.yaml"):
        await keeper.allocate(request(tmp_path))
    await keeper.close()
    assert other.read_text() == "seed: 2\n"


async def test_a_node_with_the_run_folder_keeps_it(keeper: Keeper, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    (run / ".token").touch()
    (run / "config.yaml").write_text("seed: 2\n")
    assert (await keeper.allocate(request(tmp_path))).shared
    await keeper.close()
    assert (run / "config.yaml").read_text() == "seed: 2\n"


async def test_where_the_launchers_folder_is_not_processes_run_in_one_of_their_own(
    keeper: Keeper, tmp_path: Path
) -> None:
    await keeper.allocate(request(tmp_path / "nowhere"))
    started = await keeper.start(["", "-c", TALK.format(600)], {})
    there = Path(os.readlink(f"/proc/{started.pid}/cwd"))
    assert (there / "runs" / "x" / "config.yaml").read_bytes() == b"seed: 1\n"
    await keeper.close()
    assert not any(map(os.path.exists, (there, tmp_path / "nowhere")))


async def test_a_missing_model_is_named_with_its_host(keeper: Keeper, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"model.path: {HOST}.*engine-0.*/m;"):
        await keeper.allocate(request(tmp_path, folders=[("model.path", "m")]))


async def test_a_free_port_is_held_until_a_server_takes_it(keeper: Keeper, tmp_path: Path) -> None:
    allocation = await keeper.allocate(request(tmp_path))
    port = allocation.ports["engine-0"]
    assert allocation.host == HOST and port > 0
    listen = (
        "import socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1);"
        f"s.bind(('{HOST}', {port})); s.listen(); print('listening', flush=True); s.accept()"
    )
    started = await keeper.start([sys.executable, "-c", listen], {})
    child = RemoteChild("engine-0", DirectClient(keeper), started, "", tmp_path / "log")
    await until(lambda: "listening" in child.output())
    with socket.create_connection((HOST, port), timeout=5):
        assert await child.wait() == 0


async def test_a_configured_port_that_is_taken_is_named(keeper: Keeper, tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        wish = ("engine-0", taken.getsockname()[1], "rollout.port")
        with pytest.raises(ConfigError, match=rf"rollout.port: port {wish[1]} for engine-0.*{HOST}"):
            await keeper.allocate(request(tmp_path, ports=[wish]))


async def test_process_groups_are_kept_to_the_interface_of_the_node(keeper: Keeper, tmp_path: Path) -> None:
    child, _ = await begin(keeper, tmp_path, "import os; print(os.environ['GLOO_SOCKET_IFNAME'])")
    assert await child.wait() == 0 and child.tail() == "lo"

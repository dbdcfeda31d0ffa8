"""A keeper and the supervisor's view of its process, without Ray: the line between them is a call, and can be cut."""

import asyncio
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rl_async.errors import ConfigError, UserError
from rl_async.launcher import ray_keeper as keepers
from rl_async.launcher import ray_keeper as remote
from rl_async.launcher.ray_keeper import AllocationRequest, Keeper, KeeperGone, KeeperSilent, RemoteChild
from rl_async.process.kernel import ENDED, state_of

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

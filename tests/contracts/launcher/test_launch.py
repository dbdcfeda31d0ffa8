"""``launch`` around a supervisor of fake roles, the lock of its run folder, and the page beside it."""

import asyncio
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.insight.live_view import View
from rl_async.launcher.plan.planning import assign_ports
from rl_async.launcher.run_folder import hold, hold_unnamed, new_run
from rl_async.launcher.runs import launch as module
from rl_async.launcher.runs.launch import PAGE_LOG, launch, log_into, make_ready, serve_beside
from rl_async.launcher.supervisor import RoleFailed
from rl_async.process.run_files import read_endpoints
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

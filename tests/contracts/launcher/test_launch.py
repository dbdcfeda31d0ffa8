"""``launch`` around a supervisor of fake roles: what is printed, logged and returned."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.configs.schema.run import RunConfig
from rl_async.insight.live_view import View
from rl_async.launcher.plan.planning import assign_ports
from rl_async.launcher.runs import launch as module
from rl_async.launcher.runs.launch import launch, log_into, make_ready
from rl_async.launcher.supervisor import RoleFailed
from rl_async.process.run_files import read_endpoints
from tests.support.configs import float32_config


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

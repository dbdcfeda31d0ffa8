"""The list of processes survives a full disk."""

import asyncio
import errno
from collections.abc import Mapping
from pathlib import Path

import pytest

from rl_async.insight.roster import ProcessState
from rl_async.launcher import supervisor
from rl_async.launcher.child_process import Roster, ThisMachine
from rl_async.launcher.plan.planning import ProcessSpec
from rl_async.launcher.supervisor import Children

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

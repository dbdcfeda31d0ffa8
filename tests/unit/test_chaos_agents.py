"""Which processes a chaos run of agents strikes, and how it tells what is left behind."""

import os
import random
import socket
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from rl_async.process import guard
from tests.chaos.agents.__main__ import all_rounds
from tests.chaos.agents.kinds import (
    FOLDERS,
    HERE,
    HOST,
    KINDS,
    PROGRAM,
    SERVER,
    VICTIMS,
    Process,
    Seen,
    kill,
    left_behind,
    processes,
    victims,
)


def test_kinds_and_their_roles_are_struck_equally_often() -> None:
    rounds = all_rounds(12 * len(KINDS), list(KINDS), random.Random(0))
    assert {len(roles) for roles in rounds.values()} == {12}
    for name, roles in rounds.items():
        assert set(Counter(roles).values()) == {len(roles) // len(KINDS[name].victims)}
        assert set(roles) == set(KINDS[name].victims) <= set(VICTIMS)


GUARD = ("python", "-I", "-S", guard.__file__, "17", "/tmp/folder")


def process(pid: int, parent: int, *argv: str, name: str = "python") -> Process:
    return Process(pid, 0, parent, name, argv)


@pytest.mark.parametrize(
    ("role", "argv", "name"),
    [
        ("agent worker", ("python", "-P", "-m", "rl_async.agent_loop", "--run", "x"), "python"),
        ("gateway", ("python", "-P", "-m", "rl_async.agent_loop.gateway", "--run", "x"), "python"),
        ("environment host", ("python", "-P", "-m", f"rl_async.{HOST}"), "python"),
        ("guard of an environment host", (*GUARD, "python", "-P", "-m", f"rl_async.{HOST}"), "python"),
        ("guard of an MCP server", (*GUARD, "npx", "server"), "python"),
        ("sandbox", ("bwrap", "--new-session"), "bwrap"),
        ("first process of a sandbox", ("python3", "-I", "-S", "/inside.py"), "python3"),
        ("rl-async play", ("python", "-m", "rl_async.launcher.cli", "play", "runs/x"), "python"),
    ],
)
def test_a_process_is_known_by_its_command(role: str, argv: tuple[str, ...], name: str) -> None:
    running = [process(1, 0, *argv, name=name), process(2, 1, "sleep", "600", name="sleep")]
    assert [found.pid for found in victims(role, running)] == [1]


def test_what_a_host_started_is_its_child() -> None:
    running = [
        process(1, 0, *GUARD, "python", "-P", "-m", f"rl_async.{HOST}"),
        process(2, 1, "python", "-P", "-m", f"rl_async.{HOST}"),
        process(3, 2, "sh"),
    ]
    assert [found.pid for found in victims("container of an environment", running)] == [3]


def test_a_killed_process_is_gone_and_no_other_of_its_number_is_struck() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        (found,) = [one for one in processes() if one.pid == child.pid]
        assert not kill(found._replace(started=found.started + 1)) and child.poll() is None
        assert kill(found)
        child.wait()
    assert not kill(found) and found.pid not in {one.pid for one in processes() if one.started == found.started}


def test_what_the_kinds_start_is_there() -> None:
    assert all(path.is_file() for path in (PROGRAM, SERVER, HERE / "loop.py", HERE / "container.py"))


def test_a_process_a_file_and_a_socket_are_named_while_they_are_there(tmp_path: Path) -> None:
    before = Seen.now()
    file, bound = FOLDERS[0] / f"chaos-agents-test-{os.urandom(8).hex()}", str(tmp_path / "bound")
    with subprocess.Popen(["sleep", "600"]) as child, socket.socket(socket.AF_UNIX) as listener:
        file.touch()
        listener.bind(bound)
        found = left_behind(before, within_s=0.0)
        file.unlink()
        child.kill()
    ours = {f"file {file}", f"socket {bound}"}
    assert ours < set(found) and any(line.startswith(f"process {child.pid} ") for line in found)
    again = left_behind(before, within_s=0.0)
    assert not ours & set(again) and not any(line.startswith(f"process {child.pid} ") for line in again)

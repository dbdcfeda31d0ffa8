"""Which processes a chaos run of agents strikes, and how it tells what is left behind."""

import gzip
import json
import os
import random
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

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
from tests.chaos.history import Expected, problems


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


EXPECTED = Expected(steps=2, groups=1, samples=2, staleness=1)
Lines = dict[str, list[dict[str, Any]]]  # by file


def history() -> Lines:
    """Step 0 was trained by lineage 0, step 1 by lineages 0 and 1: the run was killed and went on after step 0."""
    files: Lines = {"trained.jsonl": [], "metrics.jsonl": [], "ledger.jsonl": []}
    for group in (0, 1, 2):
        files["ledger.jsonl"].append({"event": "admit", "group": group, "partition": "train", "samples": 2})
    for lineage, step in ((0, 0), (0, 1), (1, 1)):
        files["metrics.jsonl"].append({"step": step, "lineage": lineage})
        files["ledger.jsonl"].append({"event": "reserve", "step": step, "groups": [step]})
        rows = files.setdefault(f"trajectories/step-{step:06d}-lineage{lineage}-rank0.jsonl.gz", [])
        for sample in (0, 1):
            tokens = [step, sample, 7]
            digest = xxh3_128_hexdigest(np.array(tokens, dtype="<i4").tobytes())
            key = {"step": step, "lineage": lineage, "group": step, "sample": sample, "segment": 0}
            files["trained.jsonl"].append(key | {"tokens_hash": digest})
            if (lineage, step) != (1, 1):  # a rollback trains what was put before
                files["ledger.jsonl"].append(
                    {"event": "put", "stored": [[step, sample, [digest]]]},
                )
            rows.append(
                {"group_id": step, "sample": sample, "segment": 0, "token_ids": tokens, "versions": [[[0, 0], 0, 2]]}
            )
    return files


def write(folder: Path, files: Lines) -> Path:
    (folder / "trajectories").mkdir()
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return folder


def of_step_1(files: Lines) -> list[dict[str, Any]]:
    return files["trajectories/step-000001-lineage1-rank0.jsonl.gz"]


DAMAGE: dict[str, Callable[[Lines], object]] = {
    "a row was trained twice": lambda files: files["trained.jsonl"].append(files["trained.jsonl"][-1]),
    "a row was not trained": lambda files: files["trained.jsonl"].pop(),
    "a step was not trained": lambda files: files["trained.jsonl"].__delitem__(slice(2, None)),
    "a group was trained in two steps": lambda files: [row.update(group=0) for row in files["trained.jsonl"]],
    "an older lineage after a newer one": lambda files: files["trained.jsonl"][0].update(lineage=2),
    "no metrics": lambda files: files["metrics.jsonl"].pop(),
    "other tokens": lambda files: of_step_1(files)[0]["token_ids"].append(1),
    "too stale": lambda files: of_step_1(files)[0].update(versions=[[[0, -1], 0, 2]]),
    "a lost trajectory": lambda files: of_step_1(files).pop(),
    "an extra trajectory": lambda files: of_step_1(files).append(of_step_1(files)[0] | {"sample": 2}),
    "another batch was reserved": lambda files: files["ledger.jsonl"][-1].update(groups=[2]),
    "tokens that nobody announced": lambda files: files["ledger.jsonl"].__delitem__(-2),
    "forgotten groups": lambda files: files["ledger.jsonl"].extend(
        {"event": "admit", "group": group, "partition": "train", "samples": 2} for group in (3, 4)
    ),
}


def test_a_good_history_has_no_problems(tmp_path: Path) -> None:
    assert problems(write(tmp_path, history()), EXPECTED) == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    files = history()
    DAMAGE[damage](files)
    assert problems(write(tmp_path, files), EXPECTED) != []

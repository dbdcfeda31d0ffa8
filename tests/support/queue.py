"""Clients of the queue, its tasks, and the judgement "nothing lost, nothing twice" for the rigs that disturb it."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rl_async.configs.load import load_resolved
from rl_async.messages import Task
from rl_async.process.http_auth import Role
from rl_async.transfer_queue.auth import provide_keys, read_client_keys
from rl_async.transfer_queue.client import ClientSettings, QueueClient, SyncQueueClient


def make_run_keys(run: Path) -> None:
    """Make the keys of a run folder that has its config, as the launcher does."""
    provide_keys(load_resolved(run / "config.yaml"), run)


def settings(run: Path, role: Role, timeout_s: float = 60.0, patience_s: float = 3.0) -> ClientSettings:
    return {
        "role": "test",
        "name": role,
        "timeout_s": timeout_s,
        "patience_s": patience_s,
        "keys": read_client_keys(run / "keys", role),
    }


def sync_client(run: Path, address: str, role: Role, timeout_s: float = 60.0) -> SyncQueueClient:
    """A client of the queue of ``run``, which listens at ``address``."""
    return SyncQueueClient(address, **settings(run, role, timeout_s))


def async_client(run: Path, address: str, role: Role, timeout_s: float = 60.0, patience_s: float = 3.0) -> QueueClient:
    """The same for an event loop."""
    return QueueClient(address, **settings(run, role, timeout_s, patience_s))


def easy_or_hard(number: int) -> Task:
    """Two tasks of the data set ``easy`` to one of ``hard``, with five priorities in turn."""
    return Task(
        task_id=f"t{number}",
        data_source="",
        prompt=[],
        ground_truth="",
        priority=float(number * 7 % 5),
        source="easy" if number % 3 else "hard",
    )


Sample = tuple[int, int]  # group, sample
Tokens = TypeVar("Tokens")


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Parse the whole lines of a file, if it exists; the last may have been torn by a kill."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def twice(groups: Mapping[int, Iterable[int]]) -> list[str]:
    """Name the groups that are in several steps; ``groups`` are those of each step."""
    found, seen = [], dict[int, int]()
    for step, members in sorted(groups.items()):
        for group in sorted(set(members)):
            if group in seen:
                found.append(f"group {group} was trained twice, in steps {seen[group]} and {step}")
            seen[group] = step
    return found


def lost(
    acknowledged: Iterable[tuple[Sample, Tokens]],
    trained: Mapping[Sample, Tokens],
    excused: Callable[[int], bool] = lambda group: False,
) -> list[str]:
    """Name the acknowledged samples that were trained with other tokens, or not at all though nothing excuses their
    group."""
    found = []
    for (group, sample), tokens in acknowledged:
        other = trained.get((group, sample))
        if other != tokens and not (other is None and excused(group)):
            found.append(f"sample {group}.{sample} was acknowledged with {tokens} and trained with {other}")
    return found


def stale(step: int, oldest: int, bound: int) -> bool:
    """Whether tokens of version ``oldest`` are too old for a step."""
    return step - oldest > bound

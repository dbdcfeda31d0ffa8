"""Judges "nothing lost, nothing twice" for every rig that disturbs the queue: simulation, chaos, contracts.

Each rig collects in its own way what was trained and what was acknowledged; these rules then hold for all of them.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

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

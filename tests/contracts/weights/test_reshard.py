"""Weights resharded between real processes: what an engine's ranks then hold is what gathering and slicing gives."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.contracts.weights.reshard_rank import BUCKET, SCENARIOS, WORLD
from tests.support.forked import Forked, start_ranks
from tests.support.ports import free_port


@contextmanager
def ranks(mode: str) -> Iterator[list[Forked]]:
    """The processes, killed at the end."""
    store = str(free_port())
    processes = start_ranks(
        "tests.contracts.weights.reshard_rank", mode, ranks=WORLD, environment={"STORE_PORT": store}
    )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict[str, int]]]:
    """By scenario, of each rank."""
    with ranks("all") as processes:
        outputs = [process.communicate(timeout=180) for process in processes]
        for process, (_, errors) in zip(processes, outputs, strict=True):
            assert process.returncode == 0, errors[-3000:]
    found: dict[str, list[dict[str, int]]] = {}
    for out, _ in outputs:
        for line in out.splitlines():
            told = json.loads(line)
            found.setdefault(told.pop("scenario"), []).append(told)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_arrives_is_what_gathering_and_slicing_gives(results: dict[str, list[dict[str, int]]], name: str) -> None:
    told = results[name]
    holders = [rank for rank, one in enumerate(told) if one["parameters"]]
    first = SCENARIOS[name].first
    assert holders == list(range(first, first + SCENARIOS[name].tp))
    assert [one["wrong"] for one in told] == [0] * WORLD


@pytest.mark.parametrize("name", SCENARIOS)
def test_only_what_is_needed_moves_in_buffers_of_a_bucket(results: dict[str, list[dict[str, int]]], name: str) -> None:
    told = results[name]
    assert told[0]["buckets"] > 2
    assert sum(one["sent"] for one in told) == sum(one["received"] for one in told) == told[0]["minimal"]
    assert told[0]["minimal"] < told[0]["full_gather"] or SCENARIOS[name].tp == 1
    assert sum(one["copied"] for one in told) == told[0]["local"]
    assert all(one["buffers"] <= BUCKET for one in told)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("killed", "gloo"),
        pytest.param("stopped", "gloo", marks=pytest.mark.slow),
        pytest.param("killed", "shared", marks=pytest.mark.slow),
        ("stopped", "shared"),
    ],
)
def test_a_rank_that_is_lost_is_named_by_all_others(how: str, kind: str) -> None:
    with ranks(f"{how} {kind}") as processes:
        for rank in (0, 2, 3):
            out, errors = processes[rank].communicate(timeout=90)
            assert f"rank {rank} lost rank 1" in out, out + errors[-3000:]
        if how == "killed":
            assert processes[1].wait(10) == -signal.SIGKILL

"""Training, publication and sampling on a device, rehearsed without one: none of it may be on the host by mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Forked
from tests.support.python_device import NAME

Told = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def told(model_folder: Path) -> Told:
    """What each part of the rehearsal found."""
    process = Forked("tests.contracts.device.rehearsal", str(model_folder))
    try:
        out, errors = process.communicate(timeout=170)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 0, errors[-3000:]
    return {part.pop("part"): part for part in map(json.loads, out.splitlines())}


def test_a_host_tensor_among_device_tensors_is_refused(told: Told) -> None:
    assert told["mixing"]["refused"] == [True, True, True]


def test_training_computes_on_the_device_what_it_does_on_a_cpu(told: Told) -> None:
    found = told["training"]
    assert found["device"] == NAME
    assert found["difference"] < 1e-5
    for there, here in found["steps"]:
        assert there == pytest.approx(here, rel=1e-4)
    assert found["scalars_only"]


def test_asleep_the_trainer_is_on_the_host_and_awake_on_the_device(told: Told) -> None:
    assert told["training"]["places"] == [[NAME], ["cpu"], [NAME]]


def test_buckets_are_filled_and_checksummed_on_the_device(told: Told) -> None:
    assert told["gathering"] == {
        "devices": [NAME],
        "kinds": [True],
        "scalars_only": True,
        "as_held": True,
        "same_asleep": True,
    }


def test_a_rank_sends_its_shards_and_slices_of_them_from_the_device(told: Told) -> None:
    """Asleep, from the host, where they were put before the engines woke."""
    assert told["sending"] == {
        "devices": [NAME],
        "scalars_only": True,
        "same": [True, True, True, True],
        "asleep": [["cpu", NAME]],
    }


def test_deltas_are_encoded_and_applied_on_the_device(told: Told) -> None:
    assert told["updates"] == {"right": True, "kinds": ["delta", "full"]}


def test_before_engines_wake_on_a_shared_device_the_trainer_has_left_it(told: Told) -> None:
    assert told["taking turns"] == {"bytes": ["cpu"], "home": [NAME], "trainer": [["cpu"]]}


def test_an_engine_loads_and_samples_on_the_device(told: Told) -> None:
    assert told["generating"] == {"same": True, "changed": True}

"""Training, publication and sampling on a device, rehearsed without one: none of it may be on the host by mistake."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import VOCAB
from tests.contracts.trainer.test_training import LAYERS, TERMS
from tests.support.forked import Forked
from tests.support.python_device import NAME, SCALARS
from tests.support.rounding import pass_rounding, rounding

SURVIVORS = {
    "well": ["one", "other"],
    "one dies loading": ["one"],
    "one fails loading once": ["one", "other"],
    "one dies before it is verified": ["one"],
    "one dies on waking": ["one"],
    "both die": ["third"],
}
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
    # Of a fresh model, whose log-probabilities are about log(VOCAB), and of losses and norms of two steps on it.
    assert found["difference"] <= pass_rounding(2 * math.log(VOCAB), LAYERS, TERMS)
    for there, here in found["steps"]:
        assert there == pytest.approx(here, rel=pass_rounding(1.0, LAYERS, TERMS, backward=True))
    assert found["scalars_only"]


def test_losses_copy_nothing_and_later_passes_read_what_the_first_brought(told: Told) -> None:
    found = told["updating"]
    assert found["within"] == [] == found["later"]
    for there, here in found["losses"]:
        assert there == pytest.approx(here, rel=pass_rounding(2.0, LAYERS, TERMS, backward=True))


def test_a_tree_of_prefixes_is_attended_to_as_on_a_cpu(told: Told) -> None:
    found = told["prefixes"]
    assert found["nested"] > 3
    for difference, size in zip(found["difference"], found["sizes"], strict=True):
        print(f"prefixes, kernel - CPU: {difference:.1e} of {size:.1e}")
        assert difference <= rounding(max(1.0, size), terms=64)


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
    """Asleep too, until they leave for the host."""
    assert told["sending"] == {
        "devices": [NAME],
        "scalars_only": True,
        "same": [True, True, True, True],
        "asleep": [[NAME, NAME], ["cpu", NAME]],
    }


def test_weights_in_float32_come_to_the_host_in_the_type_that_travels(told: Told) -> None:
    found = told["over the host"]
    assert found["same"] and found["largest"] == found["right"]


def test_deltas_are_encoded_and_applied_on_the_device(told: Told) -> None:
    assert told["updates"] == {"right": True, "kinds": ["delta", "full"]}


def test_before_engines_wake_on_a_shared_device_the_trainer_has_left_it(told: Told) -> None:
    assert told["taking turns"] == {"bytes": ["cpu"], "home": [NAME], "trainer": [["cpu"]]}


def test_weights_wait_on_a_shared_device_until_engines_have_loaded_them(told: Told) -> None:
    """At the start of a run, when engines are awake, they do not."""
    for found in told["turns over shards"].values():
        assert found["at the start"] == 0
    well = told["turns over shards"]["well"]
    assert well["engines"] == ["one", "other"]
    assert len(well["loading"]) > 2 and min(well["loading"]) >= 1, "beside what engines compute checksums with"
    assert well["to the host"] <= SCALARS


def test_a_reshard_on_a_shared_device_brings_masters_and_moments_to_the_host_and_nothing_else(told: Told) -> None:
    """Late engines are then served from the masters."""
    well = told["turns over shards"]["well"]
    assert well["beyond masters and moments"] == 0
    largest, count = well["while weights travel"]
    # The checksums of each bucket: the sender's and those of two engines.
    assert largest <= SCALARS and count <= 3 * len(well["loading"])
    assert well["late as others"]


@pytest.mark.parametrize(("scenario", "engines"), SURVIVORS.items())
def test_whatever_happens_they_have_left_before_a_cache_wakes_or_an_engine_starts(
    told: Told, scenario: str, engines: list[str]
) -> None:
    found = told["turns over shards"][scenario]
    assert found["engines"] == engines
    assert set(found["waking"]) <= {0} and bool(found["waking"]) == (engines != ["third"])
    assert found["replaced"] == (0 if engines == ["third"] else None)
    assert found["after"] == 0
    assert found["late as others"]


def test_an_engine_loads_and_samples_on_the_device(told: Told) -> None:
    assert told["generating"] == {"same": True, "changed": True}


def test_static_steps_need_nothing_of_the_host_and_tell_it_their_tokens_without_waiting(told: Told) -> None:
    found = told["decoding"]
    assert found["static"] == {"moved": found["bytes"], "waited": 0, "sent": 0}
    eager = found["eager"]
    assert eager["waited"] >= len(found["bytes"]) and eager["sent"] >= len(found["bytes"])

"""Fleets that give back their shared memory."""

from collections.abc import Iterator

import pytest

from tests.unit.weight_sync.fleet_engines import FLEETS


@pytest.fixture(autouse=True)
def closed_fleets() -> Iterator[None]:
    """Unlink the segments of the fleets that a test leaves open, which would be there until the session ends."""
    yield
    for fleet in FLEETS:
        for group in fleet._groups.values():
            group.close()
    FLEETS.clear()

"""One process for each project, which all tests ask."""

from collections.abc import Iterator

import pytest

from tests.contracts.oracles.oracle import Oracle


def _oracle(project: str, factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    oracle = Oracle(project, factory.mktemp(project))
    yield oracle
    oracle.close()


@pytest.fixture(scope="session")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """verl's formulas."""
    yield from _oracle("verl", tmp_path_factory)


@pytest.fixture(scope="session")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """TRL's GRPO loss."""
    yield from _oracle("trl", tmp_path_factory)

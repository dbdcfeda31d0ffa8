"""The recorder, compiled once."""

from pathlib import Path

import pytest

from tests.support.power.cuts import build_recorder


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_recorder(tmp_path_factory.mktemp("recorder"))
    except FileNotFoundError:
        pytest.skip("no C compiler here; install one with: apt-get install gcc")

"""torchao where ``scripts/install torchao`` puts it: beside .venv, since Transformers imports it where it finds it."""

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".torchao"


def add_torchao() -> None:
    """Let this process import torchao, or skip the test."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if find_spec("torchao") is None:
        pytest.skip("torchao is not here; install it with scripts/install torchao")
    # When it is compiled for the first time, Python warns of its escape sequences.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.optim  # noqa: F401

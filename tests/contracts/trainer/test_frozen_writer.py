"""A process that is frozen while it records rows delays those of its own lineage for a while, and its successor not."""

import subprocess
import sys
from pathlib import Path

import pytest

from rl_async.files import append_durably

FROZEN = """
import os, sys
from pathlib import Path
from rl_async import files

def freeze(descriptor):
    print("frozen", flush=True)
    sys.stdin.read()

os.fsync = freeze
files.append_durably(Path(sys.argv[1]), b"old\\n", 3)
"""


def test_only_its_own_lineage_waits_for_a_frozen_writer(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    command = [sys.executable, "-c", FROZEN, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as frozen:
        assert frozen.stdin is not None and frozen.stdout is not None
        assert frozen.stdout.readline() == b"frozen\n"
        append_durably(path, b"new\n", 4)
        with pytest.raises(TimeoutError, match=path.name):
            append_durably(path, b"rank\n", 3, wait_s=0.1)
        frozen.stdin.close()
    append_durably(path, b"rank\n", 3)
    assert path.read_bytes() == b"old\nnew\nrank\n"

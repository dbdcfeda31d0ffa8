"""The reward of an agent program's episode: the digit that it took, as `rl-async play --reward` calls it."""

import re
from pathlib import Path
from typing import Any


def grade(workspace: Path, task: dict[str, Any], stdout: str) -> float:
    """Return the digit in the file ``answer``, or else the last one that the program printed, as a share of 9."""
    answer = workspace / "answer"
    digits = re.findall(r"\d", answer.read_text() if answer.is_file() and not answer.is_symlink() else stdout)
    return int(digits[-1]) / 9 if digits else 0.0

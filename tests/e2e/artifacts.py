"""Make the data and the model that tests of whole runs share: ``python -m tests.e2e.artifacts FOLDER``."""

import fcntl
import shutil
import sys
from pathlib import Path

from rl_async.agent_loop.toy_tasks import make_data
from tests.e2e.small_runs import HARDLY_WARM, succeed


def make(root: Path) -> Path:
    """Return the folder that ``rl-async sft --config calculator`` makes.

    The first process to ask for it under ``root`` makes it, and the others wait.
    """
    made = root / "calculator" / "artifacts"
    # The lock is held until the file is closed, or this process has ended.
    with (root / "calculator.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_dir():
            home = root / "calculator.unfinished"
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()
            # A run makes thirty times as many, which takes it longer than a model that is hardly trained.
            make_data("calculator", home / "artifacts" / "calculator", train=512, demos=512)
            succeed(home, "sft", "--config", "calculator", *HARDLY_WARM)
            home.rename(made.parent)
    return made


if __name__ == "__main__":
    make(Path(sys.argv[1]))

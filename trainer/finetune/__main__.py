"""One rank of supervised fine-tuning: ``python -m rl_async.trainer.finetune --run OUT.run``.

It trains on the conversations that ``rl-async sft`` encoded there, continues from the newest checkpoint when the
folder has one, and writes the model after the last step.
"""

import os
from pathlib import Path

from rl_async.errors import EXIT_FAILED, EXIT_RESTART, RanksLost, RlAsyncError
from rl_async.process.role import end_with, role_parser, run_role


def main() -> int:
    """Entry point; the exit code is 0 when the model is written, 143 or 130 when asked to stop before, and saved."""
    parser = role_parser("trainer.finetune", __doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder that `rl-async sft` made")
    folder: Path = parser.parse_args().run
    exits = {RanksLost: EXIT_RESTART, RlAsyncError: EXIT_FAILED}
    return run_role(f"trainer-{os.environ.get('RANK', '0')}", lambda: _run(folder), exits)


def _run(folder: Path) -> None:
    from rl_async.trainer.finetune.loop import run_rank

    run_rank(folder)


if __name__ == "__main__":
    end_with(main)

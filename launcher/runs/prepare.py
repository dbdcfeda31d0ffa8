"""Makes missing data, then a missing warm-started model, before a run.

``python -m rl_async.launcher.runs.prepare --config FILE`` does so in a separate process, because it imports torch.
"""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rl_async.configs.derived import warm_start_of
from rl_async.configs.load import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.plan.artifacts import needs_data, needs_model
from rl_async.process.role import role_parser, run_role
from rl_async.process.run_files import ProgressWriter

Report = Callable[[str], None]
# The process, and its piece of work that can take minutes.
NAME, WARM_START = "prepare", "warm start"
REPORT_S = 10.0


def prepare_data(config: RunConfig, report: Report) -> None:
    """Write missing data. Raises UserError if that is impossible."""
    if needs_data(config):
        from rl_async.agent_loop.toy_tasks import make_data

        assert config.data.make is not None and isinstance(config.data.path, str)
        folder = Path(config.data.path).parent
        report(f"writing {config.data.make} tasks and demonstrations into {folder}")
        make_data(config.data.make, folder)


def prepare(config: RunConfig, report: Report, progress: ProgressWriter | None = None) -> None:
    """Write missing data, then make the missing model. Raises UserError if that is impossible.

    The progress of the warm start goes to ``progress`` or, without one, is reported each REPORT_S.
    """
    reported = time.monotonic()

    def on_step(step: int, check: int, loss: float) -> None:
        nonlocal reported
        if progress is not None:
            progress(WARM_START, step, check, "steps to the next check", f"loss {loss:.3f}")
        elif time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            report(f"warm start: {step} of {check} steps to the next check, loss {loss:.3f}")

    prepare_data(config, report)
    if needs_model(config):
        makes = warm_start_of(config)
        assert makes is not None
        if makes.pretrained is not None:
            from rl_async.launcher.runs.finetune import fine_tune

            fine_tune(config, makes, report)
        else:
            from rl_async.launcher.runs.tiny_model import make_model

            make_model(config, makes, report, on_step)
        needs_model(config)


def main() -> int:
    """Prepare the run of the given config; return the exit code."""
    # Unlike a role, an interrupted preparation has failed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = role_parser("launcher.runs.prepare", __doc__)
    parser.add_argument("--config", type=Path, required=True, help="a resolved config.yaml")
    arguments = parser.parse_args()
    progress = ProgressWriter(arguments.config.parent, NAME)
    return run_role(
        NAME, lambda: prepare(load_resolved(arguments.config), lambda line: print(line, flush=True), progress)
    )


if __name__ == "__main__":
    sys.exit(main())

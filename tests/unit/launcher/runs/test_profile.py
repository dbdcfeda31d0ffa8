"""`rl-async profile` waits for what the ranks write after it asked."""

import threading
import time
from pathlib import Path

from rl_async.configs.load import load_config
from rl_async.launcher.run_folder import create, hold
from rl_async.launcher.runs.profile import profile_steps
from rl_async.process.run_files import read_request, trace_file


def test_the_trace_of_a_step_that_was_profiled_before_counts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    create(load_config("calculator"), run)
    file, other = trace_file(run, 3, 0), trace_file(run, 2, 0)
    file.parent.mkdir()
    for former in (file, other):
        former.write_bytes(b"of a former process")

    def rank() -> None:
        while read_request(run) is None:
            time.sleep(0.01)
        unfinished = file.with_name("unfinished")
        unfinished.write_bytes(b"again")
        unfinished.replace(file)

    answering = threading.Thread(target=rank, daemon=True)
    with hold(run):
        answering.start()
        assert profile_steps(run, 1, timeout_s=10.0) == [file]
    answering.join()

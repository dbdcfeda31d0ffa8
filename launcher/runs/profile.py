"""``rl-async profile``: profiles the trainer ranks, or samples the stacks of another process, of a live run."""

import subprocess
import time
from pathlib import Path

from rl_async.configs.load import load_resolved
from rl_async.errors import RlAsyncError, UserError
from rl_async.insight.doctor import launcher_of
from rl_async.process.kernel import read_stat
from rl_async.process.role import py_spy
from rl_async.process.run_files import PROFILES_FOLDER, read_roster, traces, write_request

POLL_S = 0.2
# py-spy may take this long to attach and to write its file.
ATTACH_S = 60.0


def profile_steps(run: Path, steps: int, timeout_s: float) -> list[Path]:
    """Have every trainer rank record its next ``steps``; return the traces of all steps and ranks.

    Raises UserError if the run is not live, RlAsyncError if it ends early or takes longer than ``timeout_s``.
    """
    _require_live(run)
    wanted, before = steps * load_resolved(run / "config.yaml").trainer.ranks, traces(run)
    write_request(run, steps)
    deadline = time.monotonic() + timeout_s
    while len(found := [file for file, at in traces(run).items() if before.get(file) != at]) < wanted:
        if launcher_of(run) is None:
            raise RlAsyncError(f"{run} has ended, with {len(found)} of {wanted} profiles written")
        if time.monotonic() > deadline:
            raise RlAsyncError(
                f"{len(found)} of {wanted} profiles were written within {timeout_s:g} s (--timeout); `rl-async doctor "
                f"{run}` says what the ranks wait for"
            )
        time.sleep(POLL_S)
    return sorted(found)


def sample_process(run: Path, name: str, seconds: float) -> Path:
    """Sample the Python stacks of one process of the run with py-spy; return the file, for https://speedscope.app.

    Raises UserError if py-spy is not installed or the process does not run here, RlAsyncError if py-spy fails.
    """
    tool = py_spy()
    if tool is None:
        raise UserError("--process: py-spy is not installed; run `python -m pip install py-spy`")
    _require_live(run)
    here = {
        record.name: record.pid
        for record in read_roster(run)
        if not record.host and read_stat(record.pid).started == record.started
    }
    if name not in here:
        raise UserError(f"--process: no process {name} of {run} runs on this machine; there are {', '.join(here)}")
    (run / PROFILES_FOLDER).mkdir(exist_ok=True)
    file = run / PROFILES_FOLDER / f"{name}.speedscope.json"
    command = [tool, "record", "--pid", str(here[name]), "--duration", f"{max(1, round(seconds))}"]
    # Idle threads are sampled too, since some processes mostly wait.
    command += ["--nonblocking", "--idle"]
    try:
        done = subprocess.run(
            [*command, "--format", "speedscope", "--output", str(file)],
            capture_output=True,
            text=True,
            timeout=seconds + ATTACH_S,
        )
    except subprocess.TimeoutExpired as error:
        raise RlAsyncError(f"py-spy did not end within {ATTACH_S:g} s after its {seconds:g} s") from error
    if done.returncode != 0:
        raise RlAsyncError(f"py-spy could not sample {name} (pid {here[name]}): {done.stderr.strip()[-500:]}")
    return file


def _require_live(run: Path) -> None:
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not the folder of a run")
    if launcher_of(run) is None:
        raise UserError(f"{run} does not run; set trainer.profile.steps for a run that you start")

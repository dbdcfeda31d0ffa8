"""From ``rl-async launch`` to the first step: what every process does when, and what its imports cost.

    python -m benchmarks.startup --json FILE

The demo (preset ``calculator``, disaggregated) with its model already made. ``launch_to_first_step_s`` is the median
time from the start of the command until the trainer asks for its first batch: every process runs then, the engine has
the weights, and episodes are being played. ``first_step_done_s`` is until that step is recorded, sampling and training
included. ``processor_s`` is what all processes have used until the step is recorded, which says more than the clock on
a machine that does other things. The timeline is that of the round in the middle.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.processes.command_line import parser
from benchmarks.processes.whole_run import RL_ASYNC, TICKS, processes_of
from rl_async.process.run_files import Entered, read_stat, read_timeline

ROUNDS = 3
DEADLINE_S = 300.0
POLL_S = 0.02
ROLES = {
    "launcher": "rl_async.launcher.runs.launch",
    "queue": "rl_async.transfer_queue.__main__",
    "worker": "rl_async.agent_loop.worker",
    "engine": "rl_async.rollout_server.embedded.server",
    "trainer": "rl_async.trainer.rank",
}
IMPORT = """
import json, resource, sys
from rl_async.process.allocation import importing
with importing():
    import {module}
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({{"modules": len(sys.modules), "processor_s": used.ru_utime + used.ru_stime}}))
"""


class Start(NamedTuple):
    """One start: seconds after the command was."""

    first_step_s: float
    done_s: float
    processor_s: dict[str, float]  # by role, until the first step was recorded
    timeline: list[str]


def start(folder: Path) -> Start:
    """Launch a run of one step and watch it. Ends this process if it fails."""
    command = [RL_ASYNC, "launch", "--mode", "disaggregated", "--config", "calculator", "--name", folder.name]
    overrides = ["trainer.steps=1", "eval.every=0", "eval.tasks=1", f"launcher.run_dir={folder.parent}"]
    began, deadline = time.time(), time.monotonic() + DEADLINE_S
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen([*command, *overrides], stdout=output, stderr=output)
    try:
        metrics = folder / "metrics.jsonl"
        while not (metrics.is_file() and metrics.stat().st_size):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"no step was trained:\n{log.read_text()[-2000:]}")
            time.sleep(POLL_S)
        used = {"launcher": read_stat(process.pid).cpu_ticks / TICKS}
        used |= {role: read_stat(pid).cpu_ticks / TICKS for role, pid in processes_of(folder)}
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    entered = read_timeline(folder)
    first = next(one.at for one in entered if one.lane == "trainer-0" and one.stage == "waiting for a batch")
    done = json.loads(metrics.read_text().splitlines()[0])["time"]
    return Start(first - began, done - began, used, [line(one, began) for one in entered if one.at <= done])


def line(entered: Entered, began: float) -> str:
    return f"{entered.at - began:6.2f} s  {entered.lane:<10} {entered.stage} {entered.about}".rstrip()


def imports(module: str) -> dict[str, float]:
    """Modules and processor seconds of a role's imports, in a process of their own."""
    done = subprocess.run([sys.executable, "-c", IMPORT.format(module=module)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{module} cannot be imported:\n{done.stderr}")
    return json.loads(done.stdout)


def measure(rounds: int) -> dict[str, Any]:
    """The goal's key first."""
    subprocess.run([RL_ASYNC, "sft", "--config", "calculator"], check=True, stdout=subprocess.DEVNULL)  # its model
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        starts = sorted((start(Path(name) / f"start-{turn}") for turn in range(rounds)), key=lambda one: one.done_s)
    middle = starts[len(starts) // 2]
    return {
        "launch_to_first_step_s": statistics.median(one.first_step_s for one in starts),
        "first_step_done_s": middle.done_s,
        "processor_s": sum(middle.processor_s.values()),
        "processor_s_by_role": middle.processor_s,
        "load": load,
        "imports": {role: imports(module) for role, module in ROLES.items()},
        "timeline": middle.timeline,
    }


def main() -> None:
    made = parser(__doc__)
    made.set_defaults(repeats=ROUNDS)
    arguments = made.parse_args()
    found = measure(arguments.repeats)
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""``rl-async doctor RUN``: observe, diagnose, print. A run in trouble does the same and keeps the report."""

import time
from pathlib import Path

import msgspec

from rl_async.launcher.doctor.diagnosis import Diagnosis, diagnose
from rl_async.launcher.doctor.observation import Observation, ObservedProcess
from rl_async.launcher.doctor.observe import observe
from rl_async.launcher.watch.terminal import printable

FILE = "doctor.txt"
FRAMES = 6  # of a stack
LINE = 100  # characters of a log line


def doctor(run: Path, *, as_json: bool = False) -> int:
    """Print the diagnosis of a run; the exit code, 1 if something is wrong. Raises UserError if it never ran."""
    seen = observe(run.absolute())
    verdict = diagnose(seen)
    if as_json:
        print(msgspec.json.encode({"verdict": verdict, "observation": seen}).decode())
    else:
        print(report(seen, verdict))
        if seen.launcher is None and (run / FILE).is_file():
            print(f"diagnosed while it ran: {run / FILE}")
    return 1 if verdict.health in ("stuck", "failed") else 0


def write_report(run: Path, why: str) -> str:
    """Append a report on a run in trouble to ``RUN/doctor.txt``, and return its findings."""
    seen = observe(run)
    verdict = diagnose(seen)
    with (run / FILE).open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(why)}\n{report(seen, verdict)}\n\n")
    return "\n".join(verdict.findings)


def report(seen: Observation, verdict: Diagnosis) -> str:
    """Compose the whole report for a terminal, with the verdict last so that it stands just above the prompt."""
    sections = [
        process_lines(seen),
        stage_lines(seen),
        engine_lines(seen),
        ["who waits for whom:", *(f"  {line}" for line in verdict.waits)] if verdict.waits else [],
        stack_lines(seen),
        [f"could not be observed: {line}" for line in seen.trouble],
        [f"verdict: {verdict.text}", *(f"    also: {line}" for line in verdict.findings[1:])],
    ]
    return printable("\n".join(line for section in sections for line in section))


def process_lines(seen: Observation) -> list[str]:
    """Describe each process on one line of a table."""
    lines = [f"{'process':15}{'pid':>8} {'state':6}{'cores':>6}{'log':>8}  where"]
    for process in seen.processes:
        age = "" if process.log_age_s is None else f"{process.log_age_s:.0f} s"
        lines.append(
            f"{process.record.name:15}{process.record.pid:>8} {process.state:6}{process.cpu:6.2f}{age:>8}  "
            f"{_where(seen, process)}".rstrip()
        )
    return lines


def _where(seen: Observation, process: ObservedProcess) -> str:
    rank = seen.rank_of(process)
    phase = "" if rank is None else f"step {rank.step}, {rank.phase} for {rank.for_s:.0f} s"
    stack = f"in {process.stack[0].name}" if process.stack else process.waits_in
    state = "" if process.record.state == "running" else process.record.state
    restarts = f"{process.record.restarts} restarts" if process.record.restarts else ""
    return "; ".join(
        part for part in (state, phase, stack if not process.ended else process.log_line[:LINE], restarts) if part
    )


def stage_lines(seen: Observation) -> list[str]:
    """Describe the oldest group in each state on one line of a table."""
    if seen.queue is None:
        return []
    lines = [f"{'stage':12}{'oldest group':>14}{'age':>9}{'here':>8}  worker"]
    for group in seen.queue.oldest:
        here, workers = f"{group.here}/{group.samples}", ", ".join(group.workers)
        lines.append(f"{group.state:12}{group.group_id:>14}{group.age_s:>7.1f} s{here:>8}  {workers}".rstrip())
    return lines


def engine_lines(seen: Observation) -> list[str]:
    """Describe each registered engine on one line."""
    lines = []
    for engine in seen.engines:
        state = "does not answer" if not engine.answers else "paused" if engine.paused else "answers"
        requests = "" if engine.requests is None else f", {engine.requests} requests"
        speed = "" if engine.tokens_per_s is None else f", {engine.tokens_per_s:.0f} tokens/s"
        lines.append(f"{engine.engine_id}: {state}, version {engine.version}{requests}{speed} ({engine.url})")
    return lines


def stack_lines(seen: Observation) -> list[str]:
    """List the innermost calls of each main thread whose stack is known."""
    lines = []
    for process in seen.processes:
        if process.stack:
            lines.append(f"{process.record.name}, main thread, innermost call first:")
            lines += [f"    {frame.name} ({_short(frame.file)}:{frame.line})" for frame in process.stack[:FRAMES]]
    return lines


def _short(file: str) -> str:
    return "/".join(file.split("/")[-3:])

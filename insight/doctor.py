"""``rl-async doctor RUN``: observes a run from outside, diagnoses it, and prints both.

Reads the kernel, the run's files, its queue and its engines, and changes nothing. Every request has a deadline
(ANSWER_S), so that an observation takes seconds however stuck the run is. A run in trouble diagnoses itself in the same
way and keeps the report.
"""

import asyncio
import gzip
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rl_async.concurrency import gather_or_cancel
from rl_async.configs.engines import ENGINES
from rl_async.configs.load import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EngineError, QueueLost, UserError
from rl_async.files import UNDECODABLE, undamaged
from rl_async.insight.diagnosis import (
    Deadlines,
    Diagnosis,
    Observation,
    ObservedEngine,
    ObservedProcess,
    ObservedQueue,
    ObservedRank,
    diagnose,
)
from rl_async.insight.live_figures import Kept, Speeds
from rl_async.insight.tail import LineTail
from rl_async.messages import EngineRecord, GroupRecord
from rl_async.process.http_auth import run_token
from rl_async.process.role import ASK, Frame, main_thread, printable, py_spy
from rl_async.process.run_files import (
    ENDED,
    GONE,
    HALTED,
    REMOTE,
    ProcessRecord,
    ProcStat,
    age_s,
    catches,
    read_beats,
    read_endpoints,
    read_roster,
    read_stat,
    said_last,
    state_of,
    waits_in,
)
from rl_async.recording import files_of_step, is_whole
from rl_async.rollout_server.http import EngineHttp
from rl_async.rollout_server.pool import connect
from rl_async.transfer_queue.auth import client_keys
from rl_async.transfer_queue.client import SyncQueueClient

ANSWER_S = 3.0
STACK_S = 1.0
# An engine's tokens are counted for this time.
SPEED_S = 0.5
# A larger file of a process's stacks is emptied.
MOST_STACK_BYTES = 1 << 20
POLL_S = 0.05
TAIL_BYTES = 8192
# The usual length of a step is the median over this many.
USUAL_STEPS = 10
LISTED = 1000


def observe(run: Path, *, stacks: bool = True) -> Observation:
    """Observe the run in this folder. Its processes get a signal only if ``stacks`` are wanted.

    Raises UserError if no run, or only a fine-tuning, was ever started there.
    """
    records = read_roster(run)
    config = load_resolved(run / "config.yaml")
    if config.finetune is not None:
        raise UserError(f"{run} is the folder of a fine-tuning, which has no queue to diagnose; see its logs")
    launcher, roles = launcher_of(run), [record.role for record in records]
    trouble: list[str] = []
    queue, engines = (None, ()) if launcher is None else _observe_queue(run, config, trouble)
    metrics = LineTail(run / "metrics.jsonl").records()
    speeds = Speeds()
    for record in metrics:
        speeds.add(msgspec.convert(record | {"step": int(record["step"])}, Kept))
    usual = [record["time/step_s"] for record in metrics[-USUAL_STEPS:] if "time/step_s" in record]
    return Observation(
        run=str(run),
        launcher=launcher,
        launcher_state=GONE if launcher is None else state_of(launcher),
        processes=observe_processes(run, records, stacks=stacks),
        ranks=_ranks(run, {record.pid for record in records}),
        queue=queue,
        engines=observe_engines(run, engines),
        deadlines=Deadlines(
            batch=config.trainer.batch_timeout_s,
            collective=config.trainer.collective_timeout_s,
            lease=config.queue.lease_s,
            sync=config.weight_sync.sync_timeout_s,
        ),
        max_restarts=config.launcher.max_restarts,
        steps=config.trainer.steps,
        steps_done=int(max((record["step"] + 1 for record in metrics), default=0)),
        evaluated=is_evaluated(run, roles),
        evaluated_in_part=is_evaluated_in_part(run, roles),
        usual_step_s=statistics.median(usual) if usual else None,
        slowdown=speeds.slowdown,
        # The rows of the very last step may not be recorded yet.
        episode_s=_episode_s(run, int(metrics[-2]["step"]), trouble) if speeds.slower_phase == "waiting" else {},
        rewards=tuple(term.name for term in config.reward.functions),
        disk_free=shutil.disk_usage(run).free,
        shm_free=shutil.disk_usage("/dev/shm").free,
        trouble=tuple(trouble),
    )


PARTS = ("generate", "tools", "environment", "reward")


class _Timed(msgspec.Struct):
    timings: dict[str, float] = {}


def _episode_s(run: Path, step: int, trouble: list[str]) -> dict[str, float]:
    """Return the mean seconds of the parts of an episode of this step; empty unless its rows are recorded."""
    rows: list[_Timed] = []
    for file in files_of_step(run / "trajectories", step):
        # The run deletes old files meanwhile.
        with suppress(FileNotFoundError):
            try:
                with undamaged(file), gzip.open(file, "rb") as opened:
                    rows += [msgspec.json.decode(line, type=_Timed) for line in opened]
            except UserError as error:
                trouble.append(f"episodes of step {step}: {error}")
    return {part: statistics.fmean(row.timings.get(part, 0.0) for row in rows) for part in PARTS} if rows else {}


def evaluates_only(roles: Collection[str]) -> bool:
    """Whether a run with processes of these roles is one of ``rl-async eval``, which trains nothing."""
    return bool(roles) and "trainer" not in roles


def is_evaluated(run: Path, roles: Collection[str]) -> bool:
    """Whether an evaluation-only run has recorded its whole evaluation."""
    return evaluates_only(roles) and is_recorded(run)


def is_evaluated_in_part(run: Path, roles: Collection[str]) -> bool:
    """Whether an evaluation-only run ended early and has recorded only its complete episodes."""
    return evaluates_only(roles) and bool(_wholeness(run)) and not is_recorded(run)


def is_recorded(run: Path) -> bool:
    """Whether the run folder has a whole evaluation."""
    return any(_wholeness(run))


def _wholeness(run: Path) -> list[bool]:
    """Return, for each recorded evaluation, whether it is whole."""
    return [is_whole(file) for file in (run / "trajectories").glob("eval-*.jsonl.gz")]


def launcher_of(run: Path) -> int | None:
    """Return the pid of the launcher, which holds the run's lock (``run_folder.hold``), or None if it does not live."""
    with suppress(FileNotFoundError, ValueError):
        pid = int(run.with_name(f".{run.name}.lock").read_text())
        return pid if state_of(pid) not in ENDED else None
    return None


# --- processes --------------------------------------------------------------------------------------------------------


def observe_processes(
    run: Path, records: Sequence[ProcessRecord], *, stacks: bool = True
) -> tuple[ObservedProcess, ...]:
    """Observe every process; with ``stacks``, also the main thread's stack if the process answers within STACK_S."""
    before = {record.pid: _stat(record) for record in records}
    began = time.monotonic()
    able = [record for record in records if before[record.pid].state not in (REMOTE, *ENDED, *HALTED)]
    found = request_stacks(run, able) if stacks else {}
    time.sleep(max(0.0, 0.3 - (time.monotonic() - began)))
    elapsed = (time.monotonic() - began) * os.sysconf("SC_CLK_TCK")
    seen = []
    for record in records:
        stat = _stat(record)
        failing = stat.state in ENDED or record.state in ("starting", "restarting", "failed")
        log_age, log_line = _log(run / "logs" / f"{record.name}.log", failing)
        seen.append(
            ObservedProcess(
                record=record,
                state=stat.state,
                waits_in=waits_in(record.pid) if stat.state not in (REMOTE, GONE) else "",
                age_s=age_s(stat),
                cpu=max(0, stat.cpu_ticks - before[record.pid].cpu_ticks) / elapsed,
                log_age_s=log_age,
                log_line=log_line,
                stack=found.get(record.name) or (_py_spy(record.pid, stat.state) if stacks else ()),
            )
        )
    return tuple(seen)


def _stat(record: ProcessRecord) -> ProcStat:
    """Return the state of a process: REMOTE on another machine, gone if its pid now belongs to another process."""
    if record.host:
        return ProcStat(REMOTE if record.exit is None else GONE)
    stat = read_stat(record.pid)
    return stat if stat.started == record.started else ProcStat()


def request_stacks(run: Path, records: Iterable[ProcessRecord]) -> dict[str, tuple[Frame, ...]]:
    """Signal the processes that handle the signal; return the stacks that they write within STACK_S, by name.

    A process writes its stack line by line, so it is complete when two reads in a row agree.
    """
    signalled: dict[str, tuple[Path, int]] = {}
    for record in records:
        file = run / "stacks" / f"{record.name}.txt"
        # The signal would kill a process without a handler.
        if file.is_file() and catches(record.pid, ASK):
            # The process appends, so its file may be emptied.
            if file.stat().st_size > MOST_STACK_BYTES:
                os.truncate(file, 0)
            signalled[record.name] = (file, file.stat().st_size)
            with suppress(ProcessLookupError):
                os.kill(record.pid, ASK)
    deadline = time.monotonic() + STACK_S
    last: dict[str, tuple[Frame, ...]] = {}
    found: dict[str, tuple[Frame, ...]] = {}
    while len(found) < len(signalled) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        for name, (file, start) in signalled.items():
            with file.open("rb") as opened:
                opened.seek(start)
                frames = main_thread(opened.read().decode(errors="replace"))
            if frames and frames == last.get(name):
                found[name] = frames
            last[name] = frames
    return found


def _py_spy(pid: int, state: str) -> tuple[Frame, ...]:
    """Read the main thread's stack of a process that cannot answer, if py-spy is installed and permitted."""
    tool = py_spy()
    if tool is None or state in (REMOTE, *ENDED):
        return ()
    command = [tool, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=ANSWER_S, check=True)
        threads = msgspec.json.decode(done.stdout, type=list[_SpyThread])
    except (subprocess.SubprocessError, OSError, *UNDECODABLE):
        # The report shows such a process without a stack.
        return ()
    main = next((thread for thread in threads if thread.os_thread_id == pid), None)
    return () if main is None else tuple(Frame(f.filename, str(f.line), f.name) for f in main.frames)


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    # Threads are identified by id, since names of a stopped process's threads cannot be read.
    os_thread_id: int | None = None


def _log(path: Path, failing: bool) -> tuple[float | None, str]:
    """Return the seconds since the log grew, and its last line or, for a failing process, its last error."""
    if not path.is_file() or path.stat().st_size == 0:
        return None, ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    line = said_last(text) if failing else text.splitlines()[-1]
    return max(0.0, time.time() - path.stat().st_mtime), line


def _ranks(run: Path, pids: set[int]) -> tuple[ObservedRank, ...]:
    """Read the heartbeats of these processes and ignore those left by earlier ones."""
    now = time.time()
    return tuple(
        ObservedRank(rank=beat.rank, pid=beat.pid, step=beat.step, phase=beat.phase, for_s=max(0.0, now - beat.since))
        for beat in read_beats(run)
        if beat.pid in pids
    )


# --- queue and engines ------------------------------------------------------------------------------------------------


def _observe_queue(
    run: Path, config: RunConfig, trouble: list[str]
) -> tuple[ObservedQueue | None, tuple[EngineRecord, ...]]:
    try:
        address = read_endpoints(run).queue
        keys = client_keys(config, run, "reader")
        with SyncQueueClient(address, role="person", name="doctor", timeout_s=ANSWER_S, keys=keys) as queue:
            report = queue.inspect()
            groups = queue.group_list(-1, LISTED).groups
            return ObservedQueue(report=report, oldest=oldest_groups(groups)), tuple(queue.engines().engines)
    except (QueueLost, UserError) as error:
        trouble.append(f"queue: {error}")
        return None, ()


def oldest_groups(groups: Sequence[GroupRecord]) -> tuple[GroupRecord, ...]:
    """Return, for each state, the training group that has been in it longest."""
    oldest: dict[str, GroupRecord] = {}
    for group in groups:
        if group.partition == "train" and group.age_s > (oldest[group.state].age_s if group.state in oldest else -1):
            oldest[group.state] = group
    return tuple(oldest.values())


def observe_engines(run: Path, records: Sequence[EngineRecord]) -> tuple[ObservedEngine, ...]:
    """Query these engines of the run, all at once."""
    if not records:
        return ()
    token = run_token(run, "engines")
    return tuple(asyncio.run(gather_or_cancel(*(_observe_engine(record, token) for record in records))))


async def _observe_engine(record: EngineRecord, token: str) -> ObservedEngine:
    version = "none yet" if record.version is None else str(record.version)
    silent = ObservedEngine(engine_id=record.engine_id, url=record.url, answers=False, version=version)
    client = connect(record.kind, record.url, timeout_s=ANSWER_S, token=token)
    http = EngineHttp(record.url, ANSWER_S, token=token)
    try:
        async with asyncio.timeout(ANSWER_S):
            if not await client.health():
                return silent
        answering = msgspec.structs.replace(silent, answers=True)
        async with asyncio.timeout(ANSWER_S):
            paused = None
            if ENGINES[record.kind].reports_pause:
                paused = http.decode(await http.call("GET", "/is_paused"), _Paused).is_paused
            began = time.monotonic()
            load = await client.load()
            took = time.monotonic() - began
            answering = msgspec.structs.replace(answering, paused=paused, requests=load.requests, answer_s=took)
        if load.tokens is None:
            return answering
        async with asyncio.timeout(SPEED_S + ANSWER_S):
            await asyncio.sleep(SPEED_S)
            later = (await client.load()).tokens
        rate = 0.0 if later is None else (later.sampled - load.tokens.sampled) / (time.monotonic() - began - took)
        return msgspec.structs.replace(answering, tokens_per_s=rate)
    except TimeoutError:
        return silent
    except EngineError:
        # The engine is alive, but its version lacks these routes.
        return answering
    finally:
        await client.close()
        await http.close()


class _Paused(msgspec.Struct):
    is_paused: bool


# --- the report -------------------------------------------------------------------------------------------------------

REPORT_FILE = "doctor.txt"
# At most this many calls of a stack and characters of a log line are shown.
FRAMES = 6
LINE = 100


def doctor(run: Path, *, as_json: bool = False) -> int:
    """Print the diagnosis of a run; return 1 if it is stuck or failed, else 0. Raises UserError if it never ran."""
    seen = observe(run.absolute())
    verdict = diagnose(seen)
    if as_json:
        print(msgspec.json.encode({"verdict": verdict, "observation": seen}).decode())
    else:
        print(report(seen, verdict))
        if seen.launcher is None and (run / REPORT_FILE).is_file():
            print(f"diagnosed while it ran: {run / REPORT_FILE}")
    return 1 if verdict.health in ("stuck", "failed") else 0


def write_report(run: Path, why: str) -> str:
    """Append a report on a run in trouble to ``RUN/doctor.txt``, and return its findings."""
    seen = observe(run)
    verdict = diagnose(seen)
    with (run / REPORT_FILE).open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(why)}\n{report(seen, verdict)}\n\n")
    return "\n".join(verdict.findings)


def report(seen: Observation, verdict: Diagnosis) -> str:
    """Compose the whole report for a terminal, with the verdict last, just above the prompt."""
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
    phase = "" if rank is None else f"step {rank.step}, {rank.phase}"
    if rank is not None and not process.ended:
        phase += f" for {rank.for_s:.0f} s"
    stack = f"in {process.stack[0].name}" if process.stack else process.waits_in
    state = "" if process.record.state == "running" else process.record.state
    restarts = f"{process.record.restarts} restarts" if process.record.restarts else ""
    return "; ".join(
        part for part in (state, phase, stack if not process.ended else process.log_line[:LINE], restarts) if part
    )


def stage_lines(seen: Observation) -> list[str]:
    """Describe the oldest group of each state on one line of a table."""
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

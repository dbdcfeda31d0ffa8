"""Runs from Python: ``launch`` starts one as ``rl-async launch`` does, ``load`` opens a folder; both return a ``Run``.

A run is a process of its own with a session of its own, so that neither an interrupted cell nor a full notebook touches
it. It ends with the program that started it, in order and after saving, unless that asked for ``detach``. Everything
that a ``Run`` knows is in the run's folder, so that ``load`` in another program knows it as well.
"""

import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from rl_async.configs.load import Given, dump_values, load_config, load_resolved
from rl_async.errors import EXIT_STOPPED, EXIT_USER, ConfigError, RlAsyncError, RunFailed, UserError
from rl_async.files import make_durable_folder, nearest_run, undamaged
from rl_async.insight.doctor import evaluates_only, is_recorded, launcher_of
from rl_async.insight.tail import LineTail, Record
from rl_async.insight.view.trajectories import RecordedFile, RecordedRow, lines, tokenizer_of
from rl_async.launcher.run_folder import (
    FUNCTIONS,
    GIVEN,
    OUTPUT,
    RunInUse,
    has_more,
    is_unused,
    new_run,
    next_folder,
    resumed_run,
    unfinished,
)
from rl_async.launcher.supervisor import tail_of
from rl_async.messages import Turn
from rl_async.process.role import STARTER_FD, own_module, printable
from rl_async.process.run_files import ProcessRecord, read_roster, said_last
from rl_async.userload import refer_to

POLL_S = 0.2
# Exit codes of a launcher that was asked to end, also before it handled the signal.
STOPPED = EXIT_STOPPED | {-signal.SIGTERM, -signal.SIGINT}
Status = Literal["running", "finished", "stopped", "failed"]


class Sample(NamedTuple):
    """A recorded row: one conversation that was sampled, or the part of one that was trained by itself.

    ``pandas.DataFrame(run.trajectories())`` makes a table of them.

    Attributes:
        step: the step that trained it; of a held-out one, the step of the version that was evaluated.
        task_id: its task.
        group: the number of its group, whose samples answer the same task.
        sample: its number in the group.
        reward: its reward.
        reward_parts: the named parts of the reward, such as the numbers that a reward function returned.
        scored: whether it has a reward; where a scorer failed, ``error`` says why.
        error: the error of its episode or of its scoring, or empty.
        finish_reason: the reason of its end: stop, length, max_turns, tool_calls, abort, error or timeout.
        turns: the messages, each with ``role``, ``text`` and ``tool_calls``.
        text: all tokens as text, special tokens included.
        versions: the steps of the versions that sampled its tokens, oldest first; several in a partial rollout.
        staleness: the step minus the oldest of these versions; None for a held-out row.
        ground_truth: the task's expected answer.
        token_ids: int [T].
        loss_mask: bool [T], true where the policy sampled.
        logprobs: float [T], the engine's log-probability of each sampled token, 0 elsewhere.
    """

    step: int
    task_id: str
    group: int
    sample: int
    reward: float
    reward_parts: dict[str, float]
    scored: bool
    error: str
    finish_reason: str
    turns: list[Turn]
    text: str
    versions: list[int]
    staleness: int | None
    ground_truth: str
    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]


class Run:
    """A run: finished, stopped, failed or running. Made by ``launch`` and ``load``."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes] | None" = None, begin: int = 0) -> None:
        self.folder = folder
        self._process = process
        # Where the output of this start begins.
        self._begin = begin
        self._shown = LineTail(folder / OUTPUT, begin)

    def __repr__(self) -> str:
        steps = len(self.metrics())
        return f"<Run {self.folder}: {self.status}, {steps} step{'' if steps == 1 else 's'} trained>"

    @property
    def name(self) -> str:
        """The name of the run, which is that of its folder."""
        return self.folder.name

    @property
    def running(self) -> bool:
        """Whether the run goes on."""
        if self._process is not None:
            return self._process.poll() is None
        return launcher_of(self.folder) is not None

    @property
    def status(self) -> Status:
        """The state of the run. One that was stopped can be continued with ``launch(..., name=..., resume=True)``."""
        if self.running:
            return "running"
        if self._process is not None:
            code = self._process.returncode
            return "finished" if code == 0 else "stopped" if code in STOPPED else "failed"
        if not (self.folder / "config.yaml").exists():
            return "failed" if said_last(tail_of(self.folder / OUTPUT, 0)).startswith("error: ") else "stopped"
        records = self._records()
        evaluates = evaluates_only([record.role for record in records])
        config = load_resolved(self.folder / "config.yaml")
        if is_recorded(self.folder) if evaluates else not has_more(self.folder, config):
            return "finished"
        return "failed" if any(record.state == "failed" for record in records) else "stopped"

    def wait(self, timeout: float | None = None, *, quiet: bool = False) -> "Run":
        """Wait for the end of the run, and return it; print its output meanwhile unless ``quiet``.

        An interrupt ends the waiting, not the run. Raises the run's own error if it failed: UserError for a mistake
        in the config or in a function, RunFailed otherwise; and TimeoutError if it runs after ``timeout`` seconds.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while True:
                # Asked before reading, so that the last lines are not missed.
                running = self.running
                for line in () if quiet else self._shown.each():
                    print(printable(line.decode(errors="replace")), flush=True)
                if not running:
                    break
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{self.folder} runs after {timeout:g} s; run.stop() stops it")
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            print(f"{self.folder} goes on; run.wait() waits for it again, run.stop() stops it", file=sys.stderr)
            raise
        if self.status == "failed":
            raise self._error()
        return self

    def stop(self) -> "Run":
        """Stop the run as one Ctrl-C does: it ends its step, saves, and ends its processes in order.

        Returns when it has ended, which may take as long as a step; at once if it has ended before. Raises RunFailed if
        it could not save.
        """
        if not self.running:
            return self
        pid = self._process.pid if self._process is not None else self._holder()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return self.wait(quiet=True)

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each step that was trained, oldest first, as ``pandas.DataFrame`` takes them.

        After a resume the newest record of a step counts.
        """
        return _newest(self.folder / "metrics.jsonl", "step")

    def evaluations(self) -> list[dict[str, float]]:
        """Return the metrics of each evaluation on held-out tasks, such as ``eval/reward`` at version ``eval/step``."""
        return _newest(self.folder / "evaluations.jsonl", "eval/step")

    def trajectories(self, step: int | None = None, *, evaluation: bool = False) -> Iterator[Sample]:
        """Yield the rows that ``step`` trained, or those of all steps, in order.

        With ``evaluation`` they are those of the evaluations instead, and ``step`` is the version that was evaluated.
        Rows are recorded shortly after their step. Raises UserError if the step was not recorded, or if the run's
        tokenizer is missing.
        """
        folder, partition = self.folder / "trajectories", "eval" if evaluation else "train"
        names = [RecordedFile.of(path.name) for path in folder.glob("*.jsonl.gz")]
        files = _trained([file for file in names if file is not None and file.partition == partition])
        if step is not None and step not in {file.step for file in files}:
            recorded = f"steps {files[0].step} to {files[-1].step}" if files else "none so far"
            kind = "evaluation" if evaluation else "trajectories"
            raise UserError(f"{folder} has no {kind} of step {step}; recorded: {recorded}")
        return self._samples([file for file in files if step in (None, file.step)])

    def _samples(self, files: list[RecordedFile]) -> Iterator[Sample]:
        if not files:
            return
        tokenizer = tokenizer_of(self.folder, load_resolved(self.folder / "config.yaml").model.path)
        if tokenizer.decode is None:
            raise UserError(tokenizer.problem)
        own = re.compile(rf".*{FUNCTIONS}/\w+\.py:")
        for file in files:
            path = self.folder / "trajectories" / file.name
            for _, line in lines(path):
                with undamaged(path):
                    row = msgspec.json.decode(line, type=RecordedRow)
                base = row.staleness_base
                yield Sample(
                    step=file.step,
                    task_id=row.task_id,
                    group=row.group_id,
                    sample=row.sample,
                    reward=row.reward,
                    reward_parts={own.sub("", part): value for part, value in row.reward_parts.items()},
                    scored=row.scored,
                    error=row.error,
                    finish_reason=row.finish_reason,
                    turns=row.turns,
                    text=tokenizer.decode(row.token_ids),
                    versions=sorted({run.version.step for run in row.versions}),
                    staleness=None if base is None or file.partition == "eval" else file.step - base,
                    ground_truth=row.ground_truth,
                    token_ids=row.token_ids,
                    loss_mask=row.loss_mask,
                    logprobs=row.logprobs,
                )

    def _holder(self) -> int | None:
        """Return the process that holds the run's lock. A lock that outlived its launcher names a pid of another."""
        with suppress(FileNotFoundError), self.folder.with_name(f".{self.name}.lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return launcher_of(self.folder)
        return None

    def _records(self) -> list[ProcessRecord]:
        """Return the processes that the run started; none if it failed before."""
        with suppress(UserError):
            return read_roster(self.folder)
        return []

    def _error(self) -> RlAsyncError:
        """Return the error with which the run ended, which its output has, or the log of the process that failed."""
        logs = [self.folder / OUTPUT]
        logs += [self.folder / "logs" / f"{r.name}.log" for r in self._records() if r.state == "failed"]
        found = next((log for log in logs if log.is_file()), None)
        if found is None:
            return RunFailed(f"{self.folder} failed; its logs are in {self.folder / 'logs'}")
        output = tail_of(found, self._begin if found == logs[0] else 0)
        said = said_last(output).removeprefix("error: ") or "it wrote nothing"
        # A process that failed is quoted below the launcher's error.
        causes = [line for line in output.splitlines() if " said last: " in line]
        said = printable("; ".join([said, *causes[-1:]]))
        kind = UserError if self._process is not None and self._process.returncode == EXIT_USER else RunFailed
        return kind(f"{said} (all output: {found})")


# The newest run of each folder that this program started.
_started: dict[Path, Run] = {}


def launch(
    config: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    reward: Callable[..., Any] | str | None = None,
    steps: int | None = None,
    mode: Literal["colocated", "disaggregated"] | None = None,
    name: str = "",
    resume: bool | None = None,
    detach: bool = False,
) -> Run:
    """Start a run as ``rl-async launch`` does, and return it at once; ``run.wait()`` waits for its end.

    Wherever a config names a function or class as "path.py:name", the function or class itself may stand: as a reward,
    ``{"algorithm.loss": my_loss}``, ``{"agent.tools": [my_tool]}``. One of a notebook or script is sent by its source,
    into the folder ``functions`` of the run, so it must define or import what it uses, or use imported modules. What a
    reward function may take as arguments are the fields of ``rl_async.Conversation``.

    The run ends in order, as by ``run.stop()``, when the program that started it ends.

    Args:
        config: a preset's name, the path of a YAML file, or a mapping with what such a file would hold.
        overrides: values for dotted keys, such as ``{"trainer.learning_rate": 1e-4}``.
        reward: the reward function, in place of ``reward.functions``.
        steps: ``trainer.steps``.
        mode: who shares which device; by default the config's.
        name: the run's folder below ``launcher.run_dir``; by default numbered.
        resume: whether to continue the named run, or the newest of this config. By default a named run is continued
            that did not reach its end.
        detach: let the run go on when this program ends; ``rl_async.load`` opens it again.

    Raises ConfigError for a mistake in the config, or a function that cannot be sent; UserError if the run exists.
    """
    settings = dict(overrides or {})
    if reward is not None:
        settings["reward.functions"] = [{"name": reward}]
    if steps is not None:
        settings["trainer.steps"] = steps
    # The folder is known once the config is read, and the config names functions in the folder.
    given, words, _ = _named(config, settings, Path())
    wanted = load_config(given, words, mode=mode, name=name)
    if wanted.name:
        _refuse_running(Path(wanted.launcher.run_dir) / wanted.name)
    may_resume = resume is not False
    if resume is None:
        resume = bool(name) and unfinished(given, words, name)
    if resume:
        resolved, folder = resumed_run(given, words, mode=mode, name=name)
    else:
        resolved, folder = new_run(given, words, mode=mode, name=name, may_resume=may_resume)
    _refuse_running(folder)
    if not resume:
        folder = _made(folder, is_named=bool(wanted.name))
    given, words, sources = _named(config, settings, folder)
    (folder / "logs").mkdir(exist_ok=True)
    (folder / FUNCTIONS).mkdir(exist_ok=True)
    for path, source in sources.items():
        path.write_text(source)
    if not isinstance(given, str):
        (folder / GIVEN).write_text(dump_values(dict(given)))
        given = str(folder / GIVEN)
    command = ["launch", "--config", given, "--name", folder.name, "--resume" if resume else "--no-resume"]
    command += ["--mode", resolved.mode, *words]
    run = _started[folder.absolute()] = _start(folder, command, detach)
    return run


def load(path: str | Path) -> Run:
    """Open the folder of a run, which may be running. Raises UserError if it is not one."""
    folder = Path(path)
    if (run := _started.get(folder.absolute())) is not None:
        return run
    if not (folder / "config.yaml").is_file() and not (folder / OUTPUT).is_file():
        raise UserError(f"{folder} is not the folder of a run; {nearest_run(folder) or 'name one as runs/NAME'}")
    output = folder / OUTPUT
    return Run(folder, begin=output.stat().st_size if output.exists() else 0)


def _named(
    config: str | Path | Mapping[str, Any], settings: Mapping[str, Any], folder: Path
) -> tuple[Given, list[str], dict[Path, str]]:
    """Return the config and the overrides with references in place of functions, and the files to write for these."""
    sources: dict[Path, str] = {}
    key = "config"

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if callable(getattr(value, "item", None)) and getattr(value, "size", 1) == 1:
            # A number of NumPy's.
            return value.item()
        reference, source = refer_to(value, folder / FUNCTIONS, key)
        file = Path(reference.rpartition(":")[0])
        if source and sources.setdefault(file, source) != source:
            raise ConfigError(f"{key}: another function that is given has the name {file.stem}, too; rename one")
        return reference

    given: Given = str(config)
    if isinstance(config, Mapping):
        given = json.loads(json.dumps(config, default=plain))
    words = []
    for key, value in settings.items():
        words.append(f"{key}={json.dumps(value, default=plain, ensure_ascii=False)}")
    return given, words, sources


def _refuse_running(folder: Path) -> None:
    """Raise RunInUse if the run goes on, or was started by this program and has not taken its lock yet."""
    run = _started.get(folder.absolute())
    if launcher_of(folder) is not None or (run is not None and run.running):
        raise RunInUse(f"name: the run {folder} is running; rl_async.load({str(folder)!r}) opens it")


def _made(folder: Path, *, is_named: bool) -> Path:
    """Make the folder of a new run, which takes its name. If it was chosen, and another run has taken it meanwhile, the
    next number is taken."""
    while True:
        make_durable_folder(folder.parent)
        try:
            folder.mkdir(0o700)
            return folder
        except FileExistsError:
            if is_named and is_unused(folder):
                return folder
            if is_named:
                raise
            folder = next_folder(folder.parent, folder.name.rpartition("-")[0])


def _start(folder: Path, command: list[str], detach: bool) -> Run:
    read_end, write_end = os.pipe()
    # Jupyter sets it for its cells; in the output of a run it would draw the live view.
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    if not detach:
        environment[STARTER_FD] = str(read_end)
    try:
        with (folder / OUTPUT).open("ab") as output:
            begin = output.tell()
            process = subprocess.Popen(
                own_module("launcher.cli", *command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=() if detach else (read_end,),
                start_new_session=True,
            )
    finally:
        os.close(read_end)
    # The kernel closes the write end when this program ends, also if the run is over by then.
    if detach:
        os.close(write_end)
    return Run(folder, process, begin)


def _newest(path: Path, key: str) -> list[Record]:
    """Read records by step. Those of a lineage that was resumed replace older ones from its first step on."""
    found: list[Record] = []
    for record in LineTail(path).records():
        while found and found[-1][key] >= record[key]:
            found.pop()
        whole = {name: int(record[name]) for name in (key, "version", "lineage") if name in record}
        found.append(record | whole)
    return found


def _trained(files: list[RecordedFile]) -> list[RecordedFile]:
    """Return the files by step, without those of steps that a newer lineage began anew before."""
    first: dict[int, int] = {}
    for file in files:
        first[file.lineage] = min(file.step, first.get(file.lineage, file.step))
    ends = {old: min((step for new, step in first.items() if new > old), default=math.inf) for old in first}
    kept = [file for file in files if file.step < ends[file.lineage]]
    return sorted(kept, key=lambda file: (file.step, file.name))

"""Whole runs of ``rl-async launch``, and of TRL's GRPO (``trl_step.py``) with the same steps, watched from outside."""

import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.processes.trainer_arms import resident
from rl_async.process.run_files import read_stat

RL_ASYNC = str(Path(sys.executable).with_name("rl-async"))
SAME = f"torch=={torch.__version__} transformers=={transformers.__version__}"  # as here
INSTALL = f"python -m venv .venv-trl && .venv-trl/bin/pip install trl==1.16.0 {SAME}"
MISSING = 0.5  # of a rollout's tokens, on the average of a step's rollouts
POLL_S = 0.1
TICKS = os.sysconf("SC_CLK_TCK")
HERE = Path(__file__).parent
DIGITS = f'reward.functions=[{{name: "{HERE / "step_reward.py"}:scored"}}]'  # costs nothing and differs within a group
PROCESSOR = "processor of "
PHASES = {  # of the trainer: "train" is "update", what comes before it (engines to sleep) and after (records, commit)
    "waiting for the batch": "wait_batch",
    "training": "train",
    "of it passes and optimizer": "update",
    "sync": "sync",
}


@dataclass
class Arm:
    """What was measured in all runs of one kind: seconds of each step, and per run what a step consists of."""

    steps: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, seconds: Sequence[float], parts: Mapping[str, float]) -> None:
        """Add one run."""
        self.steps += seconds
        for name, value in parts.items():
            self.parts[name].append(value)

    @property
    def median(self) -> float:
        """Median over the steps of all runs."""
        return statistics.median(self.steps)

    def processor(self) -> list[float]:
        """Return, for each run, the processor seconds per step of all roles together."""
        of_roles = [values for part, values in self.parts.items() if part.startswith(PROCESSOR)]
        return [sum(of_run) for of_run in zip(*of_roles, strict=True)]

    def lines(self, name: str) -> list[str]:
        """Say what was measured."""
        parts = (f"{part} {statistics.median(values):.3f}" for part, values in self.parts.items())
        return [
            f"  {name}: median {self.median:.3f} s, {min(self.steps):.3f} to {max(self.steps):.3f}, "
            f"{len(self.steps)} steps",
            f"    per step, s: {', '.join(parts)}",
        ]


def make_endless(source: str | Path, target: Path, ending: str, choice: str, never: str) -> None:
    """Save the model with turns that end with the token ``never``, which it does not say: rollouts have all tokens.

    ``choice`` replaces ``ending`` in the chat template.
    """
    tokenizer = AutoTokenizer.from_pretrained(source)
    if ending not in tokenizer.chat_template:
        sys.exit(f"the chat template of {source} does not end a turn with {ending}")
    tokenizer.chat_template = tokenizer.chat_template.replace(ending, choice)
    tokenizer.eos_token = never
    tokenizer.save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(source)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(target)


@dataclass(frozen=True)
class Used:
    """What the processes of each role used: processor seconds per counted step, and the largest resident set that one
    of them had until the last counted step, and until its end."""

    processor: dict[str, float]
    peak_bytes: dict[str, int]
    final_peak_bytes: dict[str, int]


def launch(
    config: str, mode: str, overrides: Sequence[str], run: Path, counted: range, deadline_s: float
) -> tuple[list[dict[str, float]], Used]:
    """Run ``rl-async launch`` to its end in the folder ``run``; its metrics of all steps, and what it used.

    Ends this process if the run fails, or makes fewer steps than ``counted`` has.
    """
    command = [RL_ASYNC, "launch", "--mode", mode, "--config", config, "--name", run.name]
    used = _watched([*command, *overrides, f"launcher.run_dir={run.parent}"], run, counted, deadline_s)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()], used


def _watched(command: Sequence[str], run: Path, counted: range, deadline_s: float) -> Used:
    ticks: dict[int, Counter[str]] = {}  # by the number of finished steps; several engines or ranks count as one
    peaks: dict[int, Counter[str]] = defaultdict(Counter)
    log = run.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + deadline_s
    try:
        while process.poll() is None and time.monotonic() < deadline:
            done = _lines(run / "metrics.jsonl")
            listed = processes_of(run)
            if counted.start <= done <= counted.stop and done not in ticks:
                stats = [(role, read_stat(pid).cpu_ticks) for role, pid in listed]
                if all(count for _, count in stats):  # after the last step they end
                    ticks[done] = Counter()
                    for role, count in stats:
                        ticks[done][role] += count
            for role, pid in listed:
                peaks[done][role] = max(peaks[done][role], resident("VmHWM", pid))
            time.sleep(POLL_S)
    finally:
        process.terminate()
        process.wait(30)
    if process.returncode != 0 or _lines(run / "metrics.jsonl") < counted.stop:
        sys.exit(f"{' '.join(command)} ended early, with {process.returncode}:\n{log.read_text()[-2000:]}")
    first, last = min(ticks), max(ticks)
    return Used(
        {role: (ticks[last][role] - ticks[first][role]) / TICKS / (last - first) for role in ticks[first]},
        _largest(peaks[done] for done in peaks if done < counted.stop),
        _largest(peaks.values()),
    )


def processes_of(run: Path) -> list[tuple[str, int]]:
    """Return role and pid of each process of a run, none before there are any."""
    file = run / "processes.json"
    return [(entry["role"], entry["pid"]) for entry in json.loads(file.read_text())] if file.exists() else []


def _largest(peaks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in peaks:
        found |= {role: max(size, found.get(role, 0)) for role, size in each.items()}
    return found


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def our_steps(
    config: str, mode: str, overrides: Sequence[str], run: Path, counted: range, tokens: int, deadline_s: float
) -> tuple[list[float], dict[str, float], Used]:
    """Seconds of the ``counted`` steps of one run, from the end of one to the end of the next; parts of a step.

    Ends this process if rollouts have less than ``tokens`` tokens.
    """
    metrics, used = launch(config, mode, overrides, run, counted, deadline_s)
    if any(m["rollout/response_tokens_mean"] < tokens - MISSING for m in metrics):
        sys.exit(f"{mode}: too many rollouts have less than {tokens} tokens")
    chosen = [metrics[step] for step in counted]
    ends = [metrics[counted.start - 1]["time"], *(m["time"] for m in chosen)]
    parts = {part: statistics.median(m[f"time/{key}_s"] for m in chosen) for part, key in PHASES.items()}
    parts["a rollout, from request to answer"] = statistics.median(_generation(run, counted))
    parts |= {f"{PROCESSOR}{role}": seconds for role, seconds in used.processor.items()}
    return [b - a for a, b in pairwise(ends)], parts, used


def _generation(run: Path, counted: range) -> list[float]:
    """Seconds that each rollout of the counted steps was with the engine."""
    files = sorted((run / "trajectories").glob("step-*.jsonl.gz"))[counted.start : counted.stop]
    return [json.loads(line)["timings"]["generate"] for file in files for line in gzip.open(file, "rt")]


@dataclass(frozen=True)
class TrlRun:
    """One run of ``trl_step.py``; the lists have an entry for each step."""

    ends: list[float]  # seconds of training until then
    processor: list[float]  # of its process until then
    tokens: list[float]  # mean length of the completions
    rewards: list[float]
    generating: list[float]  # seconds of the step that completions were sampled

    def steps(self, counted: range, tokens: int) -> tuple[list[float], dict[str, float]]:
        """Seconds of the ``counted`` steps, and parts of a step. Ends this process if tokens are missing."""
        if statistics.mean(self.tokens) < tokens - MISSING:
            sys.exit(f"TRL: too many rollouts have less than {tokens} tokens")
        used = [self.processor[step] - self.processor[step - 1] for step in counted]
        parts = {
            "generation": statistics.median(self.generating[step] for step in counted),
            "processor": statistics.median(used),
        }
        return [self.ends[step] - self.ends[step - 1] for step in counted], parts


def run_trl(python: str | Path, model: Path, prompts: Path, threads: int, deadline_s: float, **flags: object) -> TrlRun:
    """Train by TRL's GRPO in a Python that has TRL. ``flags`` are those of ``trl_step.py``.

    Raises TimeoutExpired after ``deadline_s``, and ends this process if TRL fails.
    """
    command = [str(python), str(HERE / "trl_step.py"), str(model), str(prompts), f"--threads={threads}"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    settings = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    settings |= {"PYTHONWARNINGS": "ignore::FutureWarning", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True, timeout=deadline_s)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    return TrlRun(**json.loads(done.stdout.splitlines()[-1]))

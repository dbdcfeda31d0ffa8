"""Whole steps of ours and of TRL's GRPO, generation included: 256 rollouts of 32 tokens in one turn, the demo's model.

    python -m benchmarks.trainer --trl PYTHON --only step_vs_trl step_vs_trl_colocated

Ours are runs of ``rl-async launch``, from the end of one step to the end of the next; TRL's, in one process
(``trl_step.py``), likewise. They take turns. Same weights, prompts, reward and cores. TRL's process has two threads;
ours have one each: an engine and a trainer rank side by side (disaggregated, one step off-policy), or two engines and
two ranks in turns (colocated). One optimizer step on the whole batch, the clipped loss, no reference model;
log-probabilities are not computed again before it, neither by TRL nor by ours (``bypass_ppo_clip``).

The model's turns end with a token that it hardly ever says (a chance of about 1e-5 where it could), so practically
every rollout has all of its tokens; ``MISSING`` bounds how many may be missing of one.
"""

import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as parquet
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rl_async.configs.load.loader import load_config
from rl_async.process.kernel import read_stat

RL_ASYNC = str(Path(sys.executable).with_name("rl-async"))
SAME = f"torch=={torch.__version__} transformers=={transformers.__version__}"  # as here
INSTALL = f"python -m venv .venv-trl && .venv-trl/bin/pip install trl==1.16.0 {SAME}"
GROUPS, GROUP_SIZE, TOKENS, TRL_THREADS = 32, 8, 32, 2
MISSING = 0.5  # of a rollout's tokens, on the average of a step's rollouts
STEPS, SKIPPED, ROUNDS = 20, 5, 2  # a run's first steps are a warm-up
DEADLINE_S = 300
POLL_S = 0.1
TICKS = os.sysconf("SC_CLK_TCK")
MODES = {
    "disaggregated": ["queue.max_staleness=1"],
    "colocated": ["queue.max_staleness=0", "rollout.engines=2", "trainer.ranks=2"],
}
TRL = "TRL"
PHASES = {  # of the trainer: "train" is "update", what comes before it (engines to sleep) and after (records, commit)
    "waiting for the batch": "wait_batch",
    "training": "train",
    "of it forward, backward and optimizer": "update",
    "sync": "sync",
}


@dataclass
class Arm:
    """What was measured in all runs of one kind: seconds of each step, and per run what a step consists of."""

    steps: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, seconds: Sequence[float], parts: Mapping[str, float]) -> None:
        self.steps += seconds
        for name, value in parts.items():
            self.parts[name].append(value)

    @property
    def median(self) -> float:
        return statistics.median(self.steps)


def ratios(trl: Path, rounds: int = ROUNDS) -> dict[str, float]:
    """The goals' keys; prints what they are made of. ``trl`` is a Python that has TRL 1.16."""
    print(f"load average at the start: {os.getloadavg()[0]:.1f}")
    arms = {name: Arm() for name in (*MODES, TRL)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        for turn in range(rounds):
            for mode in MODES:
                arms[mode].add(*ours(folder, mode, f"{mode}-{turn}"))
                arms[TRL].add(*theirs(folder, trl))
    for name, arm in arms.items():
        print(
            f"  {name}: median {arm.median:.3f} s, {min(arm.steps):.3f} to {max(arm.steps):.3f}, {len(arm.steps)} steps"
        )
        parts = (f"{part} {statistics.median(values):.3f}" for part, values in arm.parts.items())
        print(f"    per step, s: {', '.join(parts)}")
    return {
        "step_vs_trl": arms["disaggregated"].median / arms[TRL].median,
        "step_vs_trl_colocated": arms["colocated"].median / arms[TRL].median,
    }


def make_inputs(folder: Path) -> None:
    """The demo's model, whose turns end with a token that it never says, and its prompts, for TRL and for ours."""
    disable_progress_bar()
    config = load_config("calculator")
    subprocess.run([RL_ASYNC, "sft", "--config", "calculator"], check=True, stdout=subprocess.DEVNULL)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    said, never = tokenizer.eos_token, tokenizer.pad_token
    ending = f"message.content + '{said}\\n'"
    if ending not in tokenizer.chat_template:
        sys.exit(f"the chat template of {config.model.path} does not end a turn with {ending}; make the model again")
    choice = f"message.content + ('{never}\\n' if message.role == 'assistant' else '{said}\\n')"
    tokenizer.chat_template = tokenizer.chat_template.replace(ending, choice)
    tokenizer.eos_token = never
    tokenizer.save_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / "model")
    assert isinstance(config.data.path, str)
    rows = parquet.read_table(config.data.path).select(["prompt", "reward_model"]).to_pylist()
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ours(folder: Path, mode: str, name: str) -> tuple[list[float], dict[str, float]]:
    """Seconds of the steps of one run, and the parts of a step."""
    reward = f"{Path(__file__).parent / 'processes' / 'step_reward.py'}:scored"
    overrides = [
        f"model.path={folder / 'model'}",
        "warm_start=null",
        "data.make=null",
        f"data.path={folder / 'prompts.jsonl'}",
        "data.eval_path=null",
        f"data.train_batch_groups={GROUPS}",
        "agent.loop=single_turn",
        "agent.tools=[]",
        f"rollout.group_size={GROUP_SIZE}",
        f"rollout.max_tokens={TOKENS}",
        f'reward.functions=[{{name: "{reward}"}}]',
        *MODES[mode],
        "algorithm.correction=bypass_ppo_clip",
        "trainer.minibatches=1",
        "trainer.learning_rate=1e-6",
        "trainer.checkpoint_every=0",
        f"trainer.steps={STEPS}",
        "eval.every=0",
        "launcher.threads=1",
        f"launcher.run_dir={folder}",
    ]
    command = [RL_ASYNC, "launch", "--mode", mode, "--config", "calculator", "--name", name, *overrides]
    used = watched(command, folder / name)
    metrics = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    if any(m["rollout/response_tokens_mean"] < TOKENS - MISSING for m in metrics):
        sys.exit(f"{mode}: too many rollouts have less than {TOKENS} tokens")
    ends, counted = [m["time"] for m in metrics[SKIPPED - 1 :]], metrics[SKIPPED:]
    parts = {part: statistics.median(m[f"time/{key}_s"] for m in counted) for part, key in PHASES.items()}
    parts["a rollout, from request to answer"] = statistics.median(generation(folder / name))
    return [b - a for a, b in pairwise(ends)], parts | used


def watched(command: Sequence[str], run: Path) -> dict[str, float]:
    """Run it to its end; processor seconds of each of the run's processes per step."""
    ticks: dict[int, Counter[str]] = {}
    log = run.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            done = lines(run / "metrics.jsonl")
            if SKIPPED <= done < STEPS and done not in ticks:
                listed = json.loads((run / "processes.json").read_text())
                ticks[done] = Counter()  # several engines or ranks count as one
                for entry in listed:
                    ticks[done][entry["role"]] += read_stat(entry["pid"]).cpu_ticks
            time.sleep(POLL_S)
    finally:
        process.terminate()
        process.wait(30)
    if process.returncode != 0 or lines(run / "metrics.jsonl") < STEPS:
        sys.exit(f"{' '.join(command)} ended early, with {process.returncode}:\n{log.read_text()[-2000:]}")
    first, last = min(ticks), max(ticks)
    return {
        f"processor of {role}": (ticks[last][role] - ticks[first][role]) / TICKS / (last - first)
        for role in ticks[first]
    }


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def generation(run: Path) -> list[float]:
    """Seconds that each counted rollout was with the engine."""
    files = sorted((run / "trajectories").glob("step-*.jsonl.gz"))[SKIPPED:]
    return [json.loads(line)["timings"]["generate"] for file in files for line in gzip.open(file, "rt")]


def theirs(folder: Path, trl: Path) -> tuple[list[float], dict[str, float]]:
    """Seconds of TRL's steps, and its processor time per step."""
    flags = {"steps": STEPS, "threads": TRL_THREADS, "groups": GROUPS, "group-size": GROUP_SIZE, "tokens": TOKENS}
    peer = str(Path(__file__).parent / "processes" / "trl_step.py")
    command = [str(trl), peer, str(folder / "model"), str(folder / "prompts.jsonl")]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    count = str(TRL_THREADS)
    settings = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}
    quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}
    done = subprocess.run(
        command, env=os.environ | settings | quiet, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    told = json.loads(done.stdout.splitlines()[-1])
    if told["tokens"] < TOKENS - MISSING:
        sys.exit(f"TRL: too many rollouts have less than {TOKENS} tokens")
    parts = {"processor": statistics.median(told["processor"][SKIPPED:])}
    return told["seconds"][SKIPPED - 1 :], parts

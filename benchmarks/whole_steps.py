"""Whole steps of ours and of TRL's GRPO, generation included: 256 rollouts of 32 tokens in one turn, the demo's model.

    python -m benchmarks.trainer --trl PYTHON --only step_vs_trl step_vs_trl_colocated

Ours are runs of ``rl-async launch``, from the end of one step to the end of the next; TRL's, in one process
(``trl_step.py``), likewise. They take turns. Same weights, prompts, reward and cores. TRL's process has two threads;
ours have one each: an engine and a trainer rank side by side (disaggregated, one step off-policy), or two engines and
two ranks in turns (colocated). One optimizer step on the whole batch, the clipped loss, no reference model;
log-probabilities are not computed again before it, neither by TRL nor by ours (``bypass_ppo_clip``).

``telemetry_overhead`` compares runs of ours, disaggregated, with and without telemetry, by the clock and by what the
processes compute, which other programs on the machine change less.

The model's turns end with a token that it hardly ever says (a chance of about 1e-5 where it could), so practically
every rollout has all of its tokens; ``MISSING`` bounds how many may be missing of one.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as parquet
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.processes.telemetry_peers import discarding_collector, scraped
from benchmarks.processes.whole_run import DIGITS, RL_ASYNC, Arm, make_endless, our_steps, run_trl
from rl_async.configs.load import load_config

GROUPS, GROUP_SIZE, TOKENS, TRL_THREADS = 32, 8, 32, 2
ROUNDS = 2
COUNTED = range(5, 20)  # the first steps are a warm-up
DEADLINE_S = 300
MODES = {
    "disaggregated": ["queue.max_staleness=1"],
    "colocated": ["queue.max_staleness=0", "rollout.engines=2", "trainer.ranks=2"],
}
TRL = "TRL"
TELEMETRY = ["tracking.prometheus=true", "tracking.backends=[tensorboard]"]
TELEMETRY_ROUNDS = 3


def ratios(
    trl: Path, modes: Sequence[str] = tuple(MODES), rounds: int = ROUNDS, counted: range = COUNTED
) -> dict[str, float]:
    """Seconds of a step of ours / of TRL's, by mode; prints what they are made of.

    ``trl`` is a Python that has TRL 1.16. Runs end after the ``counted`` steps. There is no ratio if a run of TRL takes
    longer than DEADLINE_S, as with its spinning threads on cores that others use; ours are measured all the same.
    """
    print(f"load average at the start: {os.getloadavg()[0]:.1f}")
    arms = {name: Arm() for name in (*modes, TRL)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        for turn in range(rounds):
            for mode in modes:
                arms[mode].add(*ours(folder, mode, f"{mode}-{turn}", counted))
                if TRL in arms:
                    try:
                        arms[TRL].add(*theirs(folder, trl, counted))
                    except subprocess.TimeoutExpired:
                        print(f"  {TRL}: {counted.stop} steps took more than {DEADLINE_S} s; not measured")
                        del arms[TRL]
    for name, arm in arms.items():
        print("\n".join(arm.lines(name)))
    return {mode: arms[mode].median / arms[TRL].median for mode in modes if TRL in arms}


class Overhead(NamedTuple):
    """What telemetry costs, as shares of what the same steps cost without it."""

    wall: float  # of the median step
    cpu: float  # of the processor seconds per step of all processes of a run, median over pairs of runs


def telemetry_overhead(rounds: int = TELEMETRY_ROUNDS) -> Overhead:
    """How much longer the median step is with all telemetry than without, and how much more the processes compute.

    On: TensorBoard, a collector that takes spans and throws them away, and scrapes of every process SCRAPE_EVERY_S
    apart. Runs with and without take turns, each first in half of the rounds. Exits if a process never answered a
    scrape, or the collector was sent nothing.
    """
    arms = {"off": Arm(), "on": Arm()}
    with tempfile.TemporaryDirectory() as name, discarding_collector() as collector:
        folder = Path(name)
        make_inputs(folder)
        for turn in range(rounds):
            for arm in sorted(arms, reverse=turn % 2 == 1):
                more = [*TELEMETRY, f"tracking.otlp_endpoint={collector.endpoint}"] if arm == "on" else []
                with scraped(folder / f"{arm}-{turn}") if more else nullcontext(Counter()) as answers:
                    arms[arm].add(*ours(folder, "disaggregated", f"{arm}-{turn}", more=more))
                if more and not collector.bodies:
                    sys.exit(f"{arm}-{turn}: the collector was sent no spans: there is nothing to compare")
                print(f"  {arm}: scrapes answered: {dict(answers)}; requests with spans: {len(collector.bodies)}")
                collector.bodies.clear()
    for name, arm in arms.items():
        print("\n".join(arm.lines(name)))
    on, off = arms["on"].processor(), arms["off"].processor()
    for name, seconds in (("off", off), ("on", on)):
        print(f"  {name}: processor of all processes per step, s: {', '.join(f'{s:.3f}' for s in seconds)}")
    cpu = statistics.median(a / b - 1 for a, b in zip(on, off, strict=True))
    return Overhead(arms["on"].median / arms["off"].median - 1, cpu)


def make_inputs(folder: Path) -> None:
    """The demo's model, whose turns end with a token that it never says, and its prompts, for TRL and for ours."""
    disable_progress_bar()
    config = load_config("calculator")
    subprocess.run([RL_ASYNC, "sft", "--config", "calculator"], check=True, stdout=subprocess.DEVNULL)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    said, never = tokenizer.eos_token, tokenizer.pad_token
    choice = f"message.content + ('{never}\\n' if message.role == 'assistant' else '{said}\\n')"
    make_endless(config.model.path, folder / "model", f"message.content + '{said}\\n'", choice, never)
    assert isinstance(config.data.path, str)
    rows = parquet.read_table(config.data.path).select(["prompt", "reward_model"]).to_pylist()
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ours(
    folder: Path, mode: str, name: str, counted: range = COUNTED, more: Sequence[str] = ()
) -> tuple[Sequence[float], dict[str, float]]:
    """Seconds of the steps of one run, and the parts of a step. ``more``: further overrides."""
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
        DIGITS,
        *MODES[mode],
        "algorithm.correction=bypass_ppo_clip",
        "trainer.minibatches=1",
        "trainer.learning_rate=1e-6",
        "trainer.checkpoint_every=0",
        f"trainer.steps={counted.stop}",
        "eval.every=0",
        "launcher.threads=1",
        *more,
    ]
    seconds, parts, _ = our_steps("calculator", mode, overrides, folder / name, counted, TOKENS, DEADLINE_S)
    return seconds, parts


def theirs(folder: Path, trl: Path, counted: range = COUNTED) -> tuple[list[float], dict[str, float]]:
    """Seconds of TRL's steps, and their parts."""
    model, prompts = folder / "model", folder / "prompts.jsonl"
    sizes = {
        "steps": counted.stop,
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "tokens": TOKENS,
        "pass_tokens": 1 << 20,
    }
    return run_trl(trl, model, prompts, TRL_THREADS, DEADLINE_S, **sizes).steps(counted, TOKENS)

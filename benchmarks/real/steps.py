"""Whole steps of preset ``smollm2`` beside TRL's GRPO, generation included, and the memory of the trainer in them.

Ours are runs of ``rl-async launch`` in both modes, each with two threads for the engine and two for the trainer, which
work at the same time (disaggregated, as ``make real`` runs the preset, one step off-policy) or in turns (colocated,
on-policy as TRL). The ratio is that of the faster mode; all are printed. TRL's one process has two threads, passes of
at most 1,024 tokens, and no gradient checkpointing (``processes/trl_step.py``). All: bfloat16 passes over
float32 weights, the same prompts, reward, learning rate and clipped loss, one optimizer step, no log-probabilities
computed before it (``bypass_ppo_clip``), and answers of 12 tokens: the model's turns end with a token that it never
says. Arms take turns. The first step of each run warms up; the last of ours is not counted, since nothing is sampled
beside it.

Memory is VmHWM of the trainer's process, all that it holds at once, also pages of libraries and files: a machine must
have it. The estimate is that of ``--dry-run`` for the same config, which counts them, too. It leaves out the host copy
of a checkpoint being written, and so does the ratio: it is taken until the last step but one, and the peak of the whole
run is printed.
"""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from benchmarks.processes.whole_run import DIGITS, INSTALL, Arm, Used, make_endless, our_steps, run_trl
from benchmarks.real.setting import Setting
from rl_async.agent_loop.toy_tasks import make_data
from rl_async.configs.load import load_config
from rl_async.launcher.plan.machine import plan_here

PRESET = "smollm2"
TOKENS, THREADS = 12, 2  # per answer; per process
MODES = {"disaggregated": ["queue.max_staleness=1"], "colocated": ["queue.max_staleness=0"]}
TRL = "TRL"
DEADLINE_S = 900
ENDING = "message['content'] + '<|im_end|>'"  # of a turn, in SmolLM2's chat template
NEVER = "<repo_name>"
CHOICE = f"message['content'] + ('{NEVER}' if message['role'] == 'assistant' else '<|im_end|>')"


@dataclass(frozen=True)
class Shape:
    """Rows of a step, tokens of a prompt (0: as the preset asks), and how many steps to measure in how many runs."""

    groups: int
    group_size: int
    prompt: int
    counted: int
    rounds: int


SHAPES = {
    "real_step_vs_trl": Shape(groups=8, group_size=8, prompt=0, counted=1, rounds=2),
    "real_step_vs_trl_long_prompts": Shape(groups=2, group_size=16, prompt=400, counted=1, rounds=1),
}


def step_vs_trl(name: str, setting: Setting) -> float | None:
    """Print what steps take, and return the ratio; None without TRL."""
    if not has_trl(setting):
        return None
    shape = SHAPES[name]
    print(f"  load average at the start: {os.getloadavg()[0]:.1f}", flush=True)
    arms = {arm: Arm() for arm in (*MODES, TRL)}
    with inputs(setting, shape) as folder:
        for turn in range(shape.rounds):
            for mode in MODES:
                seconds, parts, used = ours(folder, shape, mode, f"{mode}-{turn}")
                arms[mode].add(seconds, parts)
                print_memory(folder, shape, mode, used)
            arms[TRL].add(*theirs(folder, shape, setting.trl))
    for arm, measured in arms.items():
        print("\n".join(measured.lines(arm)))
    ratios = {mode: arms[mode].median / arms[TRL].median for mode in MODES}
    print("  " + ", ".join(f"{mode} / TRL {ratio:.3f}" for mode, ratio in ratios.items()))
    return min(ratios.values())


def has_trl(setting: Setting) -> bool:
    """Whether TRL can be measured; says what to do if not."""
    if Path(setting.trl).exists():
        return True
    print(f"TRL was not measured: no {setting.trl}; make one with {INSTALL}", file=sys.stderr)
    return False


@contextmanager
def inputs(setting: Setting, shape: Shape) -> Iterator[Path]:
    """A folder with ``model``, whose turns have no end, and ``prompts.jsonl``, for TRL and for ours."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_endless(setting.model, folder / "model", ENDING, CHOICE, NEVER)
        rows = sums(folder)
        if shape.prompt:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
            rows = [{**row, "prompt": lengthened(row["prompt"], shape.prompt, tokenizer)} for row in rows[:64]]
        write_lines(folder / "prompts.jsonl", rows)
        yield folder


def sums(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    """Return the preset's tasks, made in ``folder``."""
    make_data("sums", folder)
    return parquet.read_table(folder / f"{split}.parquet").select(["prompt", "reward_model"]).to_pylist()


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write tasks as JSON lines, which TRL's process reads, too."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def lengthened(prompt: list[dict[str, str]], tokens: int, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, str]]:
    """Put worked examples before the question, as many as it takes to make the prompt this long."""
    examples: list[str] = []
    while True:
        asked = "\n".join([*examples, prompt[-1]["content"]])
        messages = [*prompt[:-1], {"role": "user", "content": asked}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        if len(ids) >= tokens:
            return messages
        a, b = len(examples) * 7 % 90 + 10, len(examples) * 13 % 90 + 10
        examples.append(f"{a} + {b} equals {a + b}.")


def overrides_of(folder: Path, shape: Shape, mode: str, steps: int) -> list[str]:
    """Return what a run changes of the preset."""
    return [
        f"model.path={folder / 'model'}",
        "model.dtype=bfloat16",
        "data.make=null",
        f"data.path={folder / 'prompts.jsonl'}",
        "data.eval_path=null",
        f"data.train_batch_groups={shape.groups}",
        f"rollout.group_size={shape.group_size}",
        f"rollout.max_tokens={TOKENS}",
        f"rollout.max_model_len={max(128, shape.prompt + 64)}",
        f"agent.max_tokens={max(128, shape.prompt + 64)}",
        DIGITS,
        *MODES[mode],
        "algorithm.correction=bypass_ppo_clip",
        "trainer.checkpoint_every=0",
        f"trainer.steps={steps}",
        "eval.every=0",
        "eval.before=false",
        f"launcher.threads={THREADS}",
    ]


def ours(folder: Path, shape: Shape, mode: str, name: str) -> tuple[list[float], dict[str, float], Used]:
    """Seconds of the counted steps of one run, parts of a step, and what it used."""
    overrides = overrides_of(folder, shape, mode, 1 + shape.counted + 1)
    return our_steps(PRESET, mode, overrides, folder / name, range(1, 1 + shape.counted), TOKENS, DEADLINE_S)


def theirs(folder: Path, shape: Shape, trl: str) -> tuple[list[float], dict[str, float]]:
    """Seconds of TRL's steps, and their parts."""
    run = run_trl(
        trl,
        folder / "model",
        folder / "prompts.jsonl",
        THREADS,
        DEADLINE_S,
        steps=1 + shape.counted,
        groups=shape.groups,
        group_size=shape.group_size,
        tokens=TOKENS,
        dtype="bfloat16",
        learning_rate=load_config(PRESET).trainer.learning_rate,
    )
    return run.steps(range(1, 1 + shape.counted), TOKENS)


def print_memory(folder: Path, shape: Shape, mode: str, used: Used) -> float:
    """Print estimate and peaks of the trainer; return the ratio of the peak before the last step to the estimate."""
    config = load_config(PRESET, overrides_of(folder, shape, mode, 1))
    planned = plan_here(config, folder / "planned").processes
    estimate = next(spec.memory_bytes for spec in planned if spec.role == "trainer")
    assert estimate is not None
    peak, final = used.peak_bytes["trainer"], used.final_peak_bytes["trainer"]
    print(
        f"  {mode}: trainer estimated {estimate / 2**20:,.0f} MiB, peak {peak / 2**20:,.0f}, with the last checkpoint "
        f"{final / 2**20:,.0f}; ratio {peak / estimate:.3f}"
    )
    return peak / estimate


def memory_vs_estimate(setting: Setting) -> float:
    """Measure the disaggregated run of the shape of ``real_step_vs_trl``."""
    shape, mode = SHAPES["real_step_vs_trl"], "disaggregated"
    with inputs(setting, shape) as folder:
        return print_memory(folder, shape, mode, ours(folder, shape, mode, mode)[2])


KEYS: dict[str, Callable[[Setting], float | None]] = {
    **{name: functools.partial(step_vs_trl, name) for name in SHAPES},
    "real_memory_vs_estimate": memory_vs_estimate,
}

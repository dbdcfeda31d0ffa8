"""Seconds of training until SmolLM2 gets 0.85 on held-out sums: preset ``smollm2``, and TRL's GRPO at its best.

Both start from the same weights and have the same tasks, 64 answers a step, two threads per process, bfloat16 passes
over float32 weights, and the preset's learning rate. Ours is the preset as `make real` runs it (disaggregated, one step
off-policy, decoupled correction). TRL's settings are those of ``processes/trl_step.py``, in one process.

Both keep the weights after every step, and those are evaluated afterwards, both by the code below: every held-out task
of the preset, SAMPLES answers each at temperature 1 in bfloat16, scored as the preset scores. Time counts from the
beginning of the first step, its generation included, to the end of the step whose weights pass; start-up and evaluation
are not in it. Neither is saving in TRL's; in ours it is, since the engine samples on meanwhile.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from benchmarks.processes.whole_run import launch, run_trl
from benchmarks.real.setting import Setting
from benchmarks.real.steps import DEADLINE_S, PRESET, THREADS, has_trl, sums, write_lines
from rl_async.configs.load import load_config
from rl_async.extraction import last_number
from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.core import EngineCore, Sequence

GOAL = 0.85
STEPS = 9
SAMPLES = 4
SHOWN = 2  # evaluations after the one that passed


class Step(NamedTuple):
    """One step of an arm: when it ended, the reward that it trained with, and where its weights are."""

    seconds: float
    reward: float
    weights: Path


def time_to_reward(setting: Setting) -> float | None:
    """Print both curves and return the ratio of the times; None without TRL, or if one never passes."""
    if not has_trl(setting):
        return None
    print(f"  load average at the start: {os.getloadavg()[0]:.1f}", flush=True)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arms = {"ours": ours(setting, folder), "TRL": theirs(setting, folder)}
        evaluation = Evaluation(setting.model, sums(folder, "test"))
        print(f"  held out before: {evaluation(Path(setting.model)):.3f}")
        times = {arm: first_above(GOAL, arm, steps, evaluation) for arm, steps in arms.items()}
    passed = [seconds for seconds in times.values() if seconds is not None]
    return passed[0] / passed[1] if len(passed) == len(times) else None


def first_above(goal: float, arm: str, steps: list[Step], evaluate: Callable[[Path], float]) -> float | None:
    """Return the seconds after which the held-out reward was at least ``goal`` first; None: never. Prints the curve."""
    found: float | None = None
    left = SHOWN
    for number, step in enumerate(steps, 1):
        reward = evaluate(step.weights)
        trained = f"trained with {step.reward:.3f}"
        print(f"  {arm} step {number:2}, {step.seconds:5.0f} s: {trained}, held out {reward:.3f}", flush=True)
        if found is not None:
            left -= 1
        elif reward >= goal:
            found = step.seconds
        if not left:
            break
    print(f"  {arm}: {'never' if found is None else f'{found:.0f} s'} to {goal}")
    return found


def ours(setting: Setting, folder: Path) -> list[Step]:
    """Train by the preset; a checkpoint after every step."""
    sums(folder)
    overrides = [
        f"model.path={Path(setting.model).absolute()}",
        "model.dtype=bfloat16",
        "data.make=null",
        f"data.path={folder / 'train.parquet'}",
        "data.eval_path=null",
        "eval.every=0",
        "eval.before=false",
        "trainer.checkpoint_every=1",
        f"trainer.keep_checkpoints={STEPS}",
        f"trainer.steps={STEPS}",
        f"launcher.threads={THREADS}",
    ]
    run = folder / "ours"
    metrics, _ = launch(PRESET, "disaggregated", overrides, run, range(1, STEPS), DEADLINE_S)
    print(f"  ours: of {STEPS} steps {sum(m['time/checkpoint_s'] for m in metrics):.0f} s copied weights to be saved")
    began = metrics[0]["time"] - metrics[0]["time/step_s"]
    saved = run / "checkpoints"
    return [
        Step(m["time"] - began, m["reward/mean"], saved / f"step-{number:06d}" / "model")
        for number, m in enumerate(metrics, 1)
    ]


def theirs(setting: Setting, folder: Path) -> list[Step]:
    """Train by TRL, saving the model after every step."""
    config, saved = load_config(PRESET), folder / "trl"
    prompts = folder / "prompts.jsonl"
    write_lines(prompts, sums(folder))
    run = run_trl(
        setting.trl,
        Path(setting.model),
        prompts,
        THREADS,
        DEADLINE_S,
        steps=STEPS,
        groups=config.data.train_batch_groups,
        group_size=config.rollout.group_size,
        tokens=config.rollout.max_tokens,
        dtype="bfloat16",
        learning_rate=config.trainer.learning_rate,
        reward="right",
        save=saved,
    )
    return [
        Step(seconds, reward, saved / str(number))
        for number, (seconds, reward) in enumerate(zip(run.ends, run.rewards, strict=True), 1)
    ]


class Evaluation:
    """Mean reward of a model's sampled answers to ``tasks``; the same random numbers for every model."""

    def __init__(self, tokenizer: str, tasks: list[dict[str, Any]]) -> None:
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer)
        self._prompts = [
            self._tokenizer.apply_chat_template(task["prompt"], add_generation_prompt=True, return_dict=False)
            for task in tasks
        ]
        self._truths = [task["reward_model"]["ground_truth"] for task in tasks]
        self._config = load_config(PRESET)

    def __call__(self, weights: Path) -> float:
        torch.set_num_threads(THREADS)
        model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16, attn_implementation="sdpa")
        core = EngineCore(model.eval(), max_batch=len(self._prompts) * SAMPLES, max_length=128)
        sampling = Sampling(temperature=self._config.eval.temperature)
        stop, most = frozenset([self._tokenizer.eos_token_id]), self._config.rollout.max_tokens
        rows = [
            Sequence(f"{n}.{i}", list(ids), sampling, most, stop, seed=n * SAMPLES + i, deliver=lambda _: None)
            for n, ids in enumerate(self._prompts)
            for i in range(SAMPLES)
        ]
        for row in rows:
            core.add(row)
        while core.unfinished:
            core.step()
        answers = [self._tokenizer.decode(row.sampled, skip_special_tokens=True) for row in rows]
        truths = [truth for truth in self._truths for _ in range(SAMPLES)]
        return sum(last_number(a) == truth for a, truth in zip(answers, truths, strict=True)) / len(rows)


KEYS: dict[str, Callable[[Setting], float | None]] = {"real_time_to_reward_vs_trl": time_to_reward}

"""TRL's GRPO, in one process: the peer of ``whole_run.py``. Runs in a Python that has TRL and no rl-async installed.

    python -m benchmarks.processes.trl_step MODEL PROMPTS --steps N --threads N --groups N --group-size N --tokens N

PROMPTS are lines of JSON with ``prompt``, chat messages, and ``reward_model``, which has the ``ground_truth``. Prints
the fields of ``whole_run.TrlRun`` as one line of JSON at the end. ``--save FOLDER`` saves the model there after each
step, as 1, 2 and so on, off the clock.

The settings are those that make TRL fast on a CPU: all rows are sampled at once, passes have about ``--pass-tokens``
(a step on SmolLM2 takes 31 s with passes of 16 rows of 50 tokens, and 40 s with all 64 in one), no gradient
checkpointing, no reference model, no log-probabilities before the step (``num_iterations=1``), no saving.
"""

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from step_reward import digits
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from rl_async.extraction import last_number  # imports nothing that is not there


class Clock(TrainerCallback):
    """Notes when each of TRL's steps ended, without the time of saving the model."""

    def __init__(self, save: Path | None) -> None:
        self.save = save
        self.began = self.saving = 0.0
        self.ends: list[float] = []
        self.used: list[float] = []
        self.generating: list[float] = []
        self.step_began = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Note when generation begins, the first part of a step."""
        self.step_began = time.perf_counter()

    def timed(self, reward: Callable[..., list[float]]) -> Callable[..., list[float]]:
        """Return the reward function, which is called when generation has ended."""

        def scored(**kwargs: Any) -> list[float]:
            self.generating.append(time.perf_counter() - self.step_began)
            return reward(**kwargs)

        return scored

    def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
        """Note the time; TRL's trainer calls this after every step."""
        ended = time.perf_counter()
        self.ends.append(ended - self.began - self.saving)
        self.used.append(time.process_time())
        if self.save is not None:
            model.save_pretrained(self.save / str(len(self.ends)))
            self.saving += time.perf_counter() - ended


def share_of_digits(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """Of each completion, a conversation of one message."""
    return [digits(messages[0]["content"]) for messages in completions]


def right_number(completions: list[list[dict[str, str]]], ground_truth: list[str], **kwargs: Any) -> list[float]:
    """As ``exact_answer`` with ``extract: [last_number]`` scores."""
    said = [last_number(messages[0]["content"]) for messages in completions]
    return [float(number == truth) for number, truth in zip(said, ground_truth, strict=True)]


def reasoning_gym(
    completions: list[list[dict[str, str]]],
    ground_truth: list[str],
    completion_ids: list[list[int]],
    end: int,
    **kwargs: Any,
) -> list[float]:
    """As the environment ``reasoning_gym:basic_arithmetic`` scores: an answer that was cut off is worth 0.

    ``end`` is the token that ends a turn.
    """
    # The package is needed for this reward alone.
    from reasoning_gym import create_dataset
    from reasoning_gym.utils import extract_answer

    dataset = create_dataset("basic_arithmetic", size=1)
    said = [messages[0]["content"] for messages in completions]
    return [
        float(dataset.score_answer((extract_answer(text) or text).strip(), {"answer": truth})) * (ids[-1] == end)
        for text, truth, ids in zip(said, ground_truth, completion_ids, strict=True)
    ]


REWARDS = {"digits": share_of_digits, "right": right_number, "reasoning_gym": reasoning_gym}


def rows_per_pass(rows: int, tokens: int, most: int) -> int:
    """Return how many of ``rows`` with so many tokens each go into a pass of at most ``most``: a power of two."""
    while rows % 2 == 0 and rows * tokens > most:
        rows //= 2
    return rows


def config(arguments: argparse.Namespace, folder: str, rows: int) -> GRPOConfig:
    """One optimizer step per batch of rollouts, no reference model, and nothing that costs time and can be left out.

    ``rows`` is how many go into a pass.
    """
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=arguments.groups * arguments.group_size // rows,  # all are sampled at once
        num_generations=arguments.group_size,
        max_completion_length=arguments.tokens,
        max_steps=arguments.steps,
        loss_type="grpo",
        beta=0.0,
        temperature=1.0,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,  # the default recomputes the forward pass
        bf16=arguments.dtype == "bfloat16",  # passes, over float32 weights
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        shuffle_dataset=False,
        seed=arguments.seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    for name in ("steps", "threads", "groups", "group-size", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--reward", default="digits", choices=REWARDS)
    parser.add_argument("--pass-tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    lines = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    tasks = [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in lines]
    clock = Clock(arguments.save)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompt = tokenizer.apply_chat_template(tasks[0]["prompt"], add_generation_prompt=True, return_dict=False)
    each = len(prompt) + arguments.tokens
    rows = rows_per_pass(arguments.groups * arguments.group_size, each, arguments.pass_tokens)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=clock.timed(functools.partial(REWARDS[arguments.reward], end=tokenizer.eos_token_id)),
            args=config(arguments, folder, rows),
            train_dataset=Dataset.from_list(tasks),
            callbacks=[clock],
        )
        trainer.train()
    logged = {
        name: [entry[key] for entry in trainer.state.log_history if key in entry]
        for name, key in (
            ("tokens", "completions/mean_length"),
            ("rewards", "reward"),
        )
    }
    print(
        json.dumps({"ends": clock.ends, "processor": clock.used, "generating": clock.generating} | logged), flush=True
    )


if __name__ == "__main__":
    main()

"""TRL's GRPO step, in one process: the peer of ``whole_steps.py``. Runs in a Python that has TRL and no rl-async.

    python -m benchmarks.processes.trl_step MODEL PROMPTS --steps N --threads N --groups N --group-size N --tokens N

PROMPTS are lines of JSON with ``prompt``, chat messages. Prints one line of JSON at the end: the seconds of every step
but the first, from the end of one to the end of the next, those of the processor, and the mean number of tokens of a
completion.
"""

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from step_reward import digits
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Records when each of TRL's steps ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.used: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the time; TRL's trainer calls this after every step."""
        self.ends.append(time.perf_counter())
        self.used.append(time.process_time())


def reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """Of each completion, a conversation of one message."""
    return [digits(messages[0]["content"]) for messages in completions]


def config(arguments: argparse.Namespace, folder: str) -> GRPOConfig:
    """One optimizer step per batch of rollouts, no reference model, and nothing that costs time and can be left out."""
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=arguments.groups * arguments.group_size,
        num_generations=arguments.group_size,
        max_completion_length=arguments.tokens,
        max_steps=arguments.steps,
        loss_type="grpo",
        beta=0.0,
        temperature=1.0,
        learning_rate=1e-6,
        gradient_checkpointing=False,  # the default recomputes the forward pass
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    for name in ("steps", "threads", "groups", "group-size", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    rows = [{"prompt": json.loads(line)["prompt"]} for line in arguments.prompts.read_text().splitlines()]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            reward_funcs=reward,
            args=config(arguments, folder),
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
        )
        trainer.train()
    key = "completions/mean_length"
    lengths = [entry[key] for entry in trainer.state.log_history if key in entry]
    seconds, processor = ([b - a for a, b in pairwise(times)] for times in (clock.ends, clock.used))
    print(json.dumps({"seconds": seconds, "processor": processor, "tokens": sum(lengths) / len(lengths)}), flush=True)


if __name__ == "__main__":
    main()

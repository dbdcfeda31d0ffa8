"""SPIN (arXiv:2401.01335): a model learns to prefer the answers of a data set to its own, again and again.

Each iteration samples an answer to every prompt from the model of the one before, pairs it with the answer in the data,
and trains on the pairs by ``rl-async dpo``, whose reference is the model that it starts from. No reward is needed, and
no judge. The iterations end when most of the samples equal the data.

    python examples/spin.py --model models/sft --data demos.jsonl --out models/spin --iterations 3
    python examples/spin.py --model models/sft --data demos.jsonl --out models/spin finetune.learning_rate=5e-7

OUT/1, OUT/2, ... are the models, OUT/1.jsonl, ... the pairs. An iteration whose model is there is not repeated.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_async.agent_loop.chat_formats.format_registry import end_tokens
from rl_async.errors import DataError
from rl_async.messages import Sampling
from rl_async.rollout_server.embedded import core
from rl_async.transfer_queue.dataset import open_rows

ANSWER = {"role": "assistant"}


def turns(data: str, most: int) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """Yield each assistant turn of the first ``most`` conversations with the messages before it.

    Raises DataError, naming the row, for a row that is not a conversation of texts with an answer.
    """
    for number, row in enumerate(islice(open_rows(data), most)):
        messages = row.get("messages")
        if not isinstance(messages, list) or not any(message.get("role") == "assistant" for message in messages):
            raise DataError(f"{data}, row {number}: no conversation with an answer in the column messages")
        if not all(isinstance(message.get("content"), str) for message in messages):
            raise DataError(f"{data}, row {number}: SPIN compares texts, and a message has another content")
        for place, message in enumerate(messages):
            if message["role"] == "assistant" and place:
                yield messages[:place], message["content"]


def sampled(folder: Path, prompts: Sequence[list[dict[str, Any]]], *, tokens: int, seed: int) -> list[str]:
    """Sample an answer of at most ``tokens`` tokens to each prompt at temperature 1, on the embedded engine."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=core.ATTENTION).eval()
    ends = frozenset([*end_tokens(folder), tokenizer.eos_token_id])
    sequences = [
        core.Sequence(
            request_id=str(number),
            tokens=tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"],
            sampling=Sampling(),
            max_tokens=tokens,
            stop_token_ids=ends,
            seed=seed + number,
            deliver=lambda _: None,
        )
        for number, prompt in enumerate(prompts)
    ]
    longest = max(len(sequence.tokens) for sequence in sequences)
    engine = core.EngineCore(model, max_batch=64, max_length=longest + tokens + 1)
    for sequence in sequences:
        engine.add(sequence)
    while engine.unfinished:
        engine.step()
    return [tokenizer.decode(sequence.sampled, skip_special_tokens=True).strip() for sequence in sequences]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", required=True, help="conversations, as `rl-async sft` takes them")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=1000, help="of the data, the first so many")
    parser.add_argument("--tokens", type=int, default=256, help="longest sampled answer")
    parser.add_argument("override", nargs="*", help="further settings of `rl-async dpo`, as a.b=c")
    arguments = parser.parse_args()
    answered = list(turns(arguments.data, arguments.conversations))
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = arguments.model
    for iteration in range(1, arguments.iterations + 1):
        target, pairs = arguments.out / str(iteration), arguments.out / f"{iteration}.jsonl"
        if not target.is_dir():
            prompts = [prompt for prompt, _ in answered]
            own = sampled(model, prompts, tokens=arguments.tokens, seed=iteration * len(answered))
            # A pair of equal answers has no gradient, and `rl-async dpo` takes no empty ones.
            rows = [
                {"prompt": prompt, "chosen": [ANSWER | {"content": answer}], "rejected": [ANSWER | {"content": ours}]}
                for (prompt, answer), ours in zip(answered, own, strict=True)
                if ours and ours != answer.strip()
            ]
            print(f"iteration {iteration}: {len(rows)} of {len(own)} samples differ from the data", flush=True)
            if not rows:
                return 0
            pairs.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            command = ["dpo", "--model", str(model), "--data", str(pairs), "--out", str(target), *arguments.override]
            subprocess.run([str(Path(sys.executable).with_name("rl-async")), *command], check=True)
        model = target
    return 0


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())

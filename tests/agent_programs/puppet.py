"""Makes a tiny model that takes part in any agent program: it calls one tool with a digit, then gives a last answer.

Its layers see a window of tokens, so it says the same however long a program's instructions are. Which digit it takes,
and now and then whether it calls at all, is left to chance: there is something to learn. A larger model can be taught
the same.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rl_async.agent_loop.chat_formats.format import CALL_END, CALL_START, render_hermes
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.configs.schema.data import WarmStartConfig
from rl_async.files import written_whole
from rl_async.launcher.runs.tiny_model import TokenRow, warm_start

ROOT = Path(__file__).parents[2]
CONTEXT = 65536
WINDOW = 32  # tokens; with two layers a token depends on twice as many
VOCABULARY = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = (CALL_START, CALL_END, "<tool_response>", "</tool_response>", "<think>", "</think>")
OBEYS = 0.7  # of the turns it learns; else it ends at once, or calls once more
SHARPER = 2.0  # than it learned: it obeys in 0.84 of its turns, and seldom says anything else
SETTINGS = WarmStartConfig(demos_path="", batch_size=8, min_steps=150, check_every=25, max_steps=600, gate=0.96)
BASE_SETTINGS = WarmStartConfig(
    demos_path="", learning_rate=5e-4, batch_size=4, min_steps=20, check_every=10, max_steps=200, gate=0.96
)

# Qwen's layout. Only a policy that thinks has REASONING: calls are not forced upon one whose template has a thought.
REASONING = """\
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif -%}
"""
TEMPLATE = """\
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
{{ '# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{{ '\\n</tools>\\n\\nCall one as <tool_call>{\"name\": NAME, \"arguments\": OBJECT}</tool_call><|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- elif not (tools and loop.first and message.role == 'system') -%}
{{ '<|im_start|>' + message.role + '\\n' }}
REASONING{{- message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""


@dataclass(frozen=True)
class Lines:
    """What the model says to one program. N stands for its digit.

    ``shown`` is how the program tells the model a tool's result, if it does not do so as one.
    """

    tool: str = "show"
    arguments: str = '{"digit": N}'
    last: str = "N"
    last_tool: str = ""  # if the last answer is a call, too, with ``last`` as its arguments
    shown: str = ""
    thinks: bool = False

    @property
    def name(self) -> str:
        """The name of the folder of its model, which differs from that of other lines."""
        return f"{self.tool}-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"

    def first_answer(self, digit: int) -> str:
        return self._thought(digit) + render_hermes(self.tool, with_digit(self.arguments, digit))

    def last_answer(self, digit: int) -> str:
        text = with_digit(self.last, digit)
        return self._thought(digit) + (render_hermes(self.last_tool, text) if self.last_tool else text)

    def _thought(self, digit: int) -> str:
        return f"<think>\nI take {digit}.\n</think>\n\n" if self.thinks else ""


def with_digit(text: str, digit: int | str) -> str:
    """Put the digit in the place of N, where it is a word of its own."""
    return re.sub(r"\bN\b", lambda _: str(digit), text)


def make_puppet(lines: Lines, folder: Path, base: Path | None = None) -> None:
    """Train a tiny model, or the one in ``base``, to say ``lines`` and write it to ``folder``.

    Raises UserError if it does not learn them.
    """
    torch.manual_seed(0)
    tokenizer = make_tokenizer(lines) if base is None else AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = template(lines)
    model = make_model(tokenizer) if base is None else AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = SETTINGS if base is None else BASE_SETTINGS
    renderer, rng = ChatRenderer(tokenizer), random.Random(0)
    rows = [renderer.demo_row(conversation(lines, rng)) for _ in range(600)]
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    warm_start(model, rows[32:], lambda: obedience(model, rows[:32], digits), settings, print)
    with torch.no_grad():
        model.model.norm.weight.mul_(SHARPER)
    disable_progress_bar()  # the file is written in milliseconds
    with written_whole(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return the tiny model, untrained."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=["sliding_attention"] * 2,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def conversation(lines: Lines, rng: random.Random) -> list[dict[str, Any]]:
    """Return a demonstration: something is said, the model calls, something is shown, the model answers."""

    def said(first: bool) -> dict[str, str]:
        answer = lines.first_answer if first == (rng.random() < OBEYS) else lines.last_answer
        return {"role": "assistant", "content": answer(rng.randrange(10))}

    result = str(rng.randrange(10)) if rng.random() < 0.5 else passage(rng)
    shown = {"role": "user", "content": with_digit(lines.shown, result)} if lines.shown else None
    remark = {"role": "system", "content": passage(rng)}  # behind the question, as Claude Code has one
    return [
        {"role": "user", "content": passage(rng)},
        *([remark] if rng.random() < 0.3 else []),
        said(True),
        shown or {"role": "tool", "content": result},
        said(False),
    ]


def passage(rng: random.Random) -> str:
    """Return a few words of the documentation."""
    text = corpus()[rng.randrange(len(corpus()))]
    at = rng.randrange(len(text))
    return text[at : at + rng.randrange(1, 60)].strip() or "?"


@cache
def corpus() -> Sequence[str]:
    return [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]


def obedience(model: torch.nn.Module, rows: Sequence[TokenRow], digits: list[int]) -> float:
    """Return the share of learned tokens but digits, which are up to chance, that the model thinks likeliest."""
    right = total = 0
    for ids, learned in rows:
        tokens = torch.tensor([ids])
        mask = torch.tensor(learned[1:]) & ~torch.isin(tokens[0, 1:], torch.tensor(digits))
        with torch.no_grad():
            likeliest = model(input_ids=tokens).logits[0, :-1].argmax(-1)
        right += int((likeliest == tokens[0, 1:])[mask].sum())
        total += int(mask.sum())
    return right / total


def template(lines: Lines) -> str:
    """Return the chat template."""
    return TEMPLATE.replace("REASONING", REASONING if lines.thinks else "")


def make_tokenizer(lines: Lines) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer for any text on the documentation."""
    tokenizer = Tokenizer(models.BPE())
    digits, text = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, text])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIAL, *TAGS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        chat_template=template(lines),
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )

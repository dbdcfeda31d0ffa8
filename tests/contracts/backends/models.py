"""Tiny random models of every family, the batches that backends are asked about, and what they must answer."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers import models as tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.backend import ADAM_BETA1, LossFn, Outputs
from rl_async.trainer.packing import Tensors, collate
from tests.conftest import VOCAB, make_rows
from tests.support.rounding import assert_trained_alike, in_float64, pass_rounding, to_float64

TRAINING = TrainerConfig(learning_rate=2e-4, minibatches=1, steps=10, weight_decay=0.1, grad_clip=0.5)
STEPS = 2
ROWS = 8
# The longest sums are those of gradients, over all tokens of the batch.
TERMS = sum(len(row.token_ids) for row in make_rows(0)[:ROWS])
ENTROPY = 0.05
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LAYERS = 6  # of the deepest
# Of losses and norms, for a magnitude of 1.
ROUNDED = pass_rounding(1.0, LAYERS, TERMS, backward=True)
assert_alike = functools.partial(assert_trained_alike, rate=TRAINING.learning_rate, layers=LAYERS, terms=TERMS)
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "vocab_size": VOCAB + 1}),
    "qwen3-deep": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "num_hidden_layers": 6}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    # Two ranks of FSDP2 divide the rows of these experts, not the experts.
    "qwen3-moe-odd": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}


def make_model(family: str, folder: Path) -> None:
    """A few layers, grouped queries, and numbers large enough to tell formulas apart; an odd vocabulary when tied."""
    torch.manual_seed(0)
    kind, config, special = FAMILIES[family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    model = kind(config(**(sizes | special)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(3)
    model.save_pretrained(folder)
    words = Tokenizer(tokenizers.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0").save_pretrained(folder)


def micro_batches(rows: Sequence[int]) -> list[Tensors]:
    """These rows of the test batch, two at a time."""
    made = make_rows(0)
    return [collate([made[i] for i in rows[at : at + 2]], device="cpu") for at in range(0, len(rows), 2)]


def cell_rows(rank: int, size: int) -> list[int]:
    """The rows of the batch that a data-parallel rank trains."""
    return list(range(ROWS))[rank::size]


def loss_of(batches: Sequence[Tensors]) -> LossFn:
    """A policy gradient and an entropy bonus, divided by the tokens of the whole batch."""
    count = sum(int(batch.mask.sum()) for batch in micro_batches(range(ROWS)))

    def loss_fn(number: int, outputs: Outputs) -> Tensor:
        mask, age = batches[number].mask, batches[number].lengths - 12
        assert outputs.logprobs is not None and outputs.entropy is not None
        per_token = -outputs.logprobs * age[:, None] / 4 - ENTROPY * outputs.entropy
        return torch.where(mask, per_token, 0.0).sum() / count

    return loss_fn


@dataclass(frozen=True)
class Expected:
    """What a plain Hugging Face model and ``torch.optim.AdamW`` in one process say."""

    imported: dict[str, Tensor]
    logprobs: Tensor
    entropy: Tensor
    sum_squares: Tensor
    losses: list[float]
    norms: list[float]
    trained: dict[str, Tensor]


def expect(folder: Path, out: Path) -> tuple[Expected, Expected]:
    """Forward, and ``STEPS`` steps on the whole batch, in float32 and in float64."""
    plain = trained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), folder, out / "plain")
    exactly = to_float64(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    return plain, trained(exactly, folder, out / "exact", in_float64)


def trained(
    model: Any, folder: Path, out: Path, computing: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Expected:
    """What this model of the folder says and learns."""
    (whole,) = whole_batch()
    with torch.no_grad(), computing():
        before = outputs_of(model, whole)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=TRAINING.learning_rate,
        betas=(ADAM_BETA1, TRAINING.beta2),
        weight_decay=TRAINING.weight_decay,
    )
    losses, norms = [], []
    for _ in range(STEPS):
        batches = micro_batches(range(ROWS))
        optimizer.zero_grad()
        with computing():
            each = [loss_of(batches)(n, outputs_of(model, batch)) for n, batch in enumerate(batches)]
            loss = torch.stack(each).sum()
            loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), TRAINING.grad_clip).item())
        losses.append(loss.item())
        optimizer.step()
    model.save_pretrained(out)
    assert before.logprobs is not None and before.entropy is not None and before.sum_squares is not None
    return Expected(
        imported=load_file(folder / "model.safetensors"),
        logprobs=before.logprobs,
        entropy=before.entropy,
        sum_squares=before.sum_squares,
        losses=losses,
        norms=norms,
        trained=load_file(out / "model.safetensors"),
    )


def whole_batch() -> list[Tensors]:
    """All rows in one micro-batch, at a temperature."""
    batch = collate(make_rows(0)[:ROWS], device="cpu")
    batch.temperature = torch.linspace(0.7, 1.3, ROWS)[:, None, None]
    return [batch]


def outputs_of(model: Any, batch: Tensors) -> Outputs:
    """What a plain model says, from all its logits at once."""
    log_pi = (model(input_ids=batch.tokens).logits[:, :-1] / batch.temperature).log_softmax(-1)
    return Outputs(
        logprobs=log_pi.gather(2, batch.tokens[:, 1:, None]).squeeze(2),
        entropy=-(log_pi.exp() * log_pi).sum(-1),
        sum_squares=log_pi.exp().square().sum(-1),
    )

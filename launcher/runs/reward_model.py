"""``rl-async reward-model``: trains a reward model on preference pairs, starting from a model folder."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from rl_async.agent_loop.training_data import Pair, read_pairs
from rl_async.errors import DataError, TrainingDiverged, UserError
from rl_async.files import written_whole
from rl_async.reward_loop.scorers.reward_model import ConversationEncoder, load_tokenizer
from rl_async.reward_loop.server.app import longest, score, values
from rl_async.torch_shared import pick_device

REPORTS = 10
# Share of the steps over which the learning rate rises.
WARMUP = 0.1
GRAD_CLIP = 1.0


class TokenPair(NamedTuple):
    """Token ids of two conversations; the first is better by at least ``margin``."""

    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


@dataclass(frozen=True)
class PairTraining:
    """Settings of a training with ``batch_size`` pairs per step.

    The learning rate rises over the first tenth of the steps, then falls linearly to 0.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    seed: int


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """Return the mean of -log sigmoid(chosen - rejected - margin), a scalar, from float32 [B] each.

    The negative log-likelihood of the preferences under Bradley and Terry's model, as in InstructGPT
    (arXiv:2203.02155, equation 1) with the margin of Llama 2 (arXiv:2307.09288, equation 2).
    """
    return -logsigmoid(chosen - rejected - margin).mean()


def train_pairs(
    model: torch.nn.Module, pairs: Sequence[TokenPair], how: PairTraining, report: Callable[[str], None]
) -> None:
    """Train ``model``, a sequence classifier with one label; ``report`` gets lines of text.

    Raises TrainingDiverged when the gradient norm is not finite.
    """
    draw = random.Random(how.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    per_epoch = -(-len(pairs) // how.batch_size)
    steps = how.epochs * per_epoch
    model.train()
    order: list[TokenPair] = []
    for step in range(steps):
        if step % per_epoch == 0:
            order = draw.sample(pairs, len(pairs))
        start = step % per_epoch * how.batch_size
        for group in optimizer.param_groups:
            group["lr"] = how.learning_rate * _scale(step, steps)
        loss, right = _loss(model, order[start : start + how.batch_size])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        if not torch.isfinite(norm):
            raise TrainingDiverged(
                f"step {step}: loss {loss.item():g}, gradient norm {norm.item():g}; nothing is saved"
            )
        optimizer.step()
        if (step + 1) % max(1, steps // REPORTS) == 0 or step + 1 == steps:
            report(f"{step + 1} of {steps} steps: loss {loss.item():.4f}, accuracy in the batch {right:.2f}")
    model.eval()


def _scale(step: int, steps: int) -> float:
    warmup = max(1, round(WARMUP * steps))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup), 1.0)


def _loss(model: torch.nn.Module, batch: Sequence[TokenPair]) -> tuple[Tensor, float]:
    """Return the loss, and the share of pairs in the right order."""
    rewards = values(model, [pair.chosen for pair in batch] + [pair.rejected for pair in batch])
    chosen, rejected = rewards[: len(batch)], rewards[len(batch) :]
    margin = torch.tensor([pair.margin for pair in batch], device=rewards.device)
    return bradley_terry(chosen, rejected, margin), (chosen > rejected).float().mean().item()


def accuracy(model: torch.nn.Module, pairs: Sequence[TokenPair], batch_size: int) -> float:
    """Return the share of pairs whose chosen conversation has the higher reward; a tie counts as wrong."""
    right = 0
    for start in range(0, len(pairs), batch_size):
        batch = pairs[start : start + batch_size]
        rewards = score(model, [pair.chosen for pair in batch] + [pair.rejected for pair in batch])
        right += sum(better > worse for better, worse in zip(rewards, rewards[len(batch) :]))
    return right / len(pairs)


# Stands beside the weights and records their accuracy.
RECORD_FILE = "reward_model.json"
Report = Callable[[str], None]


@dataclass(frozen=True)
class RewardModelJob:
    """The arguments of ``rl-async reward-model``."""

    pairs: str
    model: str
    out: Path
    epochs: int
    batch_size: int
    learning_rate: float
    margin: float
    held_out: float
    seed: int
    device: str
    threads: int


def make_reward_model(job: RewardModelJob, report: Report) -> float:
    """Train and save a reward model; return its accuracy on held-out pairs. Raises UserError and TrainingDiverged."""
    _check(job)
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    disable_progress_bar()
    pairs = read_pairs(job.pairs)
    tokenizer = load_tokenizer(job.model, "--model")
    model = _load(job.model).to(pick_device(job.device))
    train, held_out = split(pairs, job.held_out, job.seed)
    limit = longest(model)

    encoder = ConversationEncoder(tokenizer)

    def tokens(part: Sequence[Pair]) -> list[TokenPair]:
        return [_to_tokens(pair, encoder, limit, job.margin) for pair in part]

    train_rows, held_rows = tokens(train), tokens(held_out)
    report(f"{len(train_rows)} pairs to train on, {len(held_rows)} held out")
    before = accuracy(model.eval(), held_rows, job.batch_size)
    how = PairTraining(job.epochs, job.batch_size, job.learning_rate, job.seed)
    train_pairs(model, train_rows, how, report)
    after = accuracy(model, held_rows, job.batch_size)
    record = {"pairs": job.pairs, "trained": len(train_rows), "held_out": len(held_rows), "accuracy": after}
    _save(job.out, model, tokenizer, record)
    report(f"accuracy on {len(held_rows)} held-out pairs: {before:.4f} before, {after:.4f} after")
    report(f"saved to {job.out}")
    return after


def split(pairs: Sequence[Pair], share: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Split pairs by prompt into training and held-out ones. Raises DataError if none is left to train on."""
    prompts = sorted({pair.prompt for pair in pairs})
    random.Random(seed).shuffle(prompts)
    kept = set(prompts[: max(1, round(share * len(prompts)))])
    train = [pair for pair in pairs if pair.prompt not in kept]
    held_out = [pair for pair in pairs if pair.prompt in kept]
    if not train:
        raise DataError(f"--held-out: {len(prompts)} different prompts leave nothing to train on; give more pairs")
    return train, held_out


def _check(job: RewardModelJob) -> None:
    if job.out.exists():
        raise UserError(f"--out: {job.out} exists; delete it, or choose another folder")
    if not 0 < job.held_out < 1:
        raise UserError(f"--held-out: needs a share between 0 and 1, got {job.held_out:g}")
    for name in ("epochs", "batch_size", "learning_rate", "threads"):
        if getattr(job, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')}: must be above 0, got {getattr(job, name):g}")


def _load(path: str) -> Any:
    """Load a sequence classifier in float32, since small updates vanish in bfloat16. A causal LM gets a new head."""
    try:
        return AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
    # A head of another size raises RuntimeError.
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"--model: cannot load {path} as a sequence classifier with one label: {reason}") from error


def _to_tokens(pair: Pair, encoder: ConversationEncoder, limit: int | None, margin: float) -> TokenPair:
    rows = []
    for column, messages in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        ids = encoder.ids(messages)
        if limit is not None and len(ids) > limit:
            raise DataError(f"{pair.place}, column {column}: {len(ids)} tokens; the model takes {limit}")
        rows.append(ids)
    return TokenPair(rows[0], rows[1], margin if pair.margin is None else pair.margin)


def _save(path: Path, model: Any, tokenizer: Any, record: dict[str, Any]) -> None:
    """Write the model folder, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Training padded with other tokens, so the saved config must name the tokenizer's own.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    with written_whole(path) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / RECORD_FILE).write_text(json.dumps(record) + "\n")

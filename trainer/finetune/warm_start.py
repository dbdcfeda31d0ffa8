"""Supervised warm start of the tiny model: trains until greedy reward on held-out tasks passes a gate."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rl_async.configs.schema.data import WarmStartConfig
from rl_async.errors import UserError
from rl_async.trainer.images import Images, embedded

WARMUP_STEPS = 30
IGNORED = -100
# Token ids, and for each whether it is learned.
TokenRow = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class WarmStartResult:
    """Steps taken, the greedy reward that passed the gate, and the wall time in seconds."""

    steps: int
    gate_reward: float
    seconds: float


class Plateau:
    """Halves the learning rate when greedy reward has not risen for ``PATIENCE`` checks.

    It waits until the model copies at all, since before that a lower rate only delays the jump. A model whose greedy
    reward reaches ``COPIES`` does.
    """

    PATIENCE = 3
    COPIES = 0.3

    def __init__(self) -> None:
        self.best, self.scale = 0.0, 1.0
        self._stalled = 0

    def observe(self, reward: float) -> None:
        """Update ``best`` and ``scale`` (the factor on the learning rate) with the reward of one check."""
        self._stalled = 0 if reward > self.best else self._stalled + 1
        self.best = max(self.best, reward)
        if self._stalled >= self.PATIENCE and self.best >= self.COPIES:
            self.scale, self._stalled = self.scale / 2, 0


def warm_start(
    model: torch.nn.Module,
    rows: Sequence[TokenRow],
    check: Callable[[], float],
    config: WarmStartConfig,
    report: Callable[[str], None],
    on_step: Callable[[int, int, float], None] = lambda step, next_check, loss: None,
    images_of: Callable[[Sequence[int]], Images | None] = lambda numbers: None,
) -> WarmStartResult:
    """Train ``model`` on demonstrations until ``check()``, its greedy reward on held-out tasks, reaches
    ``config.gate``. ``on_step`` is called with each step, the step of the next check, and the loss; ``images_of`` lays
    out the images of the rows with these numbers.

    Copying appears abruptly after 200 to more than 400 steps, depending on the seed, so no fixed number of steps is
    enough. A seed that copies but stays below the gate needs a smaller learning rate, which is halved when greedy
    reward stops rising. Raises UserError if the gate is not reached within ``config.max_steps``.
    """
    began = time.perf_counter()
    draw = random.Random(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    plateau = Plateau()
    for step in range(1, config.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * plateau.scale * min(1.0, step / WARMUP_STEPS)
        numbers = [draw.randrange(len(rows)) for _ in range(config.batch_size)]
        loss = _loss(model, [rows[number] for number in numbers], images_of(numbers))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_step(step, next_check(step, config), loss.item())
        if step >= config.min_steps and step % config.check_every == 0:
            reward = check()
            report(f"warm start: {step} steps, loss {loss.item():.3f}, greedy reward {reward:.2f} (gate {config.gate})")
            if reward >= config.gate:
                return WarmStartResult(step, reward, time.perf_counter() - began)
            plateau.observe(reward)
    raise UserError(
        f"the warm start reached a greedy reward of {plateau.best:.2f}, not warm_start.gate={config.gate}, in "
        f"warm_start.max_steps={config.max_steps} steps; raise warm_start.max_steps, or try another warm_start.seed"
    )


def next_check(step: int, config: WarmStartConfig) -> int:
    """Return the first step from ``step`` on after which the greedy reward is measured, or the last step."""
    first = max(step, config.min_steps)
    return min(config.max_steps, first + -first % config.check_every)


def _loss(model: torch.nn.Module, rows: Sequence[TokenRow], images: Images | None) -> Tensor:
    """Return the mean cross-entropy of the tokens to learn. Padding on the right needs no attention mask."""
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.zeros((len(rows), width), dtype=torch.int64)
    labels = torch.full((len(rows), width), IGNORED)
    for i, (ids, learn) in enumerate(rows):
        tokens[i, : len(ids)] = torch.tensor(ids)
        labels[i, : len(ids)] = torch.where(torch.tensor(learn), torch.tensor(ids), IGNORED)
    inputs = {"input_ids": tokens} if images is None else embedded(model, tokens, images)
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)

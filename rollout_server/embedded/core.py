"""Continuous batching around a Transformers causal LM, one iteration at a time. No threads and no sockets.

An iteration admits waiting sequences and prefills them in one padded pass, in which equal prompts are computed once,
then decodes all running sequences in another. Log-probabilities are those of a plain forward pass, whatever shares the
batch.
"""

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from rl_async.errors import UserError
from rl_async.output_layer import output_logits
from rl_async.rollout_server.embedded.cache import SlotCache
from rl_async.rollout_server.embedded.families import ROPES, SERVED, why_not_served
from rl_async.rollout_server.embedded.sampler import Sampler
from rl_async.rollout_server.embedded.sequence import Sequence

PREFILL_TOKENS = 32_768  # padded tokens per prefill pass


def _check_served(model: nn.Module) -> None:
    """Raise UserError for a model whose batched results would differ from a plain forward pass."""
    config: Any = model.config
    found = why_not_served(config)
    if found is None and config._attn_implementation != "sdpa":
        found = f"attn_implementation {config._attn_implementation!r}"
    if found is not None:
        raise UserError(
            f"model.path: the embedded engine serves {', '.join(SERVED)} with full attention (sdpa) and rotary "
            f"embedding {', '.join(ROPES)}; this model has {found}. Use rollout.engine: vllm"
        )


class EngineCore:
    """The scheduler: waiting and running sequences, and their cache. ``version`` names the weights in use."""

    def __init__(self, model: nn.Module, *, max_batch: int, max_length: int, min_iteration_s: float = 0.0) -> None:
        _check_served(model)
        self.model: Any = model  # nn.Module has no types for what a Transformers model holds
        self.max_batch, self.max_length, self.min_iteration_s = max_batch, max_length, min_iteration_s
        config: Any = model.config
        self.vocab_size: int = config.vocab_size
        self.version = "default"
        self.waiting: deque[Sequence] = deque()
        self.held: list[Sequence] = []  # arrived while ``holding``, not admitted before ``release``
        self.holding = False
        self.running: list[Sequence] = []
        self.sampled_tokens = self.preemptions = 0
        self._generators: dict[Sequence, torch.Generator] = {}
        self._sampler: Sampler | None = None
        self._last: Tensor = torch.zeros(0, dtype=torch.int64)
        self._new_cache()

    def _new_cache(self) -> None:
        self.device = next(self.model.parameters()).device
        self._cache = SlotCache(self.model.config.num_hidden_layers, self.max_batch, self.max_length, self.device)

    @property
    def unfinished(self) -> int:
        """The number of sequences that are running, waiting or held."""
        return len(self.running) + len(self.waiting) + len(self.held)

    @property
    def cache_bytes(self) -> int:
        """The bytes allocated for the KV cache."""
        return self._cache.nbytes()

    @property
    def cache_tokens(self) -> int:
        """The tokens that the cache holds at its largest; it grows to that before it is ever full."""
        return self.max_batch * self.max_length

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that ``refusal`` has accepted."""
        if sequence.seed is not None:
            self._generators[sequence] = torch.Generator(self.device).manual_seed(sequence.seed)
        (self.held if self.holding else self.waiting).append(sequence)

    def release(self) -> None:
        """End ``holding``: sequences that arrived meanwhile join the queue."""
        self.waiting.extend(self.held)
        self.held, self.holding = [], False

    def refusal(self, tokens: list[int], max_tokens: int) -> str | None:
        """Return why a request cannot be served, or None."""
        if not tokens:
            return "token_ids is empty"
        if len(tokens) + 1 > self.max_length:
            return f"the prompt has {len(tokens)} tokens; at most {self.max_length - 1} fit (max_model_len)"
        if not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            return f"token_ids must lie in [0, {self.vocab_size})"
        if max_tokens < 1:
            return "max_tokens must be at least 1"
        return None

    @torch.inference_mode()
    def abort(self, which: str | Sequence | None) -> list[Sequence]:
        """Finish the requests of an id, one sequence, or all (None) with reason ``abort``, and return them."""
        everyone = (*self.running, *self.waiting, *self.held)
        gone = [s for s in everyone if which is None or s is which or s.request_id == which]
        for sequence in gone:
            sequence.finish_reason = "abort"
        self.waiting = deque(s for s in self.waiting if s.finish_reason is None)
        self.held = [s for s in self.held if s.finish_reason is None]
        self._drop_finished()
        for sequence in gone:
            self._generators.pop(sequence, None)
        return gone

    def preempt(self) -> None:
        """Move all running sequences back to the head of the queue; their caches will be recomputed."""
        self.preemptions += len(self.running)
        self.waiting.extendleft(reversed(self.running))
        self.running = []
        self._sampler = None

    def free_cache(self) -> None:
        """Free the cache's memory, preempting the running sequences."""
        self.preempt()
        self._new_cache()

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Run one iteration and return the sequences that it finished."""
        began = time.monotonic()
        finished: list[Sequence] = []
        if admitted := self._admit():
            finished += self._prefill(admitted)
        if self.running:
            finished += self._decode()
        if self.min_iteration_s:
            time.sleep(max(0.0, began + self.min_iteration_s - time.monotonic()))
        return finished

    def _admit(self) -> list[Sequence]:
        batch: list[Sequence] = []
        prompts: set[tuple[int, ...]] = set()
        longest = 0
        while self.waiting and len(self.running) + len(batch) < self.max_batch:
            prompts.add(tuple(self.waiting[0].tokens))
            longest = max(longest, len(self.waiting[0].tokens))
            if batch and longest * len(prompts) > PREFILL_TOKENS:
                break
            batch.append(self.waiting.popleft())
        return batch

    def _prefill(self, batch: list[Sequence]) -> list[Sequence]:
        prompts: dict[tuple[int, ...], int] = {}  # prompt -> its row in the pass
        rows = torch.tensor([prompts.setdefault(tuple(s.tokens), len(prompts)) for s in batch], device=self.device)
        width = max(map(len, prompts))
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        padded = torch.tensor([prompt + (0,) * (width - len(prompt)) for prompt in prompts], device=self.device)
        first = len(self.running)
        self._cache.reserve(first + len(batch), min(width + 1, self.max_length))
        self._cache.prefill_at(first, rows)
        hidden = self.model.model(
            input_ids=padded,
            position_ids=torch.arange(width, device=self.device)[None],
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        last = hidden[torch.arange(len(prompts), device=self.device), lengths - 1]
        self.running += batch
        sampler = self._make_sampler(batch)
        tokens, logprobs = sampler.sample(self._logits(last)[rows])
        self._last = torch.cat([self._last[:first].to(self.device), tokens])
        self._sampler = None
        return self._append(batch, tokens, logprobs)

    def _decode(self) -> list[Sequence]:
        count = len(self.running)
        lengths = [len(s.tokens) for s in self.running]
        view = max(lengths)
        positions = torch.tensor(lengths, device=self.device) - 1  # of the token that is fed, not yet in the cache
        self._cache.reserve(count, view)
        self._cache.decode_at(positions, view)
        mask = (torch.arange(view, device=self.device)[None] <= positions[:, None])[:, None, None]
        hidden = self.model.model(
            input_ids=self._last[:, None],
            position_ids=positions[:, None],
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        if self._sampler is None:
            self._sampler = self._make_sampler(self.running)
        tokens, logprobs = self._sampler.sample(self._logits(hidden[:, 0]))
        self._last = tokens
        return self._append(self.running, tokens, logprobs)

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.model.lm_head
        return output_logits(hidden, head.weight, head.bias)

    def _make_sampler(self, batch: list[Sequence]) -> Sampler:
        return Sampler([s.sampling for s in batch], [self._generators.get(s) for s in batch], self.device)

    def _append(self, batch: list[Sequence], tokens: Tensor, logprobs: Tensor) -> list[Sequence]:
        self.sampled_tokens += len(batch)
        finished = []
        for sequence, token, logprob in zip(batch, tokens.tolist(), logprobs.tolist(), strict=True):
            if sequence.append(token, logprob, self.version, self.max_length):
                finished.append(sequence)
                self._generators.pop(sequence, None)
            if sequence.progress is not None and sequence.part_is_full:
                sequence.progress(sequence)
        if finished:
            self._drop_finished()
        return finished

    def _drop_finished(self) -> None:
        """Free the slots of finished sequences, moving the last running ones into the gaps."""
        keep = [s.finish_reason is None for s in self.running]
        count = sum(keep)
        if count == len(keep):
            return
        gaps = [slot for slot in range(count) if not keep[slot]]
        movers = [slot for slot in range(count, len(keep)) if keep[slot]]
        self._cache.move(movers, gaps, max((len(self.running[slot].tokens) for slot in movers), default=0))
        for gap, mover in zip(gaps, movers, strict=True):
            self.running[gap] = self.running[mover]
            self._last[gap] = self._last[mover]
        del self.running[count:]
        self._last = self._last[:count]
        self._sampler = None

"""Prefixes are computed once, memory stays bounded, and neither changes what is sampled."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from rl_async.errors import UserError
from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.cache import BLOCK
from rl_async.rollout_server.embedded.core import EngineCore, Sequence
from tests.unit.rollout_server.embedded.test_core import assert_as_plain, model

__all__ = ["model"]
TOKEN_BYTES = 2 * 2 * 32 * 4  # layers, keys and values, head_dim, float32


def ask(tokens: list[int], max_tokens: int = 8, temperature: float = 0.0, seed: int | None = None) -> Sequence:
    return Sequence(
        "r", list(tokens), Sampling(temperature=temperature), max_tokens, frozenset(), seed, deliver=lambda _: None
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(90) for _ in range(length)]


def run(core: EngineCore, *todo: Sequence) -> list[Sequence]:
    for sequence in todo:
        core.add(sequence)
    while core.unfinished:
        core.step()
    return list(todo)


@contextmanager
def computed(model: Any) -> Iterator[list[int]]:
    """The tokens, with padding, of each pass of several positions."""
    passes: list[int] = []

    def note(_: object, positional: object, named: dict[str, torch.Tensor]) -> None:
        if named["input_ids"].shape[1] > 1:
            passes.append(named["input_ids"].numel())

    with model.model.register_forward_pre_hook(note, with_kwargs=True):
        yield passes


def test_a_second_turn_computes_only_what_is_new(model: Qwen3ForCausalLM) -> None:
    core = EngineCore(model, max_batch=4, max_length=256)
    first, *_ = run(core, ask(prompt(50), max_tokens=30))
    assert first.cached_tokens == 0
    with computed(model) as passes:
        second, *_ = run(core, ask(first.tokens + prompt(7, seed=1)))
    known = (50 + 30 - 1) // BLOCK * BLOCK
    assert second.cached_tokens == known and passes == [80 + 7 - known]
    assert (core.prompt_tokens, core.cached_tokens) == (50 + 87, known)
    assert_as_plain(model, [second])


def test_samples_that_come_later_reuse_the_prompt_while_others_of_it_run(model: Qwen3ForCausalLM) -> None:
    core = EngineCore(model, max_batch=8, max_length=128)
    todo = [ask(prompt(40), max_tokens=20, temperature=1.0) for _ in range(6)]
    core.add(todo[0])
    core.step()
    with computed(model) as passes:
        run(core, *todo[1:])
    assert passes == [40 - 2 * BLOCK], "one pass of one row for all five"
    assert [s.cached_tokens for s in todo] == [0, 32, 40, 40, 40, 40]
    assert_as_plain(model, todo)
    assert len({tuple(s.sampled) for s in todo}) == 6


def conversations(model: Qwen3ForCausalLM, **options: Any) -> tuple[list[list[int]], list[Sequence], EngineCore]:
    """Three turns of several groups that share a beginning: the conversations, and each request."""
    core = EngineCore(model, max_batch=6, max_length=200, **options)
    shared = prompt(20)
    histories = [shared + prompt(5 + 9 * (i // 3), seed=i // 3) for i in range(9)]
    everything: list[Sequence] = []
    for turn in range(3):
        todo = run(core, *(ask(h, 12, 1.0 if i % 3 == 2 else 0.0, seed=i) for i, h in enumerate(histories)))
        histories = [s.tokens + prompt(3 + i, seed=100 + turn) for i, s in enumerate(todo)]
        everything += todo
    return histories, everything, core


def test_answers_are_equal_with_and_without_reuse(model: Qwen3ForCausalLM) -> None:
    reused, requests, core = conversations(model)
    computed_anew, others, without = conversations(model, reuse_prefixes=False)
    assert reused == computed_anew
    assert core.cached_tokens > without.cached_tokens
    assert_as_plain(model, (*requests, *others))


def test_nothing_of_older_weights_is_reused(model: Qwen3ForCausalLM) -> None:
    core = EngineCore(model, max_batch=4, max_length=256)
    before, running = ask(prompt(50)), ask(prompt(40, seed=1), max_tokens=100)
    run(core, before)
    core.add(running)
    core.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    try:
        core.weights_changed()
        core.abort(None)  # what it holds is of the older weights
        again = run(core, ask([*before.tokens, 3]), ask([*running.tokens, 4]))
        assert [s.cached_tokens for s in again] == [0, 0]
        assert_as_plain(model, again)
        assert run(core, ask(again[0].tokens))[0].cached_tokens > 0, "prefixes of the new weights are"
    finally:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(1.1)


def test_sequences_that_go_on_with_new_weights_are_computed_again(model: Qwen3ForCausalLM) -> None:
    core = EngineCore(model, max_batch=4, max_length=256)
    sequence = ask(prompt(50), max_tokens=40)
    core.add(sequence)
    for _ in range(5):
        core.step()
    core.weights_changed()
    core.preempt()
    with computed(model) as passes:
        core.step()
    assert passes == [56], "its whole prompt and what was sampled"
    run(core)
    assert run(core, ask(sequence.tokens))[0].cached_tokens == 80


@pytest.mark.parametrize("tokens", [160, pytest.param(250, marks=pytest.mark.slow), 700])
def test_a_small_cache_makes_sequences_wait_and_loses_none(model: Qwen3ForCausalLM, tokens: int) -> None:
    core = EngineCore(model, max_batch=16, max_length=160, cache_bytes=tokens * TOKEN_BYTES)
    draw = random.Random(tokens)
    todo = [ask(prompt(draw.randrange(1, 40), seed=i % 7), draw.randrange(1, 110), 0.7, seed=i) for i in range(40)]
    done = 0
    for iteration in range(20_000):
        for sequence in todo[2 * iteration : 2 * iteration + 2]:
            core.add(sequence)
        done += len(core.step())
        assert core.cache_bytes <= tokens * TOKEN_BYTES
        if done == len(todo):
            break
    assert all(s.finish_reason == "length" and len(s.logprobs) == len(s.sampled) for s in todo)
    assert_as_plain(model, todo)
    assert core.preemptions or tokens != 700, "nothing was preempted"


def test_memory_follows_what_is_used(model: Qwen3ForCausalLM) -> None:
    core = EngineCore(model, max_batch=64, max_length=4096)
    run(core, *(ask(prompt(20, seed=i), 4) for i in range(4)))
    assert core.cache_bytes < 64 * 4096 * TOKEN_BYTES / 50
    core.free_cache()
    assert core.cache_bytes == 0


def test_a_cache_that_cannot_hold_one_sequence_is_refused(model: Qwen3ForCausalLM) -> None:
    with pytest.raises(UserError, match=rf"rollout\.cache_bytes.*max_model_len=64.*{64 * TOKEN_BYTES}"):
        EngineCore(model, max_batch=4, max_length=64, cache_bytes=64 * TOKEN_BYTES - 1)

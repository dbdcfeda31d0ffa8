"""Continuous batching: whatever joins, leaves or is preempted, log-probabilities are those of a plain forward pass."""

import gc
import random
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.core import EngineCore, Sequence
from tests.support.rounding import PlainPass


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.dim() == 2 else 1.0)  # away from the flat distribution of a fresh model
    return model


def sequences(count: int, seed: int, **more: Any) -> list[Sequence]:
    draw = random.Random(seed)
    return [
        Sequence(
            request_id=str(i),
            tokens=[draw.randrange(90) for _ in range(draw.randrange(1, 30))],
            sampling=Sampling(temperature=draw.choice([0.0, 0.7, 1.0])),
            max_tokens=draw.randrange(1, 40),
            stop_token_ids=frozenset([5]),
            seed=None,
            deliver=lambda _: None,
            **more,
        )
        for i in range(count)
    ]


def assert_as_plain(model: Any, sequences: Iterable[Sequence]) -> None:
    """Fail unless log-probabilities are those of a plain forward pass, but for rounding."""
    plain = PlainPass(model)
    for sequence in sequences:
        errors = plain.errors(sequence.tokens, sequence.logprobs, sequence.sampling.temperature or 1.0)
        assert len(errors) == len(sequence.tokens) - sequence.prompt_length
        assert (errors <= 1).all(), f"{sequence.request_id}: {errors.max():.3g} times what rounding explains"


def test_logprobs_agree_with_a_plain_forward_pass(model: Qwen3ForCausalLM) -> None:
    core = EngineCore(model, max_batch=12, max_length=64)
    todo = sequences(60, seed=1)
    finished: list[Sequence] = []
    for iteration in range(400):
        for sequence in todo[3 * iteration : 3 * iteration + 3]:  # they join while others run
            core.add(sequence)
        if iteration == 9:
            core.preempt()
        if iteration == 15:
            core.free_cache()
        finished += core.step()
        if len(finished) == len(todo):
            break
    assert len(finished) == len(todo)
    assert_as_plain(model, todo)
    assert core.preemptions > 0
    for s in todo:
        assert s.finish_reason == ("stop" if s.tokens[-1] == 5 else "length")
        assert len(s.logprobs) == len(s.sampled) <= s.max_tokens
        assert len(s.tokens) <= 64


def test_a_freed_cache_is_gone_at_once(model: Qwen3ForCausalLM) -> None:
    """On a GPU a trainer is about to need its memory, and Python may collect garbage much later."""
    core = EngineCore(model, max_batch=12, max_length=64)
    for sequence in sequences(9, seed=1):
        core.add(sequence)
    core.step()
    held = [weakref.ref(tensor) for layer in core._cache._slot_layers for tensor in (layer.keys, layer.values)]
    gc.collect()
    gc.disable()
    try:
        core.free_cache()
        assert not any(tensor() is not None for tensor in held)
    finally:
        gc.enable()


def test_a_shared_prompt_is_prefilled_once(model: Qwen3ForCausalLM) -> None:
    core = EngineCore(model, max_batch=12, max_length=64)
    todo = sequences(9, seed=4)
    for i, sequence in enumerate(todo):
        sequence.tokens = list(todo[i % 3].tokens)  # three prompts, not side by side
        sequence.prompt_length = len(sequence.tokens)
        core.add(sequence)
    widths = []
    with model.model.register_forward_pre_hook(
        lambda _, positional, named: widths.append(len(named["input_ids"])), with_kwargs=True
    ):
        core.step()
    assert widths[0] == 3
    while core.running:
        core.step()
    assert_as_plain(model, todo)
    assert len({tuple(s.sampled) for s in todo if s.sampling.temperature}) > 3, "each is a sample of its own"


def test_versions_are_recorded_per_token(model: Qwen3ForCausalLM) -> None:
    core = EngineCore(model, max_batch=4, max_length=64)
    (sequence,) = sequences(1, seed=2)
    sequence.max_tokens, sequence.stop_token_ids = 6, frozenset()
    core.add(sequence)
    for version in ("0.0", "0.0", "0.1", "0.2"):
        core.version = version
        core.step()  # the first iteration samples twice: from the prompt, and decoding
    core.step()
    assert sequence.spans(6)[0] == ("0.0", 0, 3)
    assert [v for v, _, _ in sequence.spans(6)] == ["0.0", "0.1", "0.2"]
    assert sequence.spans(6)[-1][2] == 6


def test_abort_frees_slots_and_keeps_the_others_right(model: Qwen3ForCausalLM) -> None:
    core = EngineCore(model, max_batch=8, max_length=64)
    todo = sequences(8, seed=3)
    for sequence in todo:
        sequence.max_tokens, sequence.stop_token_ids = 20, frozenset()
        core.add(sequence)
    for _ in range(4):
        core.step()
    gone = core.abort("2") + core.abort("7")
    while core.running:
        core.step()
    assert [s.finish_reason for s in gone] == ["abort", "abort"]
    assert all(0 < len(s.logprobs) < 20 for s in gone)
    assert_as_plain(model, todo)


def test_refusals_name_the_reason(model: Qwen3ForCausalLM) -> None:
    core = EngineCore(model, max_batch=4, max_length=16)
    assert "at most 15" in (core.refusal([1] * 16, 4) or "")
    assert "[0, 90)" in (core.refusal([90], 4) or "")
    assert "empty" in (core.refusal([], 4) or "")
    assert core.refusal([1] * 15, 4) is None

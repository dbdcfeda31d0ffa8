"""Continuous batching equals plain forward passes, with reused prefixes too; recorded experts; spans."""

import gc
import random
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from rl_async import tracing
from rl_async.errors import UserError
from rl_async.messages import Sampling
from rl_async.rollout_server.embedded import core
from rl_async.rollout_server.embedded.cache import BLOCK, PrefixCache, joined
from rl_async.rollout_server.embedded.core import EngineCore, Sequence
from rl_async.rollout_server.embedded.sampler import Sampler
from rl_async.rollout_server.embedded.server import choice
from rl_async.tracing import Value
from tests.conftest import tiny_config
from tests.support.rounding import PlainPass, assert_near, rounding
from tests.support.tiny_models import chosen, sparse_model


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config(vocab_size=90, tie_word_embeddings=True)).eval()
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
    # The smallest holds one sequence at a time.
    count = 12 if tokens == 160 else 40
    todo = [ask(prompt(draw.randrange(1, 40), seed=i % 7), draw.randrange(1, 110), 0.7, seed=i) for i in range(count)]
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


@pytest.fixture(scope="module")
def sparse() -> Qwen3MoeForCausalLM:
    return sparse_model(vocab=90)


def run_all(core: EngineCore, *todo: Sequence) -> None:
    for sequence in todo:
        core.add(sequence)
    while core.unfinished:
        core.step()


def right(sparse: Qwen3MoeForCausalLM, sequence: Sequence) -> bool:
    assert sequence.routes is not None
    return sequence.routes.long().sort(-1).values.equal(chosen(sparse, sequence.tokens[:-1]))


def ask_for_routes(tokens: list[int], max_tokens: int = 20, **more: object) -> Sequence:
    fixed = {"sampling": Sampling(), "stop_token_ids": frozenset[int](), "seed": 1, "deliver": lambda _: None}
    return Sequence(request_id="r", tokens=list(tokens), max_tokens=max_tokens, **(fixed | more))  # type: ignore[arg-type]


def test_batches_equal_prompts_and_known_prefixes_have_the_experts_of_a_plain_pass(sparse: Qwen3MoeForCausalLM) -> None:
    core = EngineCore(sparse, max_batch=5, max_length=160, record_routes=True)
    todo = sequences(12, seed=1)
    same = [ask_for_routes(todo[0].tokens * 3, seed=number) for number in range(4)]
    run_all(core, *todo, *same)
    again = [ask_for_routes([*s.tokens, 7, 8, 9]) for s in (*todo, *same)]
    run_all(core, *again)
    assert core.cached_tokens > 200
    assert all(right(sparse, s) for s in (*todo, *same, *again))


def test_sequences_that_a_small_cache_preempts_keep_their_experts(sparse: Qwen3MoeForCausalLM) -> None:
    token_bytes = 2 * 2 * 32 * 4 + 2 * 2  # keys and values of two layers, and their experts
    core = EngineCore(sparse, max_batch=16, max_length=160, cache_bytes=250 * token_bytes, record_routes=True)
    todo = [ask_for_routes([*range(3, 20), n], max_tokens=60, seed=n) for n in range(8)]
    run_all(core, *todo)
    assert core.preemptions > 0
    assert all(right(sparse, s) for s in todo)


def test_tokens_that_are_computed_again_under_new_weights_keep_their_first_experts(sparse: Qwen3MoeForCausalLM) -> None:
    core = EngineCore(sparse, max_batch=4, max_length=160, record_routes=True)
    sequence = ask_for_routes(list(range(3, 40)), max_tokens=30)
    core.add(sequence)
    for _ in range(10):
        core.step()
    fed = len(sequence.tokens) - 1
    before = chosen(sparse, sequence.tokens[:-1])
    layers: Any = sparse.model.layers
    gates = [layer.mlp.gate.weight for layer in layers]
    with torch.no_grad():
        for gate in gates:
            gate.copy_(gate.flip(0))  # every router chooses by another order of the experts
    core.weights_changed()
    core.preempt()
    while core.unfinished:
        core.step()
    after = chosen(sparse, sequence.tokens[:-1])
    with torch.no_grad():
        for gate in gates:
            gate.copy_(gate.flip(0))
    assert sequence.routes is not None and not after[:fed].equal(before)
    routes = sequence.routes.long().sort(-1).values
    assert routes[:fed].equal(before) and routes[fed:].equal(after[fed:])


def test_an_aborted_sequence_has_the_experts_of_what_was_fed(sparse: Qwen3MoeForCausalLM) -> None:
    core = EngineCore(sparse, max_batch=1, max_length=160, record_routes=True)
    running, waiting = ask_for_routes(list(range(3, 20)), max_tokens=90), ask_for_routes([4, 5])
    for sequence in (running, waiting):
        core.add(sequence)
    for _ in range(5):
        core.step()
    core.abort(None)
    assert right(sparse, running) and len(running.tokens) == 17 + 6  # one of the first step's pass over the prompt
    assert waiting.routes is None and choice(waiting)["routed_experts"] is None


def test_what_is_not_to_be_recorded_is_not(sparse: Qwen3MoeForCausalLM) -> None:
    sequence = ask_for_routes([3, 4, 5])
    run_all(EngineCore(sparse, max_batch=1, max_length=160), sequence)
    assert sequence.routes is None


def test_many_experts_take_two_bytes_and_layers_without_experts_are_zeros() -> None:
    sparse = sparse_model(num_experts=300, num_hidden_layers=3, mlp_only_layers=[1])
    sequence = ask_for_routes(list(range(3, 33)))
    run_all(EngineCore(sparse, max_batch=1, max_length=160, record_routes=True), sequence)
    assert sequence.routes is not None and sequence.routes.dtype == torch.int16
    assert not sequence.routes[:, 1].any() and int(sequence.routes.max()) > 255


Added = tuple[str, int, int, Mapping[str, Value]]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[Added]:
    found: list[Added] = []

    def add_below(above: str, name: str, began: int, ended: int, about: Mapping[str, Value]) -> None:
        assert above == "header"
        found.append((name, began, ended, about))

    monkeypatch.setattr(tracing, "add_below", add_below)
    return found


def sequence(traceparent: str = "header") -> Sequence:
    return Sequence(
        request_id="r",
        tokens=[1, 2, 3],
        sampling=Sampling(),
        max_tokens=2,
        stop_token_ids=frozenset(),
        seed=None,
        deliver=lambda _: None,
        traceparent=traceparent,
    )


def play(played: Sequence) -> None:
    played.admit()
    assert not played.append(4, -1.0, "0.0", 100)
    played.admit()  # again, after a preemption
    assert played.append(5, -1.0, "0.1", 100)


def test_wait_prefill_and_decoding_follow_one_another(added: list[Added]) -> None:
    began, played = time.time_ns(), sequence()
    play(played)
    core.add_spans(played)
    assert [name for name, *_ in added] == ["wait for engine", "prefill", "decode"]
    times = [began, *(time for _, start, end, _ in added for time in (start, end)), time.time_ns()]
    assert times == sorted(times)
    assert added[1][3]["gen_ai.usage.input_tokens"] == 3
    about = added[2][3]
    assert (about["gen_ai.usage.output_tokens"], about["rl_async.versions"]) == (2, ["0.0", "0.1"])


def test_what_is_aborted_while_it_waits_has_only_waited(added: list[Added]) -> None:
    waiting = sequence()
    waiting.finish_reason = "abort"
    core.add_spans(waiting)
    assert [name for name, *_ in added] == ["wait for engine"]


def test_a_request_that_names_no_span_has_none(added: list[Added]) -> None:
    played = sequence("")
    play(played)
    core.add_spans(played)
    assert not added


# Blocks of prefixes: what is found, and in which order blocks are evicted.


ROOM = 1000 * BLOCK


def numbered(tokens: list[int], start: int, end: int) -> torch.Tensor:
    """Keys and values that name their tokens, of two layers."""
    return torch.tensor(tokens[start:end], dtype=torch.float32)[:, None].expand(2, 2, 1, end - start, 3)


def keep(cache: PrefixCache, tokens: list[int], room: int = ROOM) -> None:
    cache.keep(tokens, lambda start, end: numbered(tokens, start, end), room)


def found(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """The tokens whose keys and values are known."""
    blocks = cache.find(tokens)
    return joined(blocks)[0, 0, 0, :, 0].int().tolist() if blocks else []


def test_the_longest_known_prefix_leaves_a_token_to_compute() -> None:
    cache, tokens = PrefixCache(), list(range(3 * BLOCK + 5))
    assert found(cache, tokens) == []
    keep(cache, tokens)
    assert found(cache, tokens) == tokens[: 3 * BLOCK]
    assert found(cache, tokens[: 3 * BLOCK]) == tokens[: 2 * BLOCK]
    assert found(cache, tokens[: 3 * BLOCK + 1]) == tokens[: 3 * BLOCK]
    assert found(cache, [*tokens[: BLOCK + 1], 99, *tokens]) == tokens[:BLOCK]
    assert found(cache, tokens[BLOCK:]) == [], "the same tokens behind others"
    cache.clear()
    assert found(cache, tokens) == [] and cache.nbytes == 0


def test_blocks_that_prefixes_share_are_held_once_and_read_once() -> None:
    cache, tokens = PrefixCache(), list(range(4 * BLOCK))
    reads = []

    def read(start: int, end: int) -> torch.Tensor:
        reads.append((start, end))
        return numbered(tokens, start, end)

    cache.keep(tokens[: 2 * BLOCK], read, ROOM)
    before = cache.nbytes
    cache.keep(tokens, read, ROOM)
    cache.keep(tokens, read, ROOM)
    assert reads == [(0, 2 * BLOCK), (2 * BLOCK, 4 * BLOCK)]
    assert cache.nbytes == 2 * before


def test_the_least_recently_used_end_is_evicted_first() -> None:
    cache = PrefixCache()
    one, two = ([base + i for i in range(3 * BLOCK)] for base in (0, 1000))
    keep(cache, one)
    keep(cache, two)
    cache.find([*one, 0])
    cache.shrink(5 * BLOCK)
    assert found(cache, [*two, 0]) == two[: 2 * BLOCK]
    cache.find([*one, 0])
    cache.shrink(3 * BLOCK)
    assert found(cache, [*two, 0]) == []
    assert found(cache, [*one, 0]) == one


def test_no_more_is_held_than_there_is_room_for() -> None:
    draw, cache = random.Random(0), PrefixCache()
    each = 2 * 2 * BLOCK * 3 * 4
    for _ in range(200):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(6 * BLOCK))]
        room = draw.randrange(8 * BLOCK)
        cache.shrink(room)
        keep(cache, tokens, room)
        assert cache.nbytes <= room // BLOCK * each
        known = found(cache, [*tokens, 0])
        assert known == tokens[: len(known)]


# Sampling against a plain float64 reference, and greedy, seeded and truncated rows beside one another.


CPU = torch.device("cpu")


def reference(logits: torch.Tensor, s: Sampling) -> torch.Tensor:
    """Log-probabilities [V] of the processed distribution, token by token."""
    scaled = logits.double() / (s.temperature or 1.0)
    order = scaled.argsort(descending=True).tolist()
    if s.top_k:
        order = order[: s.top_k]
    p = torch.full_like(scaled, -torch.inf).index_copy(0, torch.tensor(order), scaled[order]).softmax(-1)
    kept: list[int] = []
    total = 0.0
    for token in order:
        if total >= s.top_p and kept:
            break
        kept.append(token)
        total += p[token].item()
    p = torch.full_like(scaled, -torch.inf).index_copy(0, torch.tensor(kept), scaled[kept]).softmax(-1)
    kept = [t for t in kept if p[t] >= s.min_p * p.max()]
    return torch.full_like(scaled, -torch.inf).index_copy(0, torch.tensor(kept), scaled[kept]).log_softmax(-1)


def rounded(logits: torch.Tensor, s: Sampling) -> float:
    """Bound the error of one of these log-probabilities: each is a logit less the logarithm of a sum over all."""
    return float(rounding(2 * logits.abs().max() / (s.temperature or 1.0), terms=logits.shape[-1]))


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=1.7, top_k=3),
    Sampling(top_p=0.6),
    Sampling(temperature=0.8, top_p=0.9, top_k=7, min_p=0.05),
    Sampling(min_p=0.3),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logprobs_are_those_of_the_processed_distribution(settings: Sampling) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20) * 2
    expected = reference(logits, settings)
    sampler = Sampler([settings] * 2000, [None] * 2000, CPU)
    tokens, logprobs = sampler.sample(logits.expand(2000, -1))
    assert_near(logprobs, expected[tokens], rounded(logits, settings))
    seen, p = torch.bincount(tokens, minlength=20).double() / 2000, expected.exp()
    assert_near(seen, p, 6 * (p * (1 - p) / 2000).sqrt() + 1 / 2000, "frequencies, within six standard deviations")
    assert not seen[expected == -torch.inf].any()


def test_rows_of_different_settings_do_not_disturb_one_another() -> None:
    torch.manual_seed(1)
    logits = torch.randn(len(SETTINGS) + 1, 20)
    rows = [*SETTINGS, Sampling(temperature=0.0)]
    tokens, logprobs = Sampler(rows, [None] * len(rows), CPU).sample(logits)
    for i, settings in enumerate(rows):
        expected = reference(logits[i], settings)[tokens[i]]
        assert_near(logprobs[i], expected, rounded(logits[i], settings), str(settings))
    assert tokens[-1] == logits[-1].argmax()


def test_a_row_of_nans_affects_no_other() -> None:
    logits = torch.zeros(2, 5)
    logits[1] = torch.nan
    tokens, logprobs = Sampler([Sampling()] * 2, [None] * 2, CPU).sample(logits)
    assert ((tokens >= 0) & (tokens < 5)).all()
    assert_near(logprobs[0], -torch.tensor(5.0).double().log(), rounding(1.7, terms=5))
    assert logprobs[1].isnan()


def test_a_seed_reproduces_whatever_shares_the_batch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, 50).expand(4, -1)

    def draw(others: int) -> list[int]:
        generator = torch.Generator().manual_seed(7)
        rows = [generator] + [None] * others
        sampler = Sampler([Sampling()] * len(rows), rows, CPU)
        return [int(sampler.sample(logits[: len(rows)])[0][0]) for _ in range(10)]

    assert draw(0) == draw(3)


def test_a_large_vocabulary_is_sampled_as_its_probabilities_say_across_blocks() -> None:
    vocab, rows = 1000, 40_000
    p = torch.zeros(vocab, dtype=torch.float64)
    p[[3, 255, 256, 511, 999]] = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
    torch.manual_seed(0)
    tokens, _ = Sampler([Sampling()] * rows, [None] * rows, CPU).sample(p.log().float().expand(rows, -1))
    seen = torch.bincount(tokens, minlength=vocab).double() / rows
    assert not seen[p == 0].any()
    deviation = (p * (1 - p) / rows).sqrt()
    assert ((seen - p).abs() <= 5 * deviation).all()

"""The experts that the engine names are those of a plain forward pass, however tokens were computed."""

from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.core import EngineCore, Sequence
from rl_async.rollout_server.embedded.server import choice
from tests.support.sparse import chosen, sparse_model
from tests.unit.rollout_server.embedded.test_core import sequences


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    return sparse_model(vocab=90)


def run(core: EngineCore, *todo: Sequence) -> None:
    for sequence in todo:
        core.add(sequence)
    while core.unfinished:
        core.step()


def right(model: Qwen3MoeForCausalLM, sequence: Sequence) -> bool:
    assert sequence.routes is not None
    return sequence.routes.long().sort(-1).values.equal(chosen(model, sequence.tokens[:-1]))


def ask(tokens: list[int], max_tokens: int = 20, **more: object) -> Sequence:
    fixed = {"sampling": Sampling(), "stop_token_ids": frozenset[int](), "seed": 1, "deliver": lambda _: None}
    return Sequence(request_id="r", tokens=list(tokens), max_tokens=max_tokens, **(fixed | more))  # type: ignore[arg-type]


def test_batches_equal_prompts_and_known_prefixes_have_the_experts_of_a_plain_pass(model: Qwen3MoeForCausalLM) -> None:
    core = EngineCore(model, max_batch=5, max_length=160, record_routes=True)
    todo = sequences(12, seed=1)
    same = [ask(todo[0].tokens * 3, seed=number) for number in range(4)]
    run(core, *todo, *same)
    again = [ask([*s.tokens, 7, 8, 9]) for s in (*todo, *same)]
    run(core, *again)
    assert core.cached_tokens > 200
    assert all(right(model, s) for s in (*todo, *same, *again))


def test_sequences_that_a_small_cache_preempts_keep_their_experts(model: Qwen3MoeForCausalLM) -> None:
    token_bytes = 2 * 2 * 32 * 4 + 2 * 2  # keys and values of two layers, and their experts
    core = EngineCore(model, max_batch=16, max_length=160, cache_bytes=250 * token_bytes, record_routes=True)
    todo = [ask([*range(3, 20), n], max_tokens=60, seed=n) for n in range(8)]
    run(core, *todo)
    assert core.preemptions > 0
    assert all(right(model, s) for s in todo)


def test_tokens_that_are_computed_again_under_new_weights_keep_their_first_experts(model: Qwen3MoeForCausalLM) -> None:
    core = EngineCore(model, max_batch=4, max_length=160, record_routes=True)
    sequence = ask(list(range(3, 40)), max_tokens=30)
    core.add(sequence)
    for _ in range(10):
        core.step()
    fed = len(sequence.tokens) - 1
    before = chosen(model, sequence.tokens[:-1])
    layers: Any = model.model.layers
    gates = [layer.mlp.gate.weight for layer in layers]
    with torch.no_grad():
        for gate in gates:
            gate.copy_(gate.flip(0))  # every router chooses by another order of the experts
    core.weights_changed()
    core.preempt()
    while core.unfinished:
        core.step()
    after = chosen(model, sequence.tokens[:-1])
    with torch.no_grad():
        for gate in gates:
            gate.copy_(gate.flip(0))
    assert sequence.routes is not None and not after[:fed].equal(before)
    routes = sequence.routes.long().sort(-1).values
    assert routes[:fed].equal(before) and routes[fed:].equal(after[fed:])


def test_an_aborted_sequence_has_the_experts_of_what_was_fed(model: Qwen3MoeForCausalLM) -> None:
    core = EngineCore(model, max_batch=1, max_length=160, record_routes=True)
    running, waiting = ask(list(range(3, 20)), max_tokens=90), ask([4, 5])
    for sequence in (running, waiting):
        core.add(sequence)
    for _ in range(5):
        core.step()
    core.abort(None)
    assert right(model, running) and len(running.tokens) == 17 + 6  # one of the first step's pass over the prompt
    assert waiting.routes is None and choice(waiting)["routed_experts"] is None


def test_what_is_not_to_be_recorded_is_not(model: Qwen3MoeForCausalLM) -> None:
    sequence = ask([3, 4, 5])
    run(EngineCore(model, max_batch=1, max_length=160), sequence)
    assert sequence.routes is None


def test_many_experts_take_two_bytes_and_layers_without_experts_are_zeros() -> None:
    model = sparse_model(num_experts=300, num_hidden_layers=3, mlp_only_layers=[1])
    sequence = ask(list(range(3, 33)))
    run(EngineCore(model, max_batch=1, max_length=160, record_routes=True), sequence)
    assert sequence.routes is not None and sequence.routes.dtype == torch.int16
    assert not sequence.routes[:, 1].any() and int(sequence.routes.max()) > 255

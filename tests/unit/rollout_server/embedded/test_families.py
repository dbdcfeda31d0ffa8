"""Each family that is served, on a tiny random model: log-probabilities are those of a plain forward pass."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_async.model_files import MIXERS
from rl_async.rollout_server.embedded.core import ATTENTION, SERVED, EngineCore
from rl_async.torch_shared import BLOCK
from rl_async.trainer.families import FAMILIES, logit_form
from tests.unit.rollout_server.embedded.test_core import assert_as_plain, sequences

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
ALL_SLIDING: dict[str, Any] = {"head_dim": 16, "layer_types": ["sliding_attention"] * 4, **WINDOWS}
DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHARED = {"shared_expert_intermediate_size": 16}
# States go on where they were.
STATES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_5_text", DELTA_NET),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8}),
    ("qwen3_5_moe_text", {**DELTA_NET, **EXPERTS, **SHARED}),
    ("qwen3_next", {**DELTA_NET, **EXPERTS, **SHARED}),
]
# Their layers have nothing that those of another family lack; `make test-slow` tries them.
ALIKE: list[tuple[str, dict[str, Any]]] = [
    ("arcee", {}),
    ("exaone4", {"head_dim": 16, "sliding_window": 8, "layer_types": MIXED}),
    ("ministral", {"head_dim": 16, "sliding_window": 8, "layer_types": MIXED}),
    ("olmo2", {}),
    ("olmo3", {"sliding_window": 8, "layer_types": MIXED}),
    ("seed_oss", {"head_dim": 16}),
    *STATES[2:],
]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "layer_types": MIXED}),
    ("llama", {}),
    ("mistral", {"sliding_window": 8}),
    ("mistral", {"sliding_window": None}),
    ("phi3", {"sliding_window": 8}),
    ("phi3", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3_moe", {"head_dim": 16, **EXPERTS}),
    ("smollm3", {"no_rope_layer_interval": 2}),
    *STATES[:2],
    *ALIKE,
]
PARAMETERS = [
    pytest.param(*case, id=f"{case[0]}-{n}", marks=[pytest.mark.slow] * (case in ALIKE)) for n, case in enumerate(KINDS)
]


def peaked(kind: str, more: dict[str, Any]) -> Any:
    """A model away from the flat distribution of a fresh one."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **more})
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.dim() >= 2 else 1.0)
    return model


@pytest.mark.parametrize(("kind", "more"), PARAMETERS)
def test_logprobs_agree_with_a_plain_forward_pass(kind: str, more: dict[str, Any]) -> None:
    model = peaked(kind, more)
    core = EngineCore(model, max_batch=8, max_length=128)
    todo = sequences(12, seed=1)
    for sequence in todo:
        sequence.max_tokens, sequence.stop_token_ids = 30, frozenset()
        core.add(sequence)
    while core.unfinished:
        core.step()
    again = sequences(12, seed=1)
    for sequence, before in zip(again, todo, strict=True):  # the next turn, on prefixes of the first
        sequence.tokens = [*before.tokens, 7, 8, 9]
        sequence.tokens = again[0].tokens if sequence is again[1] else sequence.tokens
        sequence.tokens = list(sequence.tokens)
        sequence.prompt_length, sequence.max_tokens = len(sequence.tokens), 10
        core.add(sequence)
    while core.unfinished:
        core.step()
    # Equal prompts are computed once, but prefixes of other prompts are not kept where layers carry a state.
    assert core.cached_tokens > (0 if kind in MIXERS else 200)
    assert_as_plain(model, (*todo, *again))


@pytest.mark.parametrize(("kind", "more"), [KINDS[0], KINDS[7], ("qwen3", ALL_SLIDING)], ids=["gemma3", "qwen2", "all"])
def test_windows_in_blocks_over_long_prompts_agree_with_a_plain_forward_pass(kind: str, more: dict[str, Any]) -> None:
    model = peaked(kind, more)
    served = copy.deepcopy(model)
    served.set_attn_implementation(ATTENTION)
    core = EngineCore(served, max_batch=4, max_length=2048)
    first, shorter = sequences(2, seed=1)
    first.tokens = (first.tokens * 1300)[: 2 * BLOCK + 100]
    for sequence in (first, shorter):
        sequence.prompt_length = len(sequence.tokens)
        core.add(sequence)
    while core.unfinished:
        core.step()
    (again,) = sequences(1, seed=2)  # goes on from what is known of the first, by more than a block
    again.tokens = [*first.tokens[:300], *(again.tokens * 1300)[: 2 * BLOCK]]
    again.prompt_length = len(again.tokens)
    core.add(again)
    while core.unfinished:
        core.step()
    assert core.cached_tokens > 280
    assert_as_plain(model, (first, shorter, again))


def test_every_family_that_is_served_is_tested_and_trained() -> None:
    assert {kind for kind, _ in KINDS} == set(SERVED) <= set(FAMILIES)
    for kind, more in KINDS:
        form = logit_form(AutoConfig.for_model(kind, **{**SIZES, **more}))
        assert (form.scale, form.softcap) == (1.0, None), "the engine neither scales nor caps logits"

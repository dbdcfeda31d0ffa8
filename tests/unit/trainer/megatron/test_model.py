"""Models that the Megatron backend was not taught, or that its ranks cannot share, are refused by name."""

import importlib.util
import itertools
import warnings
from types import ModuleType
from typing import Any

import pytest
from msgspec import convert
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 4096}
TINY: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.fixture(scope="module")
def megatron() -> ModuleType:
    """The module under test; importing Megatron-Core warns about what else it could use."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from rl_async.trainer.megatron import model as megatron_model
    return megatron_model


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GPT2Config(), "family 'gpt2'"),
        (LlamaConfig(hidden_act="gelu"), "activation 'gelu'"),
        (LlamaConfig(attention_bias=True), "biases"),
        (Qwen3Config(rope_parameters=YARN), "rotary embedding"),
        (Qwen2Config(use_sliding_window=True), "sliding window"),
        (Qwen3MoeConfig(mlp_only_layers=[0]), "mixes dense and sparse"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_model_has_that_is_not_known_is_named(
    megatron: ModuleType, config: PretrainedConfig, named: str
) -> None:
    with pytest.raises(UserError, match=rf"model\.path: somewhere .*{named}"):
        megatron.shape_of(config, "somewhere")


def test_the_shape_of_a_model_is_that_of_its_config(megatron: ModuleType) -> None:
    shape = megatron.shape_of(Qwen2Config(**TINY, vocab_size=77, tie_word_embeddings=True), "somewhere")
    assert (shape.layers, shape.heads, shape.groups, shape.head_dim, shape.vocab) == (4, 4, 2, 16, 77)
    assert shape.tied and shape.qkv_bias and not shape.qk_norm and shape.experts == 0


def test_a_critic_has_no_output_to_tie_and_is_named_by_its_own_key(megatron: ModuleType) -> None:
    hf = Qwen2Config(**TINY, tie_word_embeddings=True)
    heads = {head: megatron.shape_of(hf, "somewhere", head) for head in ("policy", "both", "value")}
    assert [shape.tied for shape in heads.values()] == [True, True, False]
    assert [shape.has_output for shape in heads.values()] == [False, False, False]
    with pytest.raises(UserError, match=r"critic\.path: somewhere .*family 'gpt2'"):
        megatron.shape_of(GPT2Config(), "somewhere", "value")
    with pytest.raises(UserError, match=r"critic\.path: .*trainer\.tensor_parallel=4"):
        megatron.require_divisible(heads["value"], places(tensor=4))


@pytest.mark.parametrize(
    ("experts", "sizes", "named"),
    [
        (0, {"tensor": 4}, "4 heads and 2 key-value heads .* trainer.tensor_parallel=4"),
        (0, {"tensor": 2, "context": 4}, "4 heads .* trainer.tensor_parallel=2 .* trainer.sequence_parallel=4"),
        (0, {"pipeline": 3}, "4 layers do not divide among 3 stages"),
        (0, {"pipeline": 4, "virtual": 2}, "4 layers do not divide among 8 stages"),
        (0, {"expert": 2}, "0 experts .* trainer.expert_parallel=2"),
        (8, {"expert": 3}, "8 experts .* trainer.expert_parallel=3"),
        (8, {"tensor": 2}, "trainer.tensor_parallel=2 .* trainer.expert_parallel above 1"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(
    megatron: ModuleType, experts: int, sizes: dict[str, int], named: str
) -> None:
    config = Qwen3MoeConfig(**TINY, num_experts=experts) if experts else Qwen3Config(**TINY)
    parallel = places(**sizes)
    with pytest.raises(UserError, match=named):
        megatron.require_divisible(megatron.shape_of(config, "somewhere"), parallel)
    megatron.require_divisible(megatron.shape_of(config, "somewhere"), places())


@pytest.mark.parametrize(
    ("replay", "sizes", "replays"),
    [
        ("auto", {"pipeline": 2, "expert": 2}, True),
        ("always", {"pipeline": 2, "expert": 2}, True),
        ("never", {"expert": 2}, False),
        ("auto", {"tensor": 2, "expert": 2}, False),
        ("never", {"tensor": 2, "expert": 2}, False),
        ("always", {"tensor": 2, "expert": 2}, None),
    ],
)
def test_routers_do_not_replay_where_ranks_share_tokens(
    megatron: ModuleType, replay: str, sizes: dict[str, int], replays: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    from rl_async.trainer.megatron.backend import replays_routers

    shape = megatron.shape_of(Qwen3MoeConfig(**TINY, num_experts=8), "somewhere")
    config = convert({"router_replay": replay}, TrainerConfig)
    if replays is None:
        with pytest.raises(UserError, match=r"trainer\.router_replay=always .* trainer\.tensor_parallel=2"):
            replays_routers(shape, places(**sizes), config)
        return
    assert replays_routers(shape, places(**sizes), config) == replays
    assert bool(caplog.records) == (replay == "auto" and not replays)


def test_a_dense_model_has_no_routers_to_replay(megatron: ModuleType) -> None:
    from rl_async.trainer.megatron.backend import replays_routers

    shape = megatron.shape_of(Qwen3Config(**TINY), "somewhere")
    assert not replays_routers(shape, places(tensor=2), TrainerConfig())
    with pytest.raises(UserError, match=r"trainer\.router_replay=always .* no experts"):
        replays_routers(shape, places(), TrainerConfig(router_replay="always"))


def test_one_rank_of_those_that_train_the_same_rows_records_them(megatron: ModuleType) -> None:
    from rl_async.trainer.megatron.model import Axis, Parallel

    def records(tensor: int, context: int, pipeline: int) -> bool:
        ranks = {"tensor": tensor, "context": context, "pipeline": pipeline, "data": 0, "expert": 0}
        axes = {name: Axis(2, rank, None) for name, rank in ranks.items()}  # type: ignore[arg-type]
        return Parallel(**axes, virtual_stages=1).data_parallel.is_recorder

    assert [ranks for ranks in itertools.product(range(2), repeat=3) if records(*ranks)] == [(0, 0, 0)]


def places(tensor: int = 1, pipeline: int = 1, expert: int = 1, virtual: int = 1, context: int = 1) -> Any:
    """The first of so many ranks, without groups."""
    from rl_async.trainer.megatron.model import Axis, Parallel

    axes = {
        name: Axis(size, 0, None)  # type: ignore[arg-type]
        for name, size in (
            ("tensor", tensor),
            ("context", context),
            ("pipeline", pipeline),
            ("data", 1),
            ("expert", expert),
        )
    }
    return Parallel(**axes, virtual_stages=virtual)

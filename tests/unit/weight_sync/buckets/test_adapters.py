"""Adapters alone: the same bits as merged weights, whatever is cut where, and refused for another base."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.messages import Version
from rl_async.weight_sync.buckets import CACHED, Bucket, adapter_buckets, add, as_adapters, numbered
from rl_async.weight_sync.protocol import UpdateInfo
from tests.support.buckets import make_buckets
from tests.support.effort import examples
from tests.support.received import Received, adapters, merged
from tests.support.rounding import assert_near, rounding

SCALE, RANK = 1.7, 5
SHAPES = {"up.weight": (48, 20), "norm.weight": (20,), "down.weight": (20, 48)}


def base(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}


def pair(shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(RANK, shape[1], generator=draw), torch.randn(shape[0], RANK, generator=draw)


def trained(seed: int = 1) -> dict[str, Tensor]:
    return adapters(base().items(), ("up", "down"), seed, RANK)


def publication(
    weights: dict[str, Tensor], named: dict[str, Tensor], step: int = 0, max_bytes: int = 1 << 20
) -> list[Bucket]:
    """The base and what is added to it, as they travel."""
    added = as_adapters(make_buckets(named.items(), max_bytes), SCALE)
    addressed = numbered([*make_buckets(weights.items(), max_bytes), *added], Version(0, step), "no")
    return [Bucket(b.data, msgspec.json.decode(msgspec.json.encode(b.info), type=UpdateInfo)) for b in addressed]


def bits(named: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in named.items()}


def test_the_sum_is_that_of_the_formula() -> None:
    weight = base(dtype=torch.float32)["up.weight"]
    low, high = pair((48, 20), 3)
    expected = weight.double() + SCALE * (high.double() @ low.double())
    size = weight.double().abs() + SCALE * (high.double().abs() @ low.double().abs())
    assert_near(add(weight, low, high, SCALE), expected, rounding(size, terms=RANK + 1))
    assert add(weight.bfloat16(), low, high, SCALE).dtype == torch.bfloat16


def test_a_row_has_the_same_bits_alone_and_in_a_matrix_of_several_blocks() -> None:
    wide = CACHED // 3
    low, high = pair((7, wide), 4)
    weight = torch.randn(7, wide, generator=torch.Generator().manual_seed(5)).bfloat16()
    whole = add(weight, low, high, SCALE)
    for row in range(7):
        (by_itself,) = add(weight[row : row + 1], low, high[row : row + 1], SCALE)
        assert torch.equal(whole[row], by_itself)


@settings(max_examples=examples(30))
@given(st.integers(4, 5000), st.sampled_from([torch.bfloat16, torch.float32]))
def test_an_engine_ends_with_the_bits_of_merged_weights(max_bytes: int, dtype: torch.dtype) -> None:
    weights, engine = base(dtype=dtype), Received()
    for step in range(3):  # each from the base anew
        named = trained(step)
        sent = publication(weights, named, step, max_bytes)
        found = engine.take(sent if step == 0 else adapter_buckets(sent))
        assert bits(found) == bits(dict(merged(weights.items(), named, SCALE)))


def test_adapters_for_another_base_are_refused_and_both_are_named() -> None:
    sent, other = publication(base(0), trained()), publication(base(1), trained())
    name, held = adapter_buckets(sent)[0].info.base, adapter_buckets(other)[0].info.base
    assert name != held
    engine = Received()
    with pytest.raises(WeightSyncError, match=name):
        engine.take(adapter_buckets(sent))
    engine.take(other)
    with pytest.raises(WeightSyncError, match=f"{name}.*{held}"):
        engine.take(adapter_buckets(sent))


def test_a_base_has_another_name_with_other_names_of_its_weights() -> None:
    weights, names = base(), []
    for renamed in (weights, {f"model.{name}": tensor for name, tensor in weights.items()}):
        names.append(publication(renamed, trained())[-1].info.base)
    assert names[0] != names[1]


def test_damaged_adapters_are_refused_and_nothing_is_loaded() -> None:
    engine, weights = Received(), base()
    before = bits(engine.take(publication(weights, trained(1))))
    (damaged,) = adapter_buckets(publication(weights, trained(2), 1))
    damaged.data[0] ^= 1
    with pytest.raises(WeightSyncError, match="checksum"):
        engine.take([damaged])
    engine.receiver.finish()
    assert bits(engine.weights) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up.lora_A.weight": None}, "up.lora_A.weight"),
        ({"up.lora_A.weight": torch.zeros(RANK, 19)}, r"up.weight .*\[48, 20\], .*A \[5, 19\]"),
        ({"up.lora_B.weight": torch.zeros(48, 4)}, r"up.weight .*\[48, 20\], .*B \[48, 4\]"),
        (
            {"no.lora_A.weight": torch.zeros(RANK, 2), "no.lora_B.weight": torch.zeros(2, RANK)},
            "no.weight",
        ),
    ],
)
def test_adapters_that_do_not_fit_their_base_are_refused(change: dict[str, Tensor | None], message: str) -> None:
    named = {name: tensor for name, tensor in (trained() | change).items() if tensor is not None}
    with pytest.raises(WeightSyncError, match=message):
        Received().take(publication(base(), named))

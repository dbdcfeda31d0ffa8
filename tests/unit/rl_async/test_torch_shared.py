"""What trainer and engines compute alike: logits in float32, and attention through a window."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from rl_async.accelerators import (
    ACCELERATORS,
    Accelerator,
    accelerator_here,
    backends_of,
    collectives_of,
    count_gpus,
    select_devices,
)
from rl_async.errors import UserError
from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.core import EngineCore, Sequence
from rl_async.torch_shared import BLOCK, output_logits, pick_device, widened, windowed
from rl_async.trainer.families import LogitForm
from rl_async.trainer.model import LogitHead, token_stats
from tests.support.rounding import assert_near, rounding


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
def test_logits_are_the_exact_products(biased: bool, kind: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=draw).to(kind) for shape in ((5, 24), (37, 24), (37,)))
    used = bias if biased else None
    exact = linear(hidden.double(), weight.double(), bias.double() if biased else None)
    # Each logit is a sum of 24 products and the bias, and the type of the result rounds it.
    size = hidden.double().abs() @ weight.double().abs().T + (bias.double().abs() if biased else 0.0)
    bound = rounding(size, terms=25, dtype=torch.promote_types(kind, torch.float32))
    got = output_logits(hidden, weight, used)
    assert got.dtype == torch.promote_types(kind, torch.float32)
    assert_near(got, exact, bound)
    assert torch.equal(output_logits(hidden, widened(weight), used), got)
    hidden.requires_grad_()
    differentiable = output_logits(hidden, weight, used)
    assert_near(differentiable, exact, bound)
    (gradient,) = torch.autograd.grad(differentiable.sum(), hidden)
    # It has the type of ``hidden``, and is a sum over 37 logits.
    of_gradient = rounding(weight.double().abs().sum(0), terms=37, dtype=kind).expand(5, -1)
    assert_near(gradient, weight.double().sum(0).expand(5, -1), of_gradient)


def peaked_model() -> LlamaForCausalLM:
    """In bfloat16, with logits of the size that a trained model has."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(60.0)
    return model.to(torch.bfloat16)


def test_engine_and_trainer_differ_less_than_by_the_rounding_of_logits() -> None:
    model = peaked_model()
    core = EngineCore(model, max_batch=8, max_length=64)
    todo = [
        Sequence(str(i), [1 + i, 2, 3 + 2 * i], Sampling(), 40, frozenset(), seed=i, deliver=lambda _: None)
        for i in range(8)
    ]
    for sequence in todo:
        core.add(sequence)
    while core.unfinished:
        core.step()
    differences: dict[str, list[Tensor]] = {"trainer": [], "rounded": []}
    for sequence in todo:
        ids, sampled = torch.tensor(sequence.tokens), torch.tensor(sequence.logprobs)
        with torch.no_grad():
            hidden = model.model(ids[None]).last_hidden_state[0, 2:-1]
            head = LogitHead(model.lm_head.weight, None, LogitForm())
            trained = token_stats(hidden, head, ids[3:], torch.ones(len(hidden))).logprobs
            rounded = model.lm_head(hidden).float().log_softmax(-1).gather(1, ids[3:, None])[:, 0]
        differences["trainer"].append((trained - sampled).abs())
        differences["rounded"].append((rounded - sampled).abs())
    mean = {name: torch.cat(parts).mean().item() for name, parts in differences.items()}
    assert mean["trainer"] < 0.7 * mean["rounded"], mean


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=sees)


def seen(queries: int, tokens: int, window: int | None) -> Tensor:
    """Bool [queries, tokens]."""
    distance = torch.arange(tokens - queries, tokens)[:, None] - torch.arange(tokens)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@pytest.mark.parametrize(
    ("queries", "tokens", "window"),
    [
        (2 * BLOCK + 3, 2 * BLOCK + 3, 5),  # a whole row in three blocks
        (BLOCK + 1, BLOCK + 90, 64),  # the end of one: its first window reaches before it
        (700, 1500, BLOCK + 1),  # windows longer than BLOCK, and a block with keys of all before it
        (40, 50, 64),
        (40, 50, None),
    ],
)
def test_blocks_give_what_the_whole_mask_gives(queries: int, tokens: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(queries)
    shapes = [(1, 2, count, 4) for count in (queries, tokens, tokens, queries)]
    q, k, v, slope = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    inputs = [part.requires_grad_() for part in (q, k, v)]
    whole = attend(q, k, v, seen(queries, tokens, window))
    blocks = windowed(q, k, v, window, attend)
    torch.testing.assert_close(blocks, whole)
    for found, right in zip(
        torch.autograd.grad(blocks, inputs, slope), torch.autograd.grad(whole, inputs, slope), strict=True
    ):
        torch.testing.assert_close(found, right)


def test_no_block_is_given_more_keys_than_its_windows_reach() -> None:
    sizes: list[tuple[int, int]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
        sizes.append((q.shape[2], k.shape[2]))
        return attend(q, k, v, sees)

    row = torch.zeros(1, 1, 10 * BLOCK, 2)
    windowed(row, row, row, 32, noted)
    assert max(sizes) == (BLOCK, BLOCK + 31) and len(sizes) == 10


NODES = {"NVIDIA": "nvidia{}", "AMD": "dri/renderD{}", "Ascend": "davinci{}"}


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=[one.make for one in ACCELERATORS])
def test_each_make_is_found_counted_and_selected(accelerator: object, tmp_path: Path) -> None:
    one = next(one for one in ACCELERATORS if one == accelerator)
    (tmp_path / "dri").mkdir()
    for index in range(3):
        (tmp_path / NODES[one.make].format(index)).touch()
    (tmp_path / one.driver).touch()
    assert accelerator_here(tmp_path) == one
    assert count_gpus({}, tmp_path) == 3
    assert count_gpus({one.visible: "0,2"}, tmp_path) == 2
    assert select_devices([0, 2], tmp_path) == {one.visible: "0,2"}


def test_a_display_is_no_accelerator(tmp_path: Path) -> None:
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    assert count_gpus({}, tmp_path) == 0


def test_collectives_are_those_that_torch_uses_by_itself() -> None:
    assert collectives_of("cuda") == torch.distributed.Backend.default_device_backend_map["cuda"]
    with pytest.raises(UserError, match="tpu"):
        collectives_of("tpu")


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=[one.make for one in ACCELERATORS])
def test_groups_use_the_collectives_of_the_make_and_gloo_on_the_host(accelerator: Accelerator) -> None:
    assert backends_of("cpu") == "gloo"
    parts = dict(part.split(":") for part in backends_of(accelerator.torch_device).split(","))
    assert parts == {"cpu": "gloo", accelerator.torch_device: accelerator.collectives}
    assert (
        accelerator.interface == {"nccl": "NCCL_SOCKET_IFNAME", "hccl": "HCCL_SOCKET_IFNAME"}[accelerator.collectives]
    )


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_device_that_is_not_here() -> None:
    assert pick_device("auto") == pick_device("cpu") == "cpu"
    with pytest.raises(UserError):
        pick_device("gpu")

"""Router replay: tokens go through the recorded experts, weights and gradients are the trainer's own."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from benchmarks.router_replay import distance, perturbed, sampled
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import DataError, UserError
from rl_async.model_files import experts_of
from rl_async.trainer.algorithms.rows import Rows
from rl_async.trainer.backend import Outputs
from rl_async.trainer.batches import MicroBatch
from rl_async.trainer.families import FAMILIES
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.model import REPLAYED, why_not_replayed
from rl_async.trainer.packing import Tensors, prefix_tree
from rl_async.trainer.publishing import Canary, compare
from rl_async.trainer.ranks import pure_data_parallel
from rl_async.trainer.update import LossSums
from tests.support.prefixes import loss_of, shared_rows
from tests.support.rounding import assert_as_close, assert_near, in_float64, pass_rounding, to_float64
from tests.support.sparse import sparse_model
from tests.unit.trainer.model.test_families import SPECIAL, VOCAB, saved
from tests.unit.trainer.model.test_prefix_sharing import TERMS, built

pytestmark = pytest.mark.usefixtures("one_rank")

LAYERS, EXPERTS, CHOSEN = 4, 4, 2


def recorded(batch: Tensors) -> Tensors:
    """The batch with experts drawn at random, and none for the last tokens of each row."""
    rows, width = batch.tokens.shape
    draw = torch.rand(rows, width, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(2))
    experts = draw.argsort(-1)[..., :CHOSEN].to(torch.int16)
    experts[torch.arange(width) >= batch.lengths[:, None] - 2] = -1
    return msgspec.structs.replace(batch, experts=experts, tree=None)


class Forced:
    """Replaces the routers of a plain model: the softmax over the logits of the recorded experts, of one row."""

    def __init__(self, model: Any) -> None:
        self.experts: Tensor | None = None
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = self._router(number, layer.mlp.gate)

    def _router(self, number: int, gate: Any) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            assert self.experts is not None
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            own = logits.topk(CHOSEN).indices
            record = self.experts[: len(logits), number].long()
            experts = torch.where(record < 0, own, record)
            inside = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
            of_all = logits.exp() / logits.exp().sum(-1, keepdim=True)
            weights = logits.masked_fill(~inside, -torch.inf).softmax(-1)
            weights = weights if getattr(gate, "norm_topk_prob", True) else of_all
            return logits, weights.gather(1, experts), experts

        return forward


def expected(model: Any, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities [B, T-1] of rows one by one, and the gradients of ``loss_of``."""
    forced, assembled = Forced(model), torch.zeros(batch.tokens.shape[0], batch.tokens.shape[1] - 1)
    rows = []
    assert batch.experts is not None
    for row, length in enumerate(batch.lengths.tolist()):
        forced.experts = batch.experts[row]
        ids = batch.tokens[row : row + 1, :length]
        logits = model(ids).logits[0, :-1].float() / batch.temperature[row, 0]
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        rows.append(torch.nn.functional.pad(logprobs, (0, assembled.shape[1] - length + 1)))
    logprobs = torch.stack(rows)
    loss_of(Outputs(logprobs), batch.lengths).backward()
    gradients = {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
    return logprobs.detach(), gradients


def computed(backend: Fsdp2Backend, batch: Tensors) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    outputs = backend.model.outputs(batch, frozenset())
    assert outputs.logprobs is not None and outputs.agreement is not None
    loss_of(msgspec.structs.replace(outputs, agreement=None), batch.lengths).backward()
    named = backend.model.named_parameters()
    gradients = {n.removeprefix("lm."): p.grad.full_tensor() for n, p in named if p.grad is not None}  # type: ignore[attr-defined]
    backend.model.zero_grad()
    return outputs.logprobs.detach(), gradients, outputs.agreement


@pytest.mark.parametrize(("kind", "checkpointed"), [(kind, kind != "mixtral") for kind in REPLAYED])
def test_experts_are_the_records_and_weights_and_gradients_the_routers(
    kind: str, checkpointed: bool, tmp_path: Path
) -> None:
    plain = saved(kind, tmp_path)
    batch = recorded(shared_rows(VOCAB))
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", TrainerConfig(activation_checkpointing=checkpointed))
    logprobs, gradients, agreement = computed(backend, batch)
    exactly = to_float64(copy.deepcopy(plain))
    wanted, wanted_gradients = expected(plain, batch)
    with in_float64():
        exact, exact_gradients = expected(exactly, batch)
    there = torch.arange(wanted.shape[1]) + 1 < batch.lengths[:, None]
    found, plainly, of_float64 = (
        {"logprobs": values[there], **of_weights}
        for values, of_weights in ((logprobs, gradients), (wanted, wanted_gradients), (exact, exact_gradients))
    )
    assert_as_close(found, plainly, of_float64, TERMS)
    for name in (f"model.layers.{n}.mlp.gate.weight" for n in range(LAYERS)):
        learnt = exact_gradients[name].abs().max()
        assert learnt > 1e-8, name
    free = msgspec.structs.replace(batch, experts=None)
    own = backend.model.outputs(free, frozenset()).logprobs
    assert own is not None and (own - wanted)[there].abs().max() > 1e-2, "the record changes nothing"
    assert 0.0 < agreement[there].mean() < 0.6, "two of four experts at random"


@pytest.mark.parametrize("checkpointed", [False, True])
def test_passes_may_all_precede_the_backward_passes(checkpointed: bool, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", TrainerConfig(activation_checkpointing=checkpointed))
    batch = recorded(shared_rows(VOCAB))
    other = msgspec.structs.replace(batch, experts=batch.experts.flip(0))  # type: ignore[union-attr]
    _, first, _ = computed(backend, batch)
    _, second, _ = computed(backend, other)
    outputs = [backend.model.outputs(x, frozenset()) for x in (batch, other)]
    for out in outputs:
        loss_of(msgspec.structs.replace(out, agreement=None), batch.lengths).backward()
    for name, part in backend.model.named_parameters():
        one, two = (gradients[name.removeprefix("lm.")] for gradients in (first, second))
        size = (one.abs() + two.abs()).max().item()
        bound = pass_rounding(size, LAYERS, TERMS, backward=True)
        assert_near(part.grad.full_tensor(), one + two, bound, name)  # type: ignore[union-attr]


def test_rows_share_what_they_begin_with_as_far_as_their_experts_are_the_same(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", TrainerConfig())
    batch = recorded(shared_rows(VOCAB))
    assert batch.experts is not None
    batch.experts[:] = batch.experts[:1]  # of the same places
    batch.experts[3:, 10:] = batch.experts[3:, 10:].flip(-2)
    rows = batch.tokens.numpy(), batch.lengths.tolist(), batch.temperature.flatten().tolist()
    batch.experts[torch.arange(batch.tokens.shape[1]) >= batch.lengths[:, None] - 2] = -1
    tree, blind = prefix_tree(*rows, experts=batch.experts.numpy()), prefix_tree(*rows)
    assert tree is not None and blind is not None
    assert len(blind.places) < len(tree.places) < int(batch.lengths.sum())
    together, shared, agreed = computed(backend, msgspec.structs.replace(batch, tree=tree))
    alone, apart, agreed_alone = computed(backend, batch)
    exactly = built(tmp_path, "float64", "policy", TrainerConfig())
    with in_float64():
        exact, exact_gradients, _ = computed(exactly, batch)
    there = torch.arange(alone.shape[1]) + 1 < batch.lengths[:, None]
    assert agreed[there].equal(agreed_alone[there])
    found, plainly, of_float64 = (
        {"logprobs": values[there], **of_weights}
        for values, of_weights in ((together, shared), (alone, apart), (exact, exact_gradients))
    )
    assert_as_close(found, plainly, of_float64, TERMS)


def test_records_of_other_models_are_refused(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", TrainerConfig())
    batch = recorded(shared_rows(VOCAB))
    assert batch.experts is not None
    for wrong in (batch.experts + EXPERTS, batch.experts[:, :, :2], batch.experts[..., :1]):
        with pytest.raises(DataError, match=r"model\.path"):
            backend.forward(msgspec.structs.replace(batch, experts=wrong))


@pytest.mark.parametrize(
    ("kind", "options", "replays", "fails"),
    [
        ("qwen3_moe", {}, True, False),
        ("qwen3_moe", {"router_replay": "always"}, True, False),
        ("qwen3_moe", {"router_replay": "never"}, False, False),
        ("qwen3_moe", {"compile": True}, False, False),
        ("qwen3_moe", {"compile": True, "router_replay": "always"}, False, True),
        ("deepseek_v3", {}, False, False),
        ("deepseek_v3", {"router_replay": "always"}, False, True),
        ("qwen3", {}, False, False),
        ("qwen3", {"router_replay": "always"}, False, True),
    ],
)
def test_what_cannot_replay_says_so(
    kind: str, options: dict[str, Any], replays: bool, fails: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(kind, tmp_path)
    config = TrainerConfig(**options)
    if fails:
        with pytest.raises(UserError, match=r"trainer\.router_replay=always"):
            Fsdp2Backend(str(tmp_path), "float32", "cpu", config)
        return
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", config)
    assert backend.replays_routers == replays
    told = any("not replayed" in record.getMessage() for record in caplog.records)
    assert told == (not replays and kind != "qwen3" and "router_replay" not in options)
    assert not Fsdp2Backend(str(tmp_path), "float32", "cpu", config, trains=False).replays_routers, "a reference"


def test_every_family_with_experts_is_known() -> None:
    sparse = {kind for kind in FAMILIES if experts_of(SimpleNamespace(**SPECIAL.get(kind, {})))}
    assert sparse == {*REPLAYED, "deepseek_v3"}
    config = SimpleNamespace(model_type="qwen3_moe")
    assert why_not_replayed(config, packs=False, compiled=False)
    assert why_not_replayed(config, packs=True, compiled=False) is None


def undecided(model: Any) -> Any:
    """The model with routers whose experts come in fours of almost one row: rounding decides among them.

    The experts of four are as different as any.
    """
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            for first in range(0, len(weight), 4):
                weight[first : first + 4] = weight[first] * (1 + 1e-4 * torch.arange(4)[:, None])
    return model


@pytest.mark.parametrize("engine", ["bfloat16", "perturbed"])
def test_replay_brings_the_trainer_closer_to_an_engine_whose_routers_decide_otherwise(
    engine: str, tmp_path: Path
) -> None:
    model = undecided(sparse_model())
    model.save_pretrained(tmp_path)
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", TrainerConfig())
    rows = sampled(model.bfloat16() if engine == "bfloat16" else perturbed(model), model.config.vocab_size)
    without, with_replay = (distance(backend, rows, replay=replay) for replay in (False, True))
    assert with_replay.agreement is not None and with_replay.agreement < 0.9
    assert without.k3 > 1e-3, "routers that decide otherwise matter"
    assert with_replay.k3 < 0.2 * without.k3
    assert with_replay.mean < 0.5 * without.mean
    assert with_replay.ess > without.ess


def test_canaries_are_compared_through_the_experts_that_they_were_sampled_with(tmp_path: Path) -> None:
    model = undecided(sparse_model())
    model.save_pretrained(tmp_path)
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", TrainerConfig())
    (one, *_) = sampled(perturbed(model), model.config.vocab_size)
    told = Canary("engine-0", one.token_ids.tolist(), one.logprobs[one.loss_mask].tolist(), one.routed_experts)
    through, alone = (compare(backend, [canary], 1.0) for canary in (told, replace(told, experts=None)))
    assert through is not None and alone is not None
    assert through.kl < 0.2 * alone.kl and through.largest < alone.largest
    assert compare(backend, [told, replace(told, experts=None)], 1.0) is not None, "one engine records none"


def test_agreement_is_of_the_first_pass_over_trained_tokens_with_a_record() -> None:
    batch = recorded(shared_rows(VOCAB))
    assert batch.experts is not None
    batch.mask = torch.ones(batch.tokens.shape[0], batch.tokens.shape[1] - 1, dtype=torch.bool)
    batch.mask[0] = False
    there = batch.mask & (batch.experts[:, :-1, 0, 0] >= 0)
    first = torch.where(there, 0.25, 1.0)
    first[there.nonzero()[0][0], there.nonzero()[0][1]] = 0.75
    sums, micro = LossSums(pure_data_parallel()), MicroBatch([3, 1], batch, Rows(torch.zeros(4, dtype=torch.int64)))
    assert "router/agreement" not in sums.metrics()
    for agreement in (first, torch.ones_like(first)):
        sums.add_routes(micro, Outputs(agreement=agreement))
    assert sums.metrics()["router/agreement"] == pytest.approx(0.25 + 0.5 / int(there.sum()))

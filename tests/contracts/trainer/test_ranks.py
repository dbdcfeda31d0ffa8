"""Ranks with a critic, with images on one of them, and with Muon learn together what one process learns."""

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.backend import Outputs
from rl_async.trainer.fsdp2 import Fsdp2Backend
from tests.conftest import VOCAB, save_tokenizer
from tests.contracts.backends.models import make_model
from tests.contracts.trainer.test_saver import go_on, same
from tests.contracts.trainer.test_training import LAYERS, TERMS
from tests.support.forked import joined, run_ranks
from tests.support.rounding import assert_trained_alike
from tests.support.tiny_models import save_vision_model
from tests.support.torchao import add_torchao
from tests.support.weights import whole_weights
from tests.unit.trainer.test_families import ROWS, row
from tests.unit.trainer.test_families import image_batch as batch

# Ranks that take twenty steps of Muon with drawn gradients.


STEPS = 20
TRAINING = {"optimizer": "muon", "learning_rate": 1e-2, "weight_decay": 0.1}


def gradient_of(step: int, name: str, shape: torch.Size) -> torch.Tensor:
    """The same for any number of ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + step))


@joined()
def muon_rank(model: str, out: str, options: str) -> None:
    backend = Fsdp2Backend(model, "float32", "cpu", msgspec.convert(TRAINING | json.loads(options), TrainerConfig))
    assert backend.optimizer is not None
    first = {name: parameter.full_tensor().detach().clone() for name, parameter in backend.model.named_parameters()}
    for step in range(STEPS):
        for name, parameter in backend.model.named_parameters():
            gradient = gradient_of(step, name, parameter.shape)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        backend.optimizer.step()
        backend.optimizer.zero_grad()
    found = {f"first|{name}": tensor for name, tensor in first.items()}
    for name, parameter in backend.model.named_parameters():
        found[f"last|{name}"] = parameter.full_tensor().detach()
        for key, moment in backend.optimizer.state[parameter].items():
            if isinstance(moment, DTensor):
                found[f"{key}|{name}"] = moment.full_tensor()
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)


# Ranks that train rows with images and others without, and write the weights.


RATE, IMAGE_STEPS = 1e-3, 2


@joined()
def images_rank(family: str, model: str, out: str) -> None:
    """Take steps on a micro-batch with images and one without, in turn or on a rank each."""
    backend = Fsdp2Backend(model, "float32", "cpu", TrainerConfig(learning_rate=RATE, grad_clip=1e6))
    assert backend.pictures is not None
    rows = [row(family, backend.pictures, number, *each) for number, each in enumerate(ROWS)]
    parts = [[each for each in rows if each.media], [each for each in rows if not each.media]]
    ranks, count = dist.get_world_size(), sum(len(each.token_ids) - 1 for each in rows)
    own = [batch(part, backend.pictures, share=False) for part in parts[dist.get_rank() :: ranks]]

    def loss(_: int, outputs: Outputs) -> Tensor:
        assert outputs.logprobs is not None
        return -outputs.logprobs.sum() / count

    for _ in range(IMAGE_STEPS):
        backend.step(own, loss)
    weights = whole_weights(backend)
    if dist.get_rank() == 0:
        save_file(weights, out)


# A critic on real gloo ranks: what is learned depends on neither ranks nor micro-batches, and survives a save.


CRITIC_KEYS = {f"critic/{name}" for name in ("loss", "explained_variance", "values_mean", "returns_mean", "grad_norm")}


def train(model: Path, out: Path, ranks: int, *arguments: str) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Run ``critic_worker`` on ``ranks`` processes."""
    run_ranks("tests.contracts.trainer.workers.critic", str(model), str(out), *arguments, ranks=ranks, timeout_s=120)
    return load_file(out / "tensors.safetensors"), json.loads((out / "metrics.json").read_text())


@pytest.mark.thinned("kind", 2)
@pytest.mark.parametrize(("kind", "correction"), [("own", "bypass_ppo_clip"), ("shared", "decoupled_token_is")])
def test_both_models_learn_the_same_on_any_ranks(
    model_folder: Path, tmp_path: Path, kind: str, correction: str
) -> None:
    whole, metrics = train(model_folder, tmp_path / "one", 1, "10000", kind, correction)
    split, split_metrics = train(model_folder, tmp_path / "two", 2, "60", kind, correction)
    # Four steps of two mini-batches each.
    assert_trained_alike(split, whole, rate=1e-3, steps=8, layers=LAYERS, terms=TERMS)
    for one, two in zip(metrics, split_metrics, strict=True):
        for name in ("batch/token_imbalance", "batch/work_imbalance"):
            assert one.pop(name) == 0.0 <= two.pop(name)  # of one rank, and of two
        assert one == pytest.approx(two, rel=1e-3, abs=1e-4)

    for tensors in (whole, split):
        for name in (n.removeprefix("kept.") for n in tensors if n.startswith("kept.")):
            assert tensors[f"kept.{name}"].equal(tensors[f"loaded.{name}"]), f"{name} did not survive the disk"
    heads = {name for name in whole if name.startswith("kept.") and "value_head" in name}
    owner = "critic" if kind == "own" else "."
    assert heads == {f"kept.{owner}.value_head.weight", f"kept.{owner}.value_head.bias"}
    assert all(whole[name].any() for name in heads)
    expected = CRITIC_KEYS if kind == "own" else CRITIC_KEYS - {"critic/grad_norm"}
    assert all({k for k in step if k.startswith("critic/")} == expected for step in metrics)


@pytest.mark.slow
def test_a_process_reward_model_learns_the_same_on_any_ranks_and_survives_a_save(
    model_folder: Path, tmp_path: Path
) -> None:
    whole, metrics = train(model_folder, tmp_path / "one", 1, "10000", "process", "decoupled_token_is")
    split, split_metrics = train(model_folder, tmp_path / "two", 2, "60", "process", "decoupled_token_is")
    assert_trained_alike(split, whole, rate=1e-3, steps=8, layers=LAYERS, terms=TERMS)
    for one, two in zip(metrics, split_metrics, strict=True):
        for name in ("accuracy", "loss", "process_reward_mean", "grad_norm"):
            assert one[f"critic/{name}"] == pytest.approx(two[f"critic/{name}"], rel=1e-3, abs=1e-4)
    kept = {name.removeprefix("kept.") for name in whole if name.startswith("kept.")}
    assert any(name.startswith("critic.") for name in kept) and not any("value_head" in name for name in kept)
    for tensors in (whole, split):
        for name in kept:
            assert tensors[f"kept.{name}"].equal(tensors[f"loaded.{name}"]), f"{name} did not survive the disk"


def test_the_policy_stands_still_while_its_critic_warms_up(model_folder: Path, tmp_path: Path) -> None:
    _, metrics = train(model_folder, tmp_path, 1, "10000", "own", "bypass_ppo_clip")
    assert [step["loss/grad_norm"] > 0 for step in metrics] == [False, True, True]
    assert all(step["critic/grad_norm"] > 0 for step in metrics)
    assert metrics[0]["critic/values_mean"] == 0.0, "a new head says 0"
    assert metrics[0]["correction/logprob_diff_max"] > 0, "the policy is still compared with the engines"


# Ranks of which only one has images: what they learn together is what one rank learns.


# Two steps show that no rank waits for gradients that another lacks, in packed rows and in padded ones.
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_rank_without_images_trains_the_tower_too(family: str, tmp_path: Path) -> None:
    save_vision_model(family, tmp_path / "model")
    weights = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.safetensors"
        module = "tests.contracts.trainer.test_ranks:images_rank"
        run_ranks(module, family, str(tmp_path / "model"), str(out), ranks=ranks, timeout_s=120)
        weights.append(load_file(out))
    # Each of the two micro-batches has fewer tokens than 400.
    assert_trained_alike(weights[1], weights[0], rate=RATE, steps=IMAGE_STEPS, layers=2, terms=400)


# Muon on gloo ranks does what torch's own does with whole matrices in one process, and continues bit by bit.


MUON_RATE, DECAY = TRAINING["learning_rate"], TRAINING["weight_decay"]


def matrices(name: str, tensor: Tensor) -> list[Tensor]:
    """The parts of a weight that Muon takes apart: experts, and of these the gate and up projection."""
    experts = tensor.unbind() if tensor.dim() == 3 else [tensor]
    return [part for expert in experts for part in expert.chunk(2 if name.endswith("experts.gate_up_proj") else 1)]


def expected(first: dict[str, Tensor]) -> dict[str, Tensor]:
    """What torch's Muon and AdamW make of whole weights."""
    is_matrix = {name: ".layers." in name and tensor.dim() > 1 for name, tensor in first.items()}
    parts = {name: [part.requires_grad_() for part in matrices(name, tensor.clone())] for name, tensor in first.items()}
    muon = torch.optim.Muon(
        [part for name in first if is_matrix[name] for part in parts[name]],
        lr=MUON_RATE,
        weight_decay=DECAY,
        adjust_lr_fn="match_rms_adamw",
    )
    others = [part for name in first if not is_matrix[name] for part in parts[name]]
    adamw = torch.optim.AdamW(others, lr=MUON_RATE, weight_decay=DECAY, betas=(0.9, 0.95), fused=True)
    for step in range(STEPS):
        for name, tensor in first.items():
            gradient = gradient_of(step, name, tensor.shape)
            for part, of in zip(parts[name], matrices(name, gradient), strict=True):
                part.grad = of
        muon.step()
        adamw.step()
    return {name: torch.cat(parts[name]).detach().view(tensor.shape) for name, tensor in first.items()}


@pytest.mark.parametrize(
    ("family", "ranks", "options"),
    [
        # Two ranks have whole experts of the one, and rows of each expert of the other.
        pytest.param("qwen3-moe", 2, {}, marks=pytest.mark.slow),
        ("qwen3-moe-odd", 2, {}),
        pytest.param("qwen3-moe-odd", 4, {"replicas": 2}, marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_are_those_of_whole_matrices(
    tmp_path: Path, family: str, ranks: int, options: dict[str, Any]
) -> None:
    make_model(family, tmp_path / "model")
    out = tmp_path / "found.safetensors"
    arguments = [str(tmp_path / "model"), str(out), json.dumps(options)]
    run_ranks("tests.contracts.trainer.test_ranks:muon_rank", *arguments, ranks=ranks)
    found = load_file(out)

    def kind(of: str) -> dict[str, Tensor]:
        return {key.partition("|")[2]: tensor for key, tensor in found.items() if key.startswith(f"{of}|")}

    right = expected(kind("first"))
    moments = kind("momentum_buffer")
    assert moments.keys() == {name for name, tensor in right.items() if ".layers." in name and tensor.dim() > 1}
    assert moments.keys().isdisjoint(kind("exp_avg")) and (moments | kind("exp_avg")).keys() == right.keys()
    for name, tensor in kind("last").items():
        assert tensor.equal(right[name]), name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_resumed_run_continues_bit_by_bit_on_any_ranks(model_folder: Path, tmp_path: Path) -> None:
    through, halves = tmp_path / "through", tmp_path / "halves"
    for root in (through, halves):
        root.mkdir()
    go_on(model_folder, through, 2, 0, 2, optimizer="muon")
    go_on(model_folder, halves, 2, 0, 1, optimizer="muon")
    saved = load_file(halves / "saved-2.safetensors")
    go_on(model_folder, halves, 1, 1, 1, optimizer="muon")
    assert same(saved, load_file(halves / "loaded-1.safetensors"))
    assert any(name.endswith("|momentum_buffer") and tensor.any() for name, tensor in saved.items())
    go_on(model_folder, halves, 2, 1, 2, optimizer="muon")
    assert same(load_file(through / "saved-2.safetensors"), load_file(halves / "saved-2.safetensors"))


# AdamW in 8 bits on gloo ranks: a resumed run continues bit by bit, also on others that divide whole blocks.


OPTIMIZER = {"optimizer": "adamw_8bit", "checkpoint_hf": False}


def make_experts_model(folder: Path, experts: int) -> Path:
    """A model with matrices of whole blocks, and vectors; two ranks divide the rows of each of three experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return save_tokenizer(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("experts", [4, 3])
def test_a_resumed_run_continues_bit_by_bit(tmp_path: Path, experts: int) -> None:
    add_torchao()
    model = make_experts_model(tmp_path / "model", experts)
    through, halves = tmp_path / "through", tmp_path / "halves"
    for root in (through, halves):
        root.mkdir()
    go_on(model, through, 2, 0, 2, **OPTIMIZER)
    go_on(model, halves, 2, 0, 1, **OPTIMIZER)
    saved = load_file(halves / "saved-2.safetensors")
    moments = {name for name in saved if "exp_avg" in name}
    codes, vectors = {n for n in moments if n.endswith("_codes")}, {n for n in moments if "norm.weight|" in n}
    assert codes and vectors and not codes & vectors and all(saved[name].dtype == torch.uint8 for name in codes)
    assert any("experts" in name for name in codes)
    go_on(model, halves, 2, 1, 2, **OPTIMIZER)
    assert same(saved, load_file(halves / "loaded-2.safetensors"))
    assert same(load_file(through / "saved-2.safetensors"), load_file(halves / "saved-2.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_ranks_continue_where_they_divide_whole_blocks_and_else_refuse(tmp_path: Path) -> None:
    add_torchao()
    for experts in (4, 3):
        model, root = make_experts_model(tmp_path / f"model-{experts}", experts), tmp_path / str(experts)
        root.mkdir()
        go_on(model, root, 2, 0, 1, **OPTIMIZER)
    four, three = tmp_path / "4", tmp_path / "3"
    saved = load_file(four / "saved-2.safetensors")
    go_on(tmp_path / "model-4", four, 1, 1, 2, **OPTIMIZER)
    assert same(saved, load_file(four / "loaded-1.safetensors"))
    go_on(tmp_path / "model-4", four, 4, 2, 3, replicas=2, **OPTIMIZER)
    assert same(load_file(four / "saved-1.safetensors"), load_file(four / "loaded-4.safetensors"))
    # One rank has its blocks of three experts one expert after the other, and two had the halves of each.
    with pytest.raises(AssertionError, match=r"trainer\.ranks"):
        go_on(tmp_path / "model-3", three, 1, 1, 2, **OPTIMIZER)
    with pytest.raises(AssertionError, match=r"trainer\.optimizer"):
        go_on(tmp_path / "model-4", four, 2, 1, 2, checkpoint_hf=False)

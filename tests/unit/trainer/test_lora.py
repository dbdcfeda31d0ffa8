"""Adapters on a real, tiny model: what trains, what engines get, what is on disk, and whom it belongs to."""

import copy
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_async.configs.derived import reference_is_base
from rl_async.configs.schema.algorithm import AlgorithmConfig, KlConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import LoraConfig, TrainerConfig
from rl_async.errors import UserError
from rl_async.trainer.actor_critic import PolicyView, build_models
from rl_async.trainer.export import write_model
from rl_async.trainer.fsdp2 import Fsdp2Backend
from tests.conftest import VOCAB
from tests.contracts.backends.models import loss_of, make_model, micro_batches, whole_batch
from tests.support.rounding import allowance, assert_near, in_float64, to_float64
from tests.support.weights import whole_weights

peft = pytest.importorskip("peft", reason="install it with pip install 'rl-async[lora]'")
pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings(
        "ignore:Detected call of `lr_scheduler.step",  # after a resume
        "ignore:`is_gradient_checkpointing`:FutureWarning",  # of PEFT's own use of Transformers
    ),
]
CONFIG = LoraConfig(rank=4, alpha=8, targets=("q_proj", "down_proj"))
TRAINING = TrainerConfig(learning_rate=1e-2, minibatches=1, lora=CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3", folder)
    return folder


def make(folder: Path, config: TrainerConfig = TRAINING, dtype: str = "float32") -> Fsdp2Backend:
    return Fsdp2Backend(str(folder), dtype, "cpu", config)


def train(backend: Fsdp2Backend, steps: int = 2) -> Fsdp2Backend:
    batches = micro_batches(range(8))
    for _ in range(steps):
        backend.step(batches, loss_of(batches), frozenset({"entropy"}))
    return backend


def equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.equal(other)


def exported(backend: Fsdp2Backend) -> dict[str, Tensor]:
    return whole_weights(backend)


def logprobs_of(model: torch.nn.Module) -> Tensor:
    """Log-probabilities [B, T-1] by a plain model."""
    (batch,) = whole_batch()
    with torch.no_grad():
        log_pi = (model(input_ids=batch.tokens).logits[:, :-1] / batch.temperature).log_softmax(-1)
    return log_pi.gather(2, batch.tokens[:, 1:, None]).squeeze(2)


def assert_same_logprobs(backend: Fsdp2Backend, model: torch.nn.Module) -> None:
    (batch,) = whole_batch()
    got = backend.forward(batch).logprobs
    real = torch.arange(batch.mask.shape[1]) < batch.lengths[:, None] - 1
    assert got is not None
    plain, exactly = logprobs_of(model)[real], to_float64(copy.deepcopy(model))
    with in_float64():
        exact = logprobs_of(exactly)[real]
    assert_near(got[real], exact, allowance(plain, exact, terms=batch.mask.shape[1] + VOCAB), "logprobs")


def test_the_model_begins_as_its_base(folder: Path) -> None:
    backend, base = make(folder), load_file(folder / "model.safetensors")
    found = exported(backend)
    assert found.keys() == base.keys()
    assert all(found[name].equal(tensor) for name, tensor in base.items())
    assert_same_logprobs(backend, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def test_the_reference_is_the_policy_without_its_adapters(folder: Path) -> None:
    config = RunConfig(
        model=ModelConfig(path=str(folder), dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(kl=KlConfig(coef=0.1)),
        trainer=TRAINING,
    )
    models, (batch,) = build_models(config, "cpu"), whole_batch()
    policy, reference = models.policy, models.reference
    assert isinstance(policy, Fsdp2Backend) and isinstance(reference, PolicyView)
    loaded = Fsdp2Backend(str(folder), "float32", "cpu", TRAINING, trains=False)
    train(policy)
    trained, wanted = policy.forward(batch).logprobs, loaded.forward(batch).logprobs
    assert trained is not None and wanted is not None and not trained.equal(wanted)
    assert equal(reference.forward(batch).logprobs, wanted)
    assert equal(policy.forward(batch).logprobs, trained), "adapters count again"
    train(policy)
    assert equal(reference.forward(batch).logprobs, wanted)
    assert not equal(policy.forward(batch).logprobs, trained), "they learn"


@pytest.mark.parametrize("kl", [KlConfig(coef=0.1, estimator="full"), KlConfig(coef=0.1, reference_path="other")])
def test_other_references_are_models_of_their_own(kl: KlConfig) -> None:
    config = RunConfig(
        model=ModelConfig(path="m"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(kl=kl),
        trainer=TRAINING,
    )
    assert not reference_is_base(config, experts=False)


def test_engines_get_the_base_with_what_the_adapters_learned(folder: Path) -> None:
    backend, base = train(make(folder)), load_file(folder / "model.safetensors")
    found = exported(backend)
    changed = {name for name, tensor in base.items() if not found[name].equal(tensor)}
    assert changed == {name for name in base if name.endswith(("q_proj.weight", "down_proj.weight"))}
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = logprobs_of(plain)
    plain.load_state_dict(found)
    assert (logprobs_of(plain) - before).abs().max() > 1e-2
    assert_same_logprobs(backend, plain)


def test_a_checkpoint_has_adapters_alone_and_goes_on(folder: Path, tmp_path: Path) -> None:
    backend = train(make(folder))
    backend.save(tmp_path)
    held = [name for file in (tmp_path / "shards").iterdir() for name in load_file(file)]
    assert held and all(".lora_" in name or name == "schedule|steps" for name in held)
    resumed = make(folder)
    resumed.load(tmp_path)
    for one, two in ((exported(backend), exported(resumed)), (exported(train(backend)), exported(train(resumed)))):
        assert all(one[name].equal(two[name]) for name in one)


@pytest.mark.parametrize("stabilized", [False, True])
def test_others_read_the_merged_model_and_the_adapter(folder: Path, tmp_path: Path, stabilized: bool) -> None:
    lora = LoraConfig(rank=4, alpha=8, rank_stabilized=stabilized, targets=CONFIG.targets)
    assert lora.scale == (4 if stabilized else 2)
    backend = train(make(folder, TrainerConfig(learning_rate=1e-2, minibatches=1, lora=lora)))
    backend.save(tmp_path)
    merged = load_file(tmp_path / "model" / "model.safetensors")
    found = exported(backend)
    assert merged.keys() == found.keys()
    assert all(merged[name].equal(tensor) for name, tensor in found.items())
    assert_same_logprobs(backend, AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_same_logprobs(backend, peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))


def test_a_frozen_base_is_held_in_the_type_that_it_computes_in(folder: Path) -> None:
    backend = make(folder, dtype="bfloat16")
    kinds = {(".lora_" in name, parameter.dtype) for name, parameter in backend.model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    before, after = exported(backend), exported(train(backend))
    assert any(not before[name].equal(after[name]) for name in before)


def test_adapters_go_on_with_their_base_alone(folder: Path, tmp_path: Path) -> None:
    adapters, whole, other = tmp_path / "adapters", tmp_path / "whole", tmp_path / "other"
    for path in (adapters, whole):
        path.mkdir()
    make(folder).save(adapters)
    plain = TrainerConfig(minibatches=1)
    train(make(folder, plain)).save(whole)
    with pytest.raises(UserError, match=r"adapters.* trainer\.lora"):
        make(folder, plain).load(adapters)
    with pytest.raises(UserError, match=r"whole weights.* trainer\.lora"):
        make(folder).load(whole)
    with pytest.raises(UserError, match=r"model\.path"):
        make(whole / "model").load(adapters)
    with pytest.raises(UserError, match=r"use_rslora.* trainer\.lora"):
        make(folder, TrainerConfig(lora=msgspec.structs.replace(CONFIG, rank_stabilized=True))).load(adapters)
    with pytest.raises(UserError, match=r"r, lora_alpha.* trainer\.lora"):
        make(folder, TrainerConfig(lora=LoraConfig(rank=8, alpha=16, targets=CONFIG.targets))).load(adapters)
    make_model("qwen3", other)
    make(other).save(adapters)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=str(other)):
        write_model(adapters)


def test_a_target_that_is_not_there_is_named_with_those_that_are(folder: Path) -> None:
    lora = LoraConfig(targets=("q_proj", "lm_head"))
    with pytest.raises(UserError, match=r"trainer\.lora\.targets: lm_head.*down_proj, .*q_proj"):
        make(folder, TrainerConfig(lora=lora))
    every = make(folder, TrainerConfig(lora=LoraConfig())).model.named_parameters()
    assert len({name for name, _ in every if ".lora_A." in name}) == 4 * 7

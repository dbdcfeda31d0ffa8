"""A checkpoint as the first format had it, made out of one of today: whole tensors, no manifest, no format."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from rl_async.configs.schema.algorithm import AlgorithmConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.actor_critic import Models, build_models
from rl_async.trainer.checkpoints import (
    FORMAT,
    MOMENT,
    CheckpointState,
    Saver,
    load_checkpoint,
    newest_whole,
    write_whole,
)
from rl_async.trainer.export import SHARDS, export
from rl_async.trainer.fsdp2 import Fsdp2Backend
from tests.contracts.trainer.workers.critic import CRITICS, state, train

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # where a schedule goes on from


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def moments(models: Models) -> dict[str, Tensor]:
    found = {}
    for folder, model in models.trained().items():
        assert isinstance(model, Fsdp2Backend) and model.optimizer is not None
        for name, parameter in model.model.named_parameters():
            for key, value in model.optimizer.state[parameter].items():
                found[f"{folder}.{name}.{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def made_first(checkpoint: Path, models: Models) -> None:
    """Rewrite it as the first format."""
    for name in models.trained():
        folder = checkpoint / name
        write_whole(folder / SHARDS, folder / "optimizer.safetensors", lambda n: n if MOMENT in n else None)
        shutil.rmtree(folder / SHARDS)
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "state.json").write_text('{"step":2,"lineage":1,"kl_coef":0.25}')


@pytest.mark.parametrize("kind", CRITICS)
def test_it_is_gone_on_from_and_exported(model_folder: Path, tmp_path: Path, kind: str) -> None:
    config = RunConfig(
        model=ModelConfig(path=str(model_folder), dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(advantage="gae", correction="bypass_ppo_clip"),
        critic=CRITICS[kind],
        trainer=TrainerConfig(learning_rate=1e-3, minibatches=1, max_tokens_per_microbatch=60),
    )
    models = build_models(config, "cpu")
    for step in range(2):
        train(models, step, config)
    saver = Saver(tmp_path / "checkpoints", keep=1, timeout_s=60)
    saver.save(models.trained(), CheckpointState(step=2, lineage=1, kl_coef=0.25, format=FORMAT), b"snapshot")
    saver.wait()
    checkpoint = tmp_path / "checkpoints" / "step-000002"
    made_first(checkpoint, models)

    again = build_models(config, "cpu")
    assert newest_whole(tmp_path / "checkpoints") == checkpoint
    assert load_checkpoint(checkpoint, again.trained()) == (CheckpointState(2, 1, 0.25), b"snapshot")
    weights, read = (state(one, tmp_path / name) for one, name in ((models, "written"), (again, "read")))
    for found, wanted in ((read, weights), (moments(again), moments(models))):
        assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)

    (tmp_path / ".policy.12345").mkdir()  # of an export that was killed
    assert export(tmp_path, tmp_path / "policy") == 2
    assert not list(tmp_path.glob(".policy.*"))
    policy = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "policy").named_parameters())
    assert all(tensor.equal(weights[f"export.{name}"]) for name, tensor in policy.items())
    if kind == "own":
        export(tmp_path, tmp_path / "critic", part="critic")
        critic = dict(AutoModel.from_pretrained(tmp_path / "critic").named_parameters())
        assert all(tensor.equal(weights[f"critic.{name}"]) for name, tensor in critic.items())
        head = load_file(tmp_path / "critic" / "value_head.safetensors")
        assert head["weight"].equal(weights["critic.value_head.weight"]) and head["weight"].any()

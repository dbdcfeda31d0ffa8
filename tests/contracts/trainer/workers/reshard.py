"""One rank that makes a checkpoint out of trained weights, or goes on from one; started by test_saver.py."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rl_async.configs.schema.algorithm import AlgorithmConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.actor_critic import build_models
from rl_async.trainer.checkpoints import FORMAT, CheckpointState, Saver, load_checkpoint
from rl_async.trainer.fsdp2 import Fsdp2Backend
from tests.contracts.trainer.workers.critic import train
from tests.support.torchao import add_torchao


def run(model: Path, root: Path, before: int, after: int, options: TrainerConfig) -> None:
    """Load the checkpoint of step ``before``, unless that is 0; train up to ``after`` steps and save them.

    Rank 0 leaves every tensor, put together, in loaded-N and saved-N.safetensors, N being the number of ranks.
    """
    if options.optimizer == "adamw_8bit":
        add_torchao()
    config = RunConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(correction="bypass_ppo_clip"),
        trainer=options,
    )
    models = build_models(config, "cpu")
    if before:
        load_checkpoint(root / f"step-{before:06d}", models.trained())
    leave_tensors(models.policy, root / f"loaded-{dist.get_world_size()}.safetensors")
    saver = Saver(root, keep=9, timeout_s=60)
    for step in range(before, after):
        train(models, step, config)
    state = CheckpointState(step=after, lineage=0, kl_coef=0.0, format=FORMAT)
    saver.save(models.trained(), state, b"")
    leave_tensors(models.policy, root / f"saved-{dist.get_world_size()}.safetensors")
    train(models, after, config)  # while it is written: the copy must not change
    saver.wait()


def leave_tensors(policy: object, path: Path) -> None:
    """Weights, and what AdamW keeps."""
    assert isinstance(policy, Fsdp2Backend) and policy.optimizer is not None
    tensors = {}
    for name, parameter in policy.model.named_parameters():
        tensors[name] = parameter.full_tensor().detach().clone()
        for key, value in policy.optimizer.state.get(parameter, {}).items():
            tensors[f"{name}|{key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    if dist.get_rank() == 0:
        save_file(tensors, path)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    training = TrainerConfig(learning_rate=1e-3, minibatches=2, max_tokens_per_microbatch=60, **json.loads(sys.argv[5]))
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), training)
    dist.destroy_process_group()

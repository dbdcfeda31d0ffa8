"""The same code on a CUDA device: trainer log-probabilities, a step, the engine's sampling, the weights' way across."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_async.configs.schema.algorithm import AlgorithmConfig, CriticConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.core import EngineCore, Sequence
from rl_async.trainer.actor_critic import build_models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.batch_layout import RowCost
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.update import update
from rl_async.weight_sync.buckets import unpack
from tests.conftest import make_rows
from tests.support.weights import make_buckets, whole_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("critic", [None, CriticConfig(), CriticConfig(shared=True)], ids=["none", "own", "shared"])
def test_training_step_and_export_on_cuda(model_folder: Path, critic: CriticConfig | None) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = RunConfig(
            model=ModelConfig(path=str(model_folder), dtype="float32", device="gpu"),
            data=DataConfig(path="none"),
            algorithm=AlgorithmConfig(advantage="gae" if critic else "grpo"),
            critic=critic,
            trainer=TrainerConfig(learning_rate=1e-3),
        )
        models = build_models(config, "cuda:0")
        rows = make_rows(0)
        headers = [row.header() for row in rows]
        batch = Batch(0, headers, plan_batch(headers, 0, config, 1, RowCost()), {row.key: row for row in rows})
        metrics = update(models, batch, build(config), config).metrics
        assert metrics["loss/grad_norm"] > 0
        assert (critic is None) == ("critic/loss" not in metrics)
        models.sleep()
        models.wake()
        exported = whole_weights(models.policy)
        for bucket in make_buckets(iter(exported.items()), 1 << 16):
            for piece in unpack(bucket.data, bucket.info):
                sent = exported[piece.name].cpu().view(-1)[piece.start : piece.start + piece.data.numel()]
                assert torch.equal(piece.data, sent)
    finally:
        dist.destroy_process_group()


def test_the_engine_agrees_with_a_plain_forward_pass_on_cuda(model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval().to("cuda")
    core = EngineCore(model, max_batch=8, max_length=64)
    todo = [
        Sequence(str(i), list(range(3, 8 + i)), Sampling(), 20, frozenset(), None, lambda _: None) for i in range(20)
    ]
    for sequence in todo:
        core.add(sequence)
    while core.waiting or core.running:
        core.step()
    for sequence in todo:
        with torch.no_grad():
            logprobs = model(torch.tensor([sequence.tokens], device="cuda")).logits[0].float().log_softmax(-1).cpu()
        start = sequence.prompt_length
        expected = logprobs[range(start - 1, len(sequence.tokens) - 1), sequence.sampled]
        assert (expected - torch.tensor(sequence.logprobs)).abs().max() < 1e-3  # tf32 and other kernels

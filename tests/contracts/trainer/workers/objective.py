"""One rank that takes the gradient of whole steps, split in many ways; started by test_objective.py.

The model is a table of bigram logits in float64: small enough for every loss, exact enough that only a mistake in what
is divided by what, or in what is picked from where, can make two splits differ.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rl_async.configs.schema.algorithm import (
    LOSSES,
    AlgorithmConfig,
    KlConfig,
    LossOptions,
    TeacherConfig,
    TeacherModelConfig,
)
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.messages import Trajectory
from rl_async.trainer.actor_critic import Models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.algorithms.losses import AGGREGATIONS
from rl_async.trainer.backend import LossFn, OutputName, Outputs, policy_outputs
from rl_async.trainer.batch_layout import MiniBatch, RowCost
from rl_async.trainer.batches import Batch
from rl_async.trainer.packing import Tensors
from rl_async.trainer.ranks import DataParallel, pure_data_parallel
from rl_async.trainer.teacher import Teachers
from rl_async.trainer.update import update
from tests.conftest import VOCAB, make_rows

KL_COEF = 0.1
LEARNING_RATE = 20.0  # in the second epoch a fifth of the ratios are outside the clip, and some outside every bound
TEACHER_COEF = 0.7
TOP_K = 3
EPOCHS = 2
ORDER = [3, 0, 6, 1, 5, 2, 4]
DIVERGENCES = ("reverse", "forward", "jsd")
SPLITS: dict[int, dict[str, list[list[list[int]]]]] = {  # ranks -> name -> rank -> micro-batch -> rows
    1: {f"{n} micro-batches": [[part.tolist() for part in torch.tensor(ORDER).tensor_split(n)]] for n in (1, 2, 4, 7)},
    2: {"2 ranks": [[[3, 0, 6], [1]], [[5, 2, 4], []]]},
}
OPTIONS = LossOptions(
    clip_dual=1.5,
    decoupled_cap=1.1,
    dppo_tv=0.01,
    dppo_kl=0.005,
    ipo=0.006,
    m2po=0.02,
    clip_cov_share=0.2,
    clip_cov_low=0.0,
    kl_cov_share=0.2,
)


class Table:
    """A backend on one table [V, V]: the logits of the next token, by the token before. Keeps its gradients."""

    device = "cpu"
    row_cost = RowCost()
    replays_routers = False
    pictures = None

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.table = (0.3 * torch.randn(VOCAB, VOCAB, generator=draw, dtype=torch.float64)).requires_grad_()
        self.gradients: list[Tensor] = []

    @property
    def data_parallel(self) -> DataParallel:
        return pure_data_parallel()

    def outputs(self, batch: Tensors, requested: frozenset[OutputName]) -> Outputs:
        return policy_outputs(self.table[batch.tokens[:, :-1]] / batch.temperature, batch.tokens[:, 1:], requested)

    def forward(self, batch: Tensors, requested: frozenset[OutputName] = frozenset()) -> Outputs:
        with torch.no_grad():
            return self.outputs(batch, requested)

    def step(
        self, batches: Sequence[Tensors], loss_fn: LossFn, requested: frozenset[OutputName] = frozenset()
    ) -> tuple[float, float]:
        total = 0.0
        for number, batch in enumerate(batches):
            loss = loss_fn(number, self.outputs(batch, requested))
            loss.backward()
            total += loss.item()
        gradient = self.table.grad
        assert gradient is not None
        dist.all_reduce(gradient)
        self.gradients.append(gradient.clone())
        with torch.no_grad():
            self.table -= LEARNING_RATE * gradient
        self.table.grad = None
        return total, gradient.norm().item()


def variants() -> Iterator[tuple[str, AlgorithmConfig]]:
    """Every loss with a full KL and entropy; then every aggregation, and where the KL and pi_old come from."""
    base = AlgorithmConfig(loss_options=OPTIONS, entropy_coef=0.05, kl=KlConfig(coef=KL_COEF, estimator="full"))
    for loss in LOSSES:
        correction = "disabled" if loss == "decoupled_ppo" else "decoupled_token_is"
        yield loss, msgspec.structs.replace(base, loss=loss, correction=correction)
    for aggregation in AGGREGATIONS:
        yield aggregation, msgspec.structs.replace(base, loss="gspo", aggregation=aggregation)
    yield "sampled KL", msgspec.structs.replace(base, kl=KlConfig(coef=KL_COEF, estimator="k3+"))
    yield "KL in the reward", msgspec.structs.replace(base, kl=KlConfig(coef=KL_COEF, place="reward"))
    yield "bypass", msgspec.structs.replace(base, correction="bypass_ppo_clip")
    yield "bypass select", msgspec.structs.replace(base, correction="bypass_ppo_clip", loss="clip_cov")
    taught = TeacherConfig(path="none", coef=TEACHER_COEF)
    alone = AlgorithmConfig(loss="reinforce", correction="disabled", teacher=taught)
    yield "teacher sampled", alone
    for divergence in DIVERGENCES:
        teacher = msgspec.structs.replace(taught, divergence=divergence, beta=0.3 if divergence == "jsd" else 0.5)
        yield f"teacher {divergence}", msgspec.structs.replace(alone, teacher=teacher)
    likeliest = msgspec.structs.replace(taught, divergence="forward", top_k=TOP_K)
    yield "teacher top", msgspec.structs.replace(alone, teacher=likeliest)
    # The third source has no teacher.
    model = TeacherModelConfig(path="none")
    several = TeacherConfig(by_source={"one": model, "two": model}, coef=TEACHER_COEF)
    for divergence in ("sampled", "reverse"):
        teacher = msgspec.structs.replace(several, divergence=divergence)
        yield f"teachers {divergence}", msgspec.structs.replace(alone, teacher=teacher)
    both = msgspec.structs.replace(taught, divergence="forward", rewards=True)
    yield "teacher, rewards and KL", msgspec.structs.replace(base, kl=KlConfig(coef=KL_COEF), teacher=both)


def recorded() -> list[Trajectory]:
    """Seven rows, of which two are one episode."""
    rows = make_rows(0, groups=2, samples=4)[:7]
    rows[1].episode_id = rows[0].episode_id
    for row, source in zip(rows, ["one", "two", "three", "one", "two", "three", "one"], strict=True):
        row.data_source = source
    return rows


def run_config(algorithm: AlgorithmConfig) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        algorithm=algorithm,
        trainer=TrainerConfig(epochs=EPOCHS, minibatches=1),
    )


def gradients(algorithm: AlgorithmConfig, split: list[list[list[int]]]) -> tuple[list[Tensor], dict[str, float]]:
    """The gradient of each epoch, and the step's metrics."""
    rows, config = recorded(), run_config(algorithm)
    headers = [row.header() for row in rows]
    plan = [MiniBatch(ranks=split, rows=sorted(ORDER))]
    batch = Batch(0, headers, plan, {row.key: row for row in rows})
    policy, kl = Table(0), algorithm.kl
    reference = Table(1) if kl.coef > 0 else None
    taught = algorithm.teacher
    # Tables are not exported or saved.
    tables = {name: Table(2 + number) for number, name in enumerate(sorted(taught.models if taught else {}))}
    teachers = Teachers(tables, all_rows=False) if tables else None  # type: ignore[arg-type]
    models = Models(policy, reference, teachers=teachers)  # type: ignore[arg-type]
    return policy.gradients, update(models, batch, build(config), config, kl.coef).metrics


def run(out: Path) -> None:
    """Every variant under every split for this number of ranks; rank 0 writes them."""
    tensors = {}
    for name, algorithm in variants():
        for split, layout in SPLITS[dist.get_world_size()].items():
            found, metrics = gradients(algorithm, layout)
            tensors |= {f"{name}|{split}|gradient {epoch}": each for epoch, each in enumerate(found)}
            tensors |= {f"{name}|{split}|{key}": torch.tensor(v, dtype=torch.float64) for key, v in metrics.items()}
    if dist.get_rank() == 0:
        save_file(tensors, out)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run(Path(sys.argv[1]))
    dist.destroy_process_group()

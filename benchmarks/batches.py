"""What a batch costs with the tail of its lengths, with the number of its rows, and of those who read it.

    python -m benchmarks.batches [--repeats 3] [--json FILE]

``tail_memory``: memory that a step takes at most on a batch of 4,096 rows of which one has 131,072 tokens and the
others 300, over that on as many tokens in 4,096 rows of one length: 1 if it follows from the tokens, 400 if every row
takes as much as the longest. The models' own work is left out: log-probabilities are looked up in a table, and each
optimizer step does nothing. ``tail_memory_gae``: the same with GAE and the whole step of its critic.
``*_bytes_per_token`` say how much the one with the tail is.

``layout_growth``: seconds of laying 8,192 rows out on 512 ranks over those of 4,096 on 256; 2.2 if they grow as
n log n, 4 as rows times ranks. ``layout_shared_growth``: the same where groups of eight share a prompt.
``layout_mib``: memory that the larger one takes at most, rows and result included.

``acknowledge_growth``: processor time of an acknowledgement by a consumer who reads 40,000 groups that the trainer has
retired, group by group, over that of 10,000; 1 if it does not depend on how many are kept.
"""

import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.algorithms import peak_rise
from benchmarks.processes.command_line import parser, save
from rl_async.configs.schema.algorithm import AlgorithmConfig, CriticConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.messages import Sampling, Task, Trajectory, Version, VersionRun
from rl_async.trainer.actor_critic import Models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.backend import LossFn, Outputs
from rl_async.trainer.batch_layout import RowCost, layout
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.packing import Tensors
from rl_async.trainer.ranks import DataParallel
from rl_async.trainer.update import update
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.book import Book
from rl_async.transfer_queue.registry import Consumers, ConsumersState, Cursor, Entry, Kept
from rl_async.transfer_queue.transitions import Transition

GROUP = 8
PROMPT_TOKENS = 256
VOCABULARY = 1024


@dataclass(frozen=True)
class Row:
    """What ``layout`` reads of a header."""

    tokens: int
    prompt: int
    prompt_tokens: int = PROMPT_TOKENS
    baseline: bool = False


def lay_out(rows: int, ranks: int, shares_prefixes: bool) -> None:
    """Lay out rows whose lengths have a heavy tail."""
    answers = np.random.default_rng(rows).lognormal(6, 1, rows).astype(int) + 1
    headers = [Row(PROMPT_TOKENS + tokens, number // GROUP) for number, tokens in enumerate(answers.tolist())]
    cost = RowCost(linear=8192, quadratic=1, shares_prefixes=shares_prefixes)
    layout(headers, step=0, minibatches=1, ranks=ranks, max_tokens=16384, seed=0, cost=cost)


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median processor time of this thread."""
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return statistics.median(times)


def layout_figures(repeats: int) -> dict[str, float | None]:
    """Time and memory of layouts."""
    found: dict[str, float | None] = {}
    for name, shares in (("layout_growth", False), ("layout_shared_growth", True)):
        few = seconds(partial(lay_out, 4096, 256, shares), repeats)
        many = seconds(partial(lay_out, 8192, 512, shares), repeats)
        found |= {name: many / few, f"{name.removesuffix('_growth')}_s": many}
    tracemalloc.start()
    lay_out(8192, 512, False)
    found["layout_mib"] = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return found


def read_shelf(groups: int) -> float:
    """Seconds of an acknowledgement while a shelf of so many groups is read to its end."""

    def change(event: Transition) -> None:
        consumers.effects[type(event)](event)

    settings = QueueSettings(steps=1, batch_groups=1, group_size=1)
    consumers = Consumers(Book(settings, b""), change)
    kept = Kept(Task(task_id="t", data_source="", prompt=[], ground_truth=""), [], 1)
    log, cursors = [Entry(0, group) for group in range(groups)], {"reader": Cursor(0)}
    shelf = dict.fromkeys(range(groups), kept)
    consumers.load(ConsumersState(log=log, end=groups, logged=1, shelf=shelf, cursors=cursors))

    def read() -> None:
        for position in range(1, groups + 1):
            consumers.acknowledge("reader", position)

    taken = seconds(read, 1)
    assert consumers.kept_bytes == 0
    return taken / groups


def shelf_figures(repeats: int) -> dict[str, float | None]:
    """Time of acknowledgements."""
    few, many = (statistics.median(read_shelf(groups) for _ in range(repeats)) for groups in (10_000, 40_000))
    return {"acknowledge_growth": many / few, "acknowledge_us": many * 1e6}


class Table:
    """A policy and a critic without context, whose optimizer steps change nothing."""

    device = "cpu"
    row_cost = RowCost()
    replays_routers = False
    pictures = None
    data_parallel = DataParallel(0, 1, is_recorder=True)

    def __init__(self) -> None:
        self.table = -torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(0))

    def forward(self, batch: Tensors, requested: frozenset[str] = frozenset()) -> Outputs:
        numbers = self.table[batch.tokens[:, 1:]]
        return Outputs(logprobs=numbers, values=numbers)

    def step(
        self, batches: Sequence[Tensors], loss_fn: LossFn, requested: frozenset[str] = frozenset()
    ) -> tuple[float, float]:
        return sum(loss_fn(number, self.forward(batch)).item() for number, batch in enumerate(batches)), 0.0


def batch_of(lengths: Sequence[int], config: RunConfig) -> Batch:
    """Make a batch of groups of eight rows of these lengths, whose last three quarters were sampled."""
    draw, rows = np.random.default_rng(0), list[Trajectory]()
    for number, tokens in enumerate(lengths):
        mask = np.arange(tokens) >= tokens // 4
        rows.append(
            Trajectory(
                task_id=str(number // GROUP),
                group_id=number // GROUP,
                sample=number % GROUP,
                attempt=0,
                episode_id=str(number),
                token_ids=draw.integers(0, VOCABULARY, tokens, dtype=np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -draw.random(tokens), 0).astype(np.float32),
                versions=[VersionRun(Version(), 0, int(mask.sum()))],
                sampling=Sampling(),
                reward=float(number % 3),
            )
        )
    headers = [row.header() for row in rows]
    plan = plan_batch(headers, 0, config, 1, RowCost())
    return Batch(0, headers, plan, {row.key: row for row in rows})


def step_memory(lengths: Sequence[int], algorithm: AlgorithmConfig, critic: CriticConfig | None) -> int:
    """Bytes that ``update`` takes at most beside the rows."""
    config = RunConfig(ModelConfig(path="none"), DataConfig(path="none"), algorithm=algorithm, critic=critic)
    batch, table = batch_of(lengths, config), Table()
    models = Models(table, critic=table if critic else None)  # type: ignore[arg-type]
    return peak_rise(lambda: update(models, batch, build(config), config))


def tail_figures() -> dict[str, float | None]:
    """Memory of steps on a batch with one long row, over that on one without."""
    # Else malloc keeps what earlier steps have freed, and a later peak rises less.
    torch.ones(7 * 2**20)
    tail = [300] * 4095 + [131_072]
    even = [sum(tail) // len(tail)] * len(tail)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = dict[str, float | None]()
    for name, arguments in {
        "tail_memory": (AlgorithmConfig(), None),
        "tail_memory_gae": (AlgorithmConfig(advantage="gae"), CriticConfig()),
    }.items():
        short, long = step_memory(even, *arguments), step_memory(tail, *arguments)
        found |= {name: long / short, f"{name}_bytes_per_token": long / sum(tail)}
    dist.destroy_process_group()
    return found


def main() -> None:
    arguments = parser(__doc__).parse_args()
    found = tail_figures() | layout_figures(arguments.repeats) | shelf_figures(arguments.repeats)
    for name, value in found.items():
        print(f"{name:<32}{value:>10.2f}")
    save(found, arguments.json)


if __name__ == "__main__":
    main()

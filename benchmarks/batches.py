"""What a batch costs with the number of its rows, and of those who read it.

    python -m benchmarks.batches [--repeats 3] [--json FILE]

``layout_growth``: seconds of laying 8,192 rows out on 512 ranks over those of 4,096 on 256; 2.2 if they grow as
n log n, 4 as rows times ranks. ``layout_shared_growth``: the same where groups of eight share a prompt.
``layout_mib``: memory that the larger one takes at most, rows and result included.

``acknowledge_growth``: processor time of an acknowledgement by a consumer who reads 40,000 groups that the trainer has
retired, group by group, over that of 10,000; 1 if it does not depend on how many are kept.
"""

import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.processes.command_line import parser, save
from rl_async.messages import Task
from rl_async.trainer.batches.cost import RowCost
from rl_async.trainer.batches.layout import layout
from rl_async.transfer_queue.policy.admission import QueueSettings
from rl_async.transfer_queue.state.book import Book
from rl_async.transfer_queue.state.consumers import Consumers, ConsumersState, Cursor, Entry, Kept
from rl_async.transfer_queue.state.transitions import Transition

GROUP = 8
PROMPT_TOKENS = 256


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


def main() -> None:
    arguments = parser(__doc__).parse_args()
    found = layout_figures(arguments.repeats) | shelf_figures(arguments.repeats)
    for name, value in found.items():
        print(f"{name:<24}{value:>10.2f}")
    save(found, arguments.json)


if __name__ == "__main__":
    main()

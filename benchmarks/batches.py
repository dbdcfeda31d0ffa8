"""What a batch costs with the number of its rows, and of those who read it.

    python -m benchmarks.batches [--repeats 3] [--json FILE]

``layout_growth``: seconds of laying 8,192 rows out on 512 ranks over those of 4,096 on 256; 2.2 if they grow as
n log n, 4 as rows times ranks. ``layout_shared_growth``: the same where groups of eight share a prompt.
``layout_mib``: memory that the larger one takes at most, rows and result included.
"""

import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.processes.command_line import parser, save
from rl_async.trainer.batches.cost import RowCost
from rl_async.trainer.batches.layout import layout

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
        few, many = (
            seconds(lambda of=of: lay_out(4096 * of, 256 * of, shares), repeats)  # type: ignore[misc]
            for of in (1, 2)
        )
        found |= {name: many / few, f"{name.removesuffix('_growth')}_s": many}
    tracemalloc.start()
    lay_out(8192, 512, False)
    found["layout_mib"] = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return found


def main() -> None:
    arguments = parser(__doc__).parse_args()
    found = layout_figures(arguments.repeats)
    for name, value in found.items():
        print(f"{name:<24}{value:>10.2f}")
    save(found, arguments.json)


if __name__ == "__main__":
    main()

"""An MCP task with two servers from PyPI: look up a price in a database, calculate with it, answer. docs/how-to/mcp.md.

    pip install 'rl-async[mcp]'
    scripts/install mcp                      # mcp-server-sqlite and mcp-server-calculator, in .venv-mcp
    python examples/mcp_shop.py                      # writes the database, tasks and demonstrations
    rl-async launch --mode disaggregated --config examples/mcp_shop.yaml
    python examples/seeds.py examples/mcp_shop.yaml  # the same for three seeds, and a table

The items of held-out tasks are in no other task. Demonstrations show how to call both servers and are mostly wrong:
many guess, ask for another item, copy a number wrongly or write calls that cannot be read.
"""

import contextlib
import random
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from rl_async.agent_loop.chat_formats.format import BAD_CALL
from rl_async.agent_loop.tools.tool import evaluate
from rl_async.agent_loop.toy_tasks import assistant, broken, corrupt, tool_call, tool_result, wild_guess


class Order(NamedTuple):
    """So many of an item."""

    count: int
    item: int

    @property
    def prompt(self) -> str:
        return f"cost of {self.count} of item {self.item}?"


def demonstrate(order: Order, prices: dict[int, int], others: list[int], source: random.Random) -> list[dict[str, str]]:
    """Return a conversation about an order, as it is or with mistakes. ``others``: items to ask for instead."""
    chance = source.random
    turns = [{"role": "user", "content": order.prompt}]
    if chance() < 0.25:  # no tool
        return [*turns, wild_guess(source, 9999)]
    item = source.choice(others) if chance() < 0.1 else order.item  # wrong argument
    call = tool_call("read_query", query=f"select price from items where id={item}")
    turns += [assistant(call), tool_result(str([{"price": prices[item]}]))]
    expression = f"{order.count}*{prices[item]}"
    if chance() < 0.1:  # wrong argument
        expression = corrupt(expression, source)
    call = tool_call("calculate", expression=expression)
    if chance() < 0.15:  # malformed call
        return [*turns, assistant(broken(call)), tool_result(BAD_CALL), wild_guess(source, 9999)]
    value = str(evaluate(expression))
    answer = corrupt(value, source) if chance() < 0.15 else value  # wrong copy of the result
    return [*turns, assistant(call), tool_result(value), assistant(answer)]


def row(order: Order, price: int, index: int) -> dict[str, Any]:
    """Return a task as data sets have it."""
    return {
        "data_source": "mcp_shop",
        "prompt": [{"role": "user", "content": order.prompt}],
        "reward_model": {"style": "rule", "ground_truth": str(order.count * price)},
        "extra_info": {"index": index},
    }


def make(folder: Path, *, demos: int = 16384, train: int = 4096, held_out: int = 64) -> None:
    """Write ``shop.db``, ``train.parquet``, ``test.parquet`` and ``demos.parquet``. The same each time."""
    source = random.Random("mcp_shop")
    prices = {item: source.randint(2, 99) for item in range(100, 1000)}
    items = source.sample(list(prices), len(prices))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shop.db").unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(folder / "shop.db")) as database, database:
        database.execute("create table items (id integer primary key, price integer)")
        database.executemany("insert into items values (?, ?)", prices.items())

    def orders(items: list[int], count: int) -> list[Order]:
        return [Order(source.randint(2, 99), source.choice(items)) for _ in range(count)]

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")

    for name, some, count in (("test", items[:100], held_out), ("train", items[100:], train)):
        write(name, [row(order, prices[order.item], at) for at, order in enumerate(orders(some, count))])
    known = items[100:]
    write("demos", [{"messages": demonstrate(order, prices, known, source)} for order in orders(known, demos)])


if __name__ == "__main__":
    make(Path("artifacts/mcp_shop"))
    print("artifacts/mcp_shop: shop.db, train.parquet, test.parquet, demos.parquet")

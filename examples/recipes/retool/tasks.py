"""Sums that take a program: tasks, and demonstrations whose programs are often wrong. README.md beside this file.

python examples/recipes/retool/tasks.py
"""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Task = tuple[str, int, int]
HELD_OUT = 64


def sampled(draw: random.Random) -> Task:
    """Return a term in x, and the first and the last x."""
    first = draw.randint(2, 20)
    return (
        f"{draw.choice(['x*x', '2*x', '3*x'])}{draw.choice('+-')}{draw.randint(1, 9)}",
        first,
        first + draw.randint(2, 9),
    )


def program(term: str, first: int, last: int, beyond: int = 1) -> str:
    return f"print(sum({term} for x in range({first},{last}+{beyond})))"


def value(term: str, first: int, last: int) -> str:
    """Return the sum. The term comes from ``sampled``."""
    return str(sum(eval(term, {"x": x}) for x in range(first, last + 1)))


def question(term: str, first: int, last: int) -> dict[str, str]:
    return {"role": "user", "content": f"sum {term} for x from {first} to {last}"}


def demonstration(task: Task, draw: random.Random) -> list[dict[str, str]]:
    """Return a conversation that may guess, end the sum one too early or late, or copy the result wrongly."""
    guess = {"role": "assistant", "content": str(draw.randint(10, 5000))}
    if draw.random() < 0.3:
        return [question(*task), guess]
    beyond = 1 if draw.random() < 0.55 else draw.choice([0, 2])
    result = value(*task[:2], task[2] + beyond - 1)
    body = json.dumps({"name": "python", "arguments": {"code": program(*task, beyond)}}, separators=(",", ":"))
    return [
        question(*task),
        {"role": "assistant", "content": f"<tool_call>\n{body}\n</tool_call>"},
        {"role": "tool", "content": f"{result}\n"},
        {"role": "assistant", "content": result} if draw.random() < 0.8 else guess,
    ]


def main() -> None:
    """Write tasks and demonstrations; no held-out task is among the others."""
    folder, draw = Path("artifacts/retool"), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = list(dict.fromkeys(sampled(draw) for _ in range(20_000)))
    test, train = drawn[:HELD_OUT], drawn[HELD_OUT:]
    rows: dict[str, list[dict[str, Any]]] = {
        name: [
            {
                "data_source": "retool",
                "prompt": [question(*task)],
                "reward_model": {"style": "rule", "ground_truth": value(*task)},
            }
            for task in of
        ]
        for name, of in (("train", train), ("test", test))
    }
    rows["demos"] = [{"messages": demonstration(draw.choice(train), draw)} for _ in range(12_000)]
    for name, table in rows.items():
        pq.write_table(pa.Table.from_pylist(table), folder / f"{name}.parquet")
        print(folder / f"{name}.parquet", len(table))


if __name__ == "__main__":
    main()

"""Nim of TextArena for two players, both played by one tiny model: its tasks, and games of random moves as
demonstrations. docs/how-to/environments.md#environments-of-other-projects.

    scripts/install environments                     # TextArena, on top of .venv
    .venv-environments/bin/python examples/recipes/self_play/nim.py
    .venv-environments/bin/python -m rl_async.launcher.cli launch --mode disaggregated \\
        --config examples/recipes/self_play/config.yaml
"""

import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_async.agent_loop.environments.adapters import text_arena
from rl_async.messages import Task

PROMPT = {"role": "system", "content": "Play to win."}
# The options that config.yaml has.
OPTIONS = {"num_players": 2, "piles": [2, 3]}
BROKEN = 0.1  # of the moves in the demonstrations take more than there is


def demonstrations(draw: random.Random) -> list[list[dict[str, str]]]:
    """Play a game of random moves; return the conversation of each player."""
    task = Task(task_id="demo", data_source="nim", prompt=[PROMPT], ground_truth="")
    game: Any = text_arena("Nim-v0", task, OPTIONS)
    talks: dict[str, list[dict[str, str]]] = {role: [PROMPT] for role in game.roles}
    step = game.reset()
    while not step.done:
        piles = re.findall(r"pile (\d+): (\d+)", step.observation)[-len(OPTIONS["piles"]) :]
        pile, left = draw.choice([(pile, int(left)) for pile, left in piles if int(left)])
        move = f"[{pile} {draw.randint(1, left) + (left if draw.random() < BROKEN else 0)}]"
        talks[step.to] += [{"role": "user", "content": step.observation}, {"role": "assistant", "content": move}]
        step = game.step(move)
    return [talk for talk in talks.values() if len(talk) > 1]


def main() -> None:
    """Write tasks, which are all the same game, and demonstrations."""
    folder, draw = Path("artifacts/nim"), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    task = {"data_source": "nim", "prompt": [PROMPT], "reward_model": {"style": "rule", "ground_truth": ""}}
    talks = [talk for _ in range(1500) for talk in demonstrations(draw)]
    tables = {"train": [task] * 256, "test": [task] * 32, "demos": [{"messages": talk} for talk in talks]}
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        print(folder / f"{name}.parquet", len(rows))


if __name__ == "__main__":
    main()

"""Nim of TextArena for two players, both played by one tiny model: its tasks, and games of random moves as
demonstrations. docs/how-to/environments.md#environments-of-other-projects.

    scripts/install environments                     # TextArena, on top of .venv
    .venv-environments/bin/python examples/recipes/self_play/nim.py
    .venv-environments/bin/python -m rl_async.launcher.cli launch --mode disaggregated \\
        --config examples/recipes/self_play/config.yaml
    .venv-environments/bin/python examples/recipes/self_play/nim.py runs/NAME    # the moves of a run
"""

import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_async import load
from rl_async.agent_loop.environments.adapters import text_arena
from rl_async.messages import Task, Turn

PROMPT = {"role": "system", "content": "Play to win."}
# The options that config.yaml has.
OPTIONS = {"num_players": 2, "piles": [2, 3]}
BROKEN = 0.1  # of the moves in the demonstrations take more than there is


def sizes(observation: str) -> list[int]:
    """Return the sizes of the piles that an observation ends with."""
    return [int(left) for left in re.findall(r"pile \d+: (\d+)", observation)[-len(OPTIONS["piles"]) :]]


def tally(turns: Iterable[Turn]) -> Counter[str]:
    """Count one player's moves, those against the rules, those with a winning move at hand, and those that took it.

    The winning move makes the two piles equal.
    """
    found, piles = Counter[str](), list[int]()
    for turn in turns:
        if turn.role != "assistant":
            piles = sizes(turn.text) or piles
            continue
        move = re.search(r"\[(\d+) (\d+)\]", turn.text)
        pile, taken = map(int, move.groups()) if move else (0, 0)
        legal = pile < len(piles) and 1 <= taken <= piles[pile]
        winning = len(set(piles)) > 1
        equal = len({left - taken * (number == pile) for number, left in enumerate(piles)}) == 1
        found += Counter(moves=1, broken=not legal, winning=winning, won=winning and legal and equal)
    return found


def print_moves(run: str) -> None:
    """Print a line for every six steps of a run."""
    parts = defaultdict[int, Counter[str]](Counter)
    for sample in load(run).trajectories():
        parts[sample.step // 6] += tally(sample.turns)
    for part, found in sorted(parts.items()):
        if not found["winning"]:
            sys.exit(f"{run} has no games of Nim")
        broken, won = found["broken"] / found["moves"], found["won"] / found["winning"]
        print(f"from step {6 * part}: {broken:.2f} of the moves break a rule, {won:.2f} of the winning ones were taken")


def demonstrations(draw: random.Random) -> list[list[dict[str, str]]]:
    """Play a game of random moves; return the conversation of each player."""
    task = Task(task_id="demo", data_source="nim", prompt=[PROMPT], ground_truth="")
    game: Any = text_arena("Nim-v0", task, OPTIONS)
    talks: dict[str, list[dict[str, str]]] = {role: [PROMPT] for role in game.roles}
    step = game.reset()
    while not step.done:
        pile, left = draw.choice([(pile, left) for pile, left in enumerate(sizes(step.observation)) if left])
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
    if sys.argv[1:]:
        print_moves(sys.argv[1])
    else:
        main()

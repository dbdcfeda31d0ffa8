"""A game of two roles that learn to understand one another, and its data. docs/how-to/environments.md#several-roles.

python examples/relay.py
rl-async launch --mode disaggregated --config examples/relay.yaml
"""

import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_async import Step
from rl_async.messages import Task

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WRONG = 0.3  # of the words and of the digits in the demonstrations


class Relay:
    """The speaker sees a number and says its digits; the listener hears the words, and writes the number.

    Only letters are heard. The listener earns the share of words that it wrote rightly, the speaker that of digits that
    arrived.
    """

    roles = ("speaker", "listener")

    def __init__(self, task: Task) -> None:
        self.number, self.heard, self.written = task.ground_truth, "", ""

    def reset(self) -> Step:
        return Step(beginning("speaker", self.number), to="speaker")

    def step(self, answer: str) -> Step:
        if not self.heard:
            self.heard = re.sub("[^a-z ]", "", answer) or "nothing"
            return Step(beginning("listener", self.heard), to="listener")
        self.written = answer
        return Step(done=True)

    def reward(self) -> dict[str, float]:
        heard = "".join(str(WORDS.index(word)) if word in WORDS else "?" for word in self.heard.split())
        return {"speaker": agreement(self.written, self.number), "listener": agreement(self.written, heard)}


def agreement(written: str, wanted: str) -> float:
    """Return the share of equal digits; 0 for a number of another length."""
    if len(written) != len(wanted):
        return 0.0
    return sum(one == other for one, other in zip(written, wanted)) / len(wanted)


def beginning(role: str, told: str) -> list[dict[str, str]]:
    """Return the messages with which a role's conversation begins."""
    return [{"role": "system", "content": role}, {"role": "user", "content": told}]


def demonstration(number: str, draw: random.Random) -> list[dict[str, str]]:
    """Return a conversation of one of the roles, in which each digit may be wrong."""
    said = " ".join(WORDS[int(digit)] for digit in number)
    guessed = "".join(draw.choice("0123456789") if draw.random() < WRONG else digit for digit in number)
    if draw.random() < 0.5:
        return [*beginning("listener", said), {"role": "assistant", "content": guessed}]
    words = " ".join(WORDS[int(digit)] for digit in guessed)
    return [*beginning("speaker", number), {"role": "assistant", "content": words}]


def main() -> None:
    """Write tasks and demonstrations; no held-out number is among the others."""
    folder, draw = Path("artifacts/relay"), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [f"{number:03}" for number in range(1000)]
    draw.shuffle(numbers)
    test, train = numbers[:64], numbers[64:]
    rows: dict[str, list[dict[str, Any]]] = {
        name: [
            {
                "data_source": "relay",
                "prompt": [{"role": "user", "content": number}],
                "reward_model": {"style": "rule", "ground_truth": number},
            }
            for number in of
        ]
        for name, of in (("train", train), ("test", test))
    }
    rows["demos"] = [{"messages": demonstration(draw.choice(train), draw)} for _ in range(8192)]
    for name, table in rows.items():
        pq.write_table(pa.Table.from_pylist(table), folder / f"{name}.parquet")
        print(folder / f"{name}.parquet", len(table))


if __name__ == "__main__":
    main()

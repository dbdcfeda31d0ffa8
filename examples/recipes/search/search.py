"""A corpus of invented people, towns and lands, the tool that searches it, and tasks that take two searches.

    pip install 'rl-async[search]'
    python examples/recipes/search/search.py

writes tasks and demonstrations below artifacts/. Only the corpus knows where somebody was born. README.md beside this
file.
"""

import functools
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

LANDS = ("norland", "sudmark", "ostia", "westria", "midgard", "hollin", "fenmoor", "highvale")
PEOPLE, TOWNS, HELD_OUT = 600, 60, 64
Message = dict[str, str]


class World(NamedTuple):
    """Where people were born, in which land a town lies, and the passages of the corpus."""

    born: dict[str, str]
    lies: dict[str, str]
    passages: list[str]


@functools.cache
def world() -> World:
    """Return the same world in every process."""
    draw = random.Random(0)
    syllables = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    names = draw.sample([one + other for one in syllables for other in syllables], PEOPLE + TOWNS)
    towns, people = names[:TOWNS], names[TOWNS:]
    born = {person: draw.choice(towns) for person in people}
    lies = {town: draw.choice(LANDS) for town in towns}
    # A search for a name alone finds the first passage that has it, which does not answer the question.
    passages = [f"{one} left {draw.choice(towns)}" for one in people]
    passages += [f"{one} fears {draw.choice(LANDS)}" for one in towns]
    passages += [f"{one} born {town}" for one, town in born.items()]
    passages += [f"{one} lies {land}" for one, land in lies.items()]
    return World(born, lies, passages)


@functools.cache
def index() -> Any:
    """Return the BM25 index of the corpus."""
    import bm25s

    found = bm25s.BM25()
    found.index(bm25s.tokenize(world().passages, stopwords=None, show_progress=False), show_progress=False)
    return found


def search(query: str) -> str:
    """Search the corpus; the result is the passage that fits best."""
    import bm25s

    tokens = bm25s.tokenize([query], stopwords=None, return_ids=False, show_progress=False)
    scores = index().get_scores(tokens[0]) if tokens[0] else []
    if not len(scores) or not max(scores):
        return "nothing found"
    return world().passages[int(scores.argmax())]


def searched(query: str) -> list[Message]:
    """Return the messages of a call and its result."""
    call = json.dumps({"name": "search", "arguments": {"query": query}}, separators=(",", ":"))
    return [
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": search(query)},
    ]


def question(person: str) -> Message:
    return {"role": "user", "content": f"in which land was {person} born?"}


def demonstration(person: str, draw: random.Random) -> list[Message]:
    """Return a conversation that may guess, search for the wrong thing, or leave out a search."""
    guess = {"role": "assistant", "content": draw.choice(LANDS)}
    if draw.random() < 0.25:
        return [question(person), guess]
    turns = [question(person), *searched(f"{person} born" if draw.random() < 0.6 else person)]
    if draw.random() < 0.2:
        return [*turns, guess]
    town = turns[-1]["content"].split()[-1]
    turns += searched(f"{town} lies" if draw.random() < 0.7 else town)
    return [*turns, {"role": "assistant", "content": turns[-1]["content"].split()[-1]}]


def main() -> None:
    """Write tasks about people, of whom those of the held-out tasks occur in no other task or demonstration."""
    folder, draw, people = Path("artifacts/search"), random.Random(1), list(world().born)
    folder.mkdir(parents=True, exist_ok=True)
    test, train = people[:HELD_OUT], people[HELD_OUT:]
    rows: dict[str, list[dict[str, Any]]] = {
        name: [
            {
                "data_source": "search",
                "prompt": [question(person)],
                "reward_model": {"style": "rule", "ground_truth": world().lies[world().born[person]]},
            }
            for person in of
        ]
        for name, of in (("train", train), ("test", test))
    }
    rows["demos"] = [{"messages": demonstration(draw.choice(train), draw)} for _ in range(12_000)]
    for name, table in rows.items():
        pq.write_table(pa.Table.from_pylist(table), folder / f"{name}.parquet")
        print(folder / f"{name}.parquet", len(table))


if __name__ == "__main__":
    main()

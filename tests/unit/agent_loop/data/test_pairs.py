"""Preference pairs: every form of a row, and mistakes that name file, row and column."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_async.agent_loop.toy_tasks import make_data, make_pairs
from rl_async.agent_loop.training_data import read_pairs, to_pair
from rl_async.errors import ConfigError, DataError

ASK = {"role": "user", "content": "1+1?"}
GOOD, BAD = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        {"prompt": "1+1?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [BAD]},
        {"prompt": None, "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "margin": None},
    ],
)
def test_every_form_of_a_row(row: dict[str, Any]) -> None:
    pair = to_pair(row, "file, row 0")
    assert (pair.chosen, pair.rejected, pair.margin) == ([ASK, GOOD], [ASK, BAD], None)


def test_files_are_read_whole(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "chosen": "2", "rejected": "3", "margin": 0.5}] * 3
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("a.parquet", "a.jsonl"):
        found = read_pairs(str(tmp_path / name))
        assert [pair.margin for pair in found] == [0.5] * 3
        assert found[2].place == f"{tmp_path / name}, row 2"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "2", "rejected": "3"}, "column chosen: a text needs a column prompt"),
        ({"prompt": "a", "rejected": "3"}, "column chosen: needs a list of messages or a text, got None"),
        ({"prompt": "a", "chosen": "2", "rejected": ""}, "column rejected: needs a list of messages"),
        ({"prompt": "a", "chosen": "2", "rejected": "2"}, "column rejected: the same as chosen"),
        ({"prompt": 5, "chosen": "2", "rejected": "3"}, "column prompt: needs a list of messages or a text, got 5"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, {"role": "assistant"}]}, "column rejected, message 1"),
        ({"chosen": [{"content": "x"}], "rejected": [BAD]}, "column chosen, message 0"),
        ({"prompt": "a", "chosen": "2", "rejected": "3", "margin": "much"}, "column margin: needs a finite number"),
        ({"prompt": "a", "chosen": "2", "rejected": "3", "margin": 10**400}, "column margin: needs a finite number"),
        ({"prompt": "a", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "column chosen: does not begin with the"),
        ({"chosen": [ASK, GOOD], "rejected": [{**ASK, "content": "?"}, BAD]}, "column rejected: answers another"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD, ASK]}, "column rejected: ends with the user"),
        ({"prompt": "a", "chosen": "2", "rejected": "3", "margin": True}, "column margin: needs a finite number"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "2", "rejected": "3"}) + "\n" + json.dumps(row))
    with pytest.raises(DataError) as caught:
        read_pairs(str(file))
    assert str(caught.value).startswith(f"{file}, row 1, {said}")


def test_files_that_hold_no_pairs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file"):
        read_pairs(str(tmp_path / "none.parquet"))


def test_generated_pairs_differ_by_a_flaw_and_leave_held_out_prompts_alone(tmp_path: Path) -> None:
    make_pairs("calculator-pairs", tmp_path, pairs=300, held_out=50)
    make_data("calculator", tmp_path, train=5, held_out=50, demos=5)
    held_out = {row["prompt"][0]["content"]: row for row in pq.read_table(tmp_path / "test.parquet").to_pylist()}
    pairs = read_pairs(str(tmp_path / "pairs.parquet"))
    assert len(pairs) == 300 and not {pair.chosen[0]["content"] for pair in pairs} & held_out.keys()
    for pair in pairs:
        asked, call, result, answer = (message["content"] for message in pair.chosen)
        assert asked.removeprefix("what is ").removesuffix("?") in call
        assert result == answer
        assert pair.rejected[0] == pair.chosen[0]
    assert {len(pair.rejected) for pair in pairs} == {2, 4}, "with a tool and without"
    make_pairs("calculator-pairs", tmp_path / "again", pairs=300, held_out=50)
    assert [p[:2] for p in read_pairs(str(tmp_path / "again" / "pairs.parquet"))] == [p[:2] for p in pairs]


def test_an_unknown_generator_names_the_known() -> None:
    with pytest.raises(ConfigError, match="known: calculator, shop, market, sort, code, order, sums, calculator-pairs"):
        make_pairs("chess-pairs", "/nowhere")

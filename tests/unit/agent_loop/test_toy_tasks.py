"""The generated tasks are solvable, disjoint and reproducible, and a failed call reads as in the real tool loop."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rl_async.agent_loop.environments.built_in import QUARTERS, Grid, Shop
from rl_async.agent_loop.tools.arithmetic import evaluate
from rl_async.agent_loop.toy_tasks import demonstrate_code, draw_digits, make_data, program, sample_code
from rl_async.errors import ConfigError
from rl_async.messages import Task
from rl_async.pictures import read_picture
from rl_async.reward_loop.api import Conversation
from rl_async.reward_loop.scorers.code import last_program
from rl_async.reward_loop.scorers.code_tests import parse_tests
from rl_async.transfer_queue.dataset import to_task
from rl_async.transfer_queue.images import MARK

NAMES = ("calculator", "shop", "market", "sort", "code", "order", "digits")


def _rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def _asked(row: dict) -> tuple[str, ...]:
    messages = row.get("prompt") or row["messages"]
    images = [image["bytes"] for image in row.get("images", ())]
    return next(message["content"] for message in messages if message["role"] == "user"), *images


@pytest.mark.parametrize("name", NAMES)
def test_held_out_prompts_are_nowhere_else(name: str, tmp_path: Path) -> None:
    make_data(name, tmp_path, train=300, held_out=50, demos=300)
    held_out = {_asked(row) for row in _rows(tmp_path / "test.parquet")}
    assert len(held_out) == 50
    assert not held_out & {_asked(row) for row in _rows(tmp_path / "train.parquet")}
    assert not held_out & {_asked(row) for row in _rows(tmp_path / "demos.parquet")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demos.parquet", "test.parquet", "train.parquet"]


def test_images_of_digits_differ_by_their_digits_and_noise_does_not(tmp_path: Path) -> None:
    make_data("digits", tmp_path, train=50, held_out=5, demos=200)
    for row in _rows(tmp_path / "train.parquet"):
        (image,) = row["images"]
        assert read_picture(image["bytes"]).size == (32, 32)
        task = to_task(row, "here", "t")
        assert task.prompt == [{"role": "user", "content": f"{MARK}add", "images": [image["bytes"]]}]
        assert int(task.ground_truth) == task.extra["a"] + task.extra["b"]
    # The segments of a digit are darker than what is around them.
    one, eight = (np.asarray(read_picture(draw_digits([digit] * 2, random.Random(0)))) for digit in (1, 8))
    assert (eight < 100).sum() > 2 * (one < 100).sum() > 0
    said = [row["messages"][-1]["content"] for row in _rows(tmp_path / "demos.parquet")]
    assert all(evaluate(text.partition("=")[0]) == int(text.partition("=")[2]) for text in said)
    make_data("noise", tmp_path / "noise", train=20, held_out=5, demos=5)
    for row in _rows(tmp_path / "noise" / "train.parquet"):
        assert np.asarray(read_picture(row["images"][0]["bytes"])).std() > 60


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_data(name: str, tmp_path: Path) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_data(name, tmp_path / folder, train=20, held_out=5, demos=20, seed=seed)
    for file in ("train.parquet", "test.parquet", "demos.parquet"):
        assert _rows(tmp_path / "a" / file) == _rows(tmp_path / "b" / file)
        assert _rows(tmp_path / "a" / file) != _rows(tmp_path / "c" / file)


def test_columns_are_verls(tmp_path: Path) -> None:
    make_data("calculator", tmp_path, train=5, held_out=2, demos=2)
    row = _rows(tmp_path / "train.parquet")[0]
    assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info", "agent_name"}
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(evaluate(row["extra_info"]["expression"]))}


def test_unknown_name_names_the_known() -> None:
    with pytest.raises(ConfigError, match="known: calculator, shop, market, sort"):
        make_data("chess", "/nowhere")


def test_sums_leave_enough_of_their_hundred_prompts_to_train_on(tmp_path: Path) -> None:
    make_data("sums", tmp_path)
    train, held_out = (
        {row["prompt"][0]["content"] for row in _rows(tmp_path / f"{n}.parquet")} for n in ("train", "test")
    )
    assert (len(train), len(held_out)) == (68, 32)
    assert not train & held_out
    assert not (tmp_path / "demos.parquet").exists()


def test_markets_demonstrations_seldom_use_both_tools_and_its_tasks_need_them(tmp_path: Path) -> None:
    make_data("market", tmp_path, train=50)
    used = Counter(
        tuple(name for name in ("lookup", "calculator") if any(f'"{name}"' in m["content"] for m in row["messages"]))
        for row in _rows(tmp_path / "demos.parquet")
    )
    assert sum(used.values()) == 240
    assert 0 < used["lookup", "calculator"] < 40 < min(used["lookup",], used["calculator",])
    for row in _rows(tmp_path / "train.parquet"):
        system, asked = row["prompt"]
        assert system["role"] == "system" and "lookup" in system["content"] and "calculator" in system["content"]
        state = row["extra_info"]
        assert asked["content"] == f"What is the price of {state['count']} {state['item']}?", "the price is hidden"
        assert row["reward_model"]["ground_truth"] == str(state["count"] * state["price"])


async def test_the_shop_answers_what_the_demonstrations_of_market_show(tmp_path: Path) -> None:
    make_data("market", tmp_path, train=1)
    [row] = _rows(tmp_path / "train.parquet")
    state = row["extra_info"]
    task = Task(task_id="t", data_source="market", prompt=row["prompt"], ground_truth="", extra=state)
    shop = Shop(task, services=None)
    tools = {tool.name: tool for tool in shop.tools()}
    price = await tools["lookup"].call({"item": state["item"]}, timeout_s=60)
    wrong = await tools["lookup"].call({"item": "gold"}, timeout_s=60)
    total = await tools["calculator"].call({"expression": f"{state['count']}*{price.text}"}, timeout_s=60)
    assert (price.text, total.text) == (str(state["price"]), row["reward_model"]["ground_truth"])
    results = {m["content"] for r in _rows(tmp_path / "demos.parquet") for m in r["messages"] if m["role"] == "tool"}
    assert wrong.text in results


def _darkest(image: bytes) -> tuple[int, int]:
    """The column and row of the darkest pixel of a PNG file."""
    pixels = np.asarray(read_picture(image)).max(2)
    row, column = np.unravel_index(pixels.argmin(), pixels.shape)
    return int(column), int(row)


async def test_the_grids_tool_shows_its_quarters_larger(tmp_path: Path) -> None:
    make_data("grid", tmp_path, train=20, held_out=50, demos=60)
    for row in _rows(tmp_path / "train.parquet"):
        (zoom,) = Grid(to_task(row, "here", "t"), services=None).tools()
        column, line = (place // 8 for place in _darkest(row["images"][0]["bytes"]))
        assert row["reward_model"]["ground_truth"] == f"{'abcd'[column]}{line + 1}"
        for number, quarter in enumerate(QUARTERS):
            (crop,) = (await zoom.call({"quarter": quarter}, timeout_s=60)).images
            dark = np.asarray(read_picture(crop)).max(2).min() < 90
            assert dark == (number == line // 2 * 2 + column // 2)
            if dark:
                assert [place // 16 for place in _darkest(crop)] == [column % 2, line % 2]
        assert (await zoom.call({"quarter": "5"}, timeout_s=60)).error
    held_out = {row["images"][0]["bytes"] for row in _rows(tmp_path / "test.parquet")}
    for row in _rows(tmp_path / "demos.parquet"):
        asked, call, shown, answer = (message["content"] for message in row["messages"])
        assert (asked, shown) == ("<image>where?", "<image>") and "zoom" in call and len(answer) == 2
        assert len(row["images"]) == 2 and row["images"][0]["bytes"] not in held_out


@pytest.mark.parametrize("text", ["1+", "2**3", "abs(1)", "1/2", "", "9" * 25, "(1", "1 2"])
def test_bad_expressions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="bad expression"):
        evaluate(text)


def test_expressions() -> None:
    assert evaluate("12*3-4") == 32
    assert evaluate("-(2+3)*2") == -10


def share(answer: str, truth: str) -> float:
    """The share of hidden tests that the answer's function passes; these functions need no sandbox."""
    names: dict[str, Any] = {}
    source = last_program(answer)
    assert source is not None
    exec(source, names)
    cases = json.loads(truth)
    passed = [names["f"](*given) == expected for given, expected in zip(cases["inputs"], cases["outputs"], strict=True)]
    return sum(passed) / len(passed)


def test_only_the_whole_function_passes_all_tests() -> None:
    source = random.Random(1)
    for _ in range(200):
        sample = sample_code(source)
        assert len(parse_tests(Conversation(data_source="code", solution_str="", ground_truth=sample.answer))) == 3
        assert share(program(sample.state["limited"]), sample.answer) == 1
        assert 0 < share(program(sample.state["expression"]), sample.answer) < 1


def test_demonstrations_are_programs_and_seldom_right() -> None:
    source, shares = random.Random(2), []
    for _ in range(300):
        sample = sample_code(source)
        (turn,) = demonstrate_code(sample, source)
        shares.append(share(turn["content"], sample.answer))
    assert 0.05 < shares.count(1.0) / len(shares) < 0.25
    assert 0.3 < sum(shares) / len(shares) < 0.5

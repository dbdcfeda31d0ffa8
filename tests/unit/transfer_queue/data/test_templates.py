"""Rows of any columns become tasks by their data set's templates, and held-out tasks come from several data sets."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.configs.checks.rules import check
from rl_async.configs.load.loader import load_config
from rl_async.configs.schema.data import DataSource
from rl_async.errors import ConfigError, DataError
from rl_async.reward_loop.scorers.reasoning_gym import score as reasoning_gym_score
from rl_async.transfer_queue.dataset import fill, make_sources, open_rows, templated, to_task

ROW = {"question": "What is {x}?", "answer": "2+2 is 4\n#### 4", "meta": {"level": 3}}


def source(**values: Any) -> DataSource:
    return DataSource(path="unit", **values)


def test_columns_fill_the_templates_and_their_own_braces_stay() -> None:
    given = source(
        system="Level {meta.level}.",
        prompt=r"{question} Put it into \boxed{}.",
        ground_truth="{answer}",
        ground_truth_extract=(r"regex:#### (.*)",),
    )
    task = to_task(templated(ROW, given, "here"), "here", "t")
    assert task.prompt == [
        {"role": "system", "content": "Level 3."},
        {"role": "user", "content": r"What is {x}? Put it into \boxed{}."},
    ]
    assert task.ground_truth == "4"


def test_the_rows_own_prompt_can_be_wrapped() -> None:
    row = {
        "prompt": [{"role": "system", "content": "old"}, {"role": "user", "content": "2+2?"}],
        "reward_model": {"style": "rule", "ground_truth": "it is 4"},
    }
    changed = templated(
        row, source(system="new", prompt="{prompt} Briefly.", ground_truth_extract=("last_number",)), ""
    )
    assert [m["content"] for m in changed["prompt"]] == ["new", "2+2? Briefly."]
    assert changed["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert templated(row, source(), "") == row
    assert templated({"prompt": "2+2?"}, source(prompt="{prompt}!"), "")["prompt"][0]["content"] == "2+2?!"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (r"\frac{1}{2} of {n}", r"\frac{1}{2} of 3"),
        ("{{n}} is {n}", "{n} is 3"),
        (r"\boxed{{{n}}}", r"\boxed{3}"),
        (r"{\bf {n}}, {}", r"{\bf 3}, {}"),
    ],
)
def test_what_is_no_column_stays_text(template: str, expected: str) -> None:
    assert fill(template, {"n": 3}, "here") == expected


def test_the_rows_last_user_message_is_wrapped_where_it_stands() -> None:
    said = [{"role": role, "content": text} for role, text in (("user", "1?"), ("user", "2?"), ("assistant", "Hm"))]
    wrapped = templated({"prompt": said}, source(prompt="{prompt}!"), "")["prompt"]
    assert [message["content"] for message in wrapped] == ["1?", "2?!", "Hm"]
    alone = templated({"prompt": said[2:], "q": "3?"}, source(prompt="{q}"), "")["prompt"]
    assert [message["content"] for message in alone] == ["Hm", "3?"]


@pytest.mark.parametrize(
    ("row", "values", "named"),
    [
        ({"prompt": ["a"]}, {"system": "s"}, "prompt"),
        ({"prompt": 3}, {"prompt": "{prompt}"}, "prompt"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, {"prompt": "{prompt}"}, "{prompt}"),
        ({"q": None}, {"prompt": "{q}"}, "q.*null"),
    ],
)
def test_a_row_that_no_template_can_use_is_named(row: dict[str, Any], values: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=rf"file, row 3.*{named}"):
        templated(row, source(**values), "file, row 3")


@pytest.mark.parametrize(
    ("values", "named"),
    [({"prompt": "{qestion}"}, "{qestion}.*question"), ({"ground_truth_extract": ("boxed",)}, "ground_truth_extract")],
)
def test_what_a_row_lacks_is_named_with_its_place(values: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=rf"file, row 3.*{named}"):
        templated(ROW, source(**values), "file, row 3")


def test_a_run_trains_and_evaluates_on_templated_rows_of_several_data_sets(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = [{"q": f"{name}{n}", "a": n} for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    parts = [
        {"path": f"{tmp_path}/{name}.jsonl", "weight": weight, "prompt": "{q}?", "ground_truth": "{a}", "system": name}
        for name, weight in (("a", 3.0), ("b", 1.0))
    ]
    overrides = [f"data.path={json.dumps(parts)}", f"data.eval_path={json.dumps(parts)}", "data.make=null"]
    config = load_config("sort", [*overrides, "eval.tasks=8", "warm_start=null"])
    stream, held_out = make_sources(config)
    assert [task.prompt[0]["content"] for task in held_out] == ["a"] * 6 + ["b"] * 2
    assert [task.task_id for task in held_out[:2]] == ["0-a:0", "0-a:1"]
    assert {stream.next().prompt[0]["content"] for _ in range(8)} == {"a", "b"}
    assert stream.next().prompt[1]["content"].endswith("?")


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("{path: x.jsonl, parameters: {a: 1}}", "parameters"),
        ("{path: x.jsonl, ground_truth_extract: [nothing]}", "nothing"),
    ],
)
def test_settings_without_effect_are_refused(part: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"data: .*{named}"):
        check(load_config("sort", [f"data.path=[{part}]", "data.make=null"]))


def test_parameters_of_reasoning_gym_shape_the_tasks_and_the_scorer_knows_them() -> None:
    pytest.importorskip("reasoning_gym", reason="install it with pip install 'rl-async[reasoning-gym]'")
    from rl_async.reward_loop.api import Conversation

    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows = open_rows("reasoning_gym:chain_sum", seed=3, parameters=parameters)
    task = to_task(rows[5], "row 5", "t")
    assert sum(character in "+-" for character in task.prompt[0]["content"]) == 1
    right = Conversation(data_source="", solution_str=task.ground_truth, ground_truth="", extra_info=task.extra)
    assert reasoning_gym_score(right) == 1.0
    assert reasoning_gym_score(msgspec.structs.replace(right, solution_str="x")) < 1.0
    with pytest.raises(ConfigError, match="parameters of reasoning_gym:chain_sum"):
        open_rows("reasoning_gym:chain_sum", parameters={"min_termz": 2})

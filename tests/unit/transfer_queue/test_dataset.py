"""Data sets as tasks: templates, the stream's order, weights and cursor, and errors that name the row."""

import base64
import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rl_async.agent_loop.toy_tasks import make_data
from rl_async.configs.checks import check
from rl_async.configs.load import load_config
from rl_async.configs.schema.data import CurriculumConfig, DataConfig, DataSource, ModelConfig
from rl_async.configs.schema.rollout import AgentConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError
from rl_async.messages import Task
from rl_async.picture_decoder import MOST_BYTES
from rl_async.recording import place_of
from rl_async.reward_loop.scorers.scorer_registry import score_by_reasoning_gym as reasoning_gym_score
from rl_async.trainer.records import append_trained
from rl_async.transfer_queue.__main__ import tasks_of
from rl_async.transfer_queue.chat_messages import to_messages
from rl_async.transfer_queue.dataset import (
    FIRST_ROWS,
    check_first_rows,
    fill,
    make_sources,
    open_files,
    open_rows,
    templated,
    to_task,
)
from rl_async.transfer_queue.images import MARK, MOST_IMAGES, as_parts, mime_of, read_image
from tests.conftest import make_rows
from tests.support.tiny_models import byte_tokenizer

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


def row(text: str = "hi", **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "test",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        **changes,
    }


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return str(path)


def run_config(path: str | tuple[DataSource, ...], *, seed: int = 0, **data: Any) -> RunConfig:
    return RunConfig(model=ModelConfig(path="none"), data=DataConfig(path=path, **data), seed=seed)


def names(config: RunConfig, count: int) -> list[str]:
    source, _ = make_sources(config)
    return [source.next().task_id for _ in range(count)]


@pytest.fixture
def ten(tmp_path: Path) -> str:
    return jsonl(tmp_path / "ten.jsonl", [row(f"task {i}") for i in range(10)])


def test_epochs_are_shuffled_differently_and_reproducibly(ten: str) -> None:
    drawn = names(run_config(ten), 30)
    epochs = [drawn[:10], drawn[10:20], drawn[20:]]
    assert all(set(epoch) == {f"ten:{i}" for i in range(10)} for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert drawn == names(run_config(ten), 30)
    assert drawn != names(run_config(ten, seed=1), 30)
    assert names(run_config(ten, shuffle=False), 12) == [f"ten:{i % 10}" for i in range(12)]


@pytest.mark.parametrize("taken", [0, 5, 17, 30])
def test_a_curriculum_changes_the_weights_and_a_cursor_finds_its_place(ten: str, tmp_path: Path, taken: int) -> None:
    hard = jsonl(tmp_path / "hard.jsonl", [row() for _ in range(3)])
    ramp = DataSource(path=hard, schedule=((1, 0.0), (3, 1.0)))
    config = run_config((DataSource(path=ten, schedule=((1, 1.0), (3, 0.0))), ramp))
    steps = [number // 10 for number in range(40)]
    source, _ = make_sources(config)
    drawn = [source.next(step) for step in steps]
    shares = [Counter(task.source for task in drawn[start : start + 10]) for start in range(0, 40, 10)]
    assert shares == [{"0-ten": 10}, {"0-ten": 10}, {"0-ten": 5, "1-hard": 5}, {"1-hard": 10}]
    begun, _ = make_sources(config)
    for step in steps[:taken]:
        begun.next(step)
    fresh, _ = make_sources(config)
    fresh.seek(begun.cursor())
    assert [fresh.next(step) for step in steps[taken:]] == drawn[taken:]


def test_the_first_epoch_may_begin_with_short_prompts(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [row("x" * length) for length in (5, 1, 9, 3)])
    config = run_config(path, curriculum=CurriculumConfig(by_length=True))
    stream, _ = make_sources(config)
    lengths = [len(stream.next().prompt[0]["content"]) for _ in range(8)]
    assert lengths[:4] == [1, 3, 5, 9] and sorted(lengths[4:]) == [1, 3, 5, 9]
    again, _ = make_sources(config)
    again.seek(stream.cursor())
    assert again.next() == stream.next()


def test_a_cursor_without_what_is_owed_is_taken(ten: str) -> None:
    source, _ = make_sources(run_config(ten, shuffle=False))
    source.seek(msgspec.msgpack.encode([[3], [10]]))
    assert source.next().task_id == "ten:3"


def test_priorities_stand_in_a_column_or_in_extra_info(tmp_path: Path) -> None:
    rows = [
        row(priority=2),
        row(extra_info={"priority": 0.5}),
        row(extra_info={"priority": "high"}),
        row(priority=None),
    ]
    source, _ = make_sources(run_config(jsonl(tmp_path / "p.jsonl", rows), shuffle=False))
    assert [source.next().priority for _ in range(4)] == [2.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("taken", [0, 3, 10, 27])
def test_a_cursor_finds_its_place(ten: str, tmp_path: Path, taken: int) -> None:
    other = jsonl(tmp_path / "other.jsonl", [row() for _ in range(3)])
    config = run_config((DataSource(path=ten, weight=2.0), DataSource(path=other)))
    source, _ = make_sources(config)
    for _ in range(taken):
        source.next()
    cursor = source.cursor()
    wanted = [source.next() for _ in range(20)]
    fresh, _ = make_sources(config)
    fresh.seek(cursor)
    assert [fresh.next() for _ in range(20)] == wanted


def test_weights_are_kept(ten: str, tmp_path: Path) -> None:
    other = jsonl(tmp_path / "other.jsonl", [row() for _ in range(3)])
    config = run_config((DataSource(path=ten, weight=3.0), DataSource(path=other, weight=1.0)))
    counts = Counter(name.split(":")[0] for name in names(config, 100))
    assert counts == {"0-ten": 75, "1-other": 25}


def test_a_cursor_of_other_data_is_refused(ten: str, tmp_path: Path) -> None:
    source, _ = make_sources(run_config(ten))
    other, _ = make_sources(run_config(jsonl(tmp_path / "o.jsonl", [row()])))
    with pytest.raises(DataError, match=r"data\.path"):
        other.seek(source.cursor())
    with pytest.raises(DataError, match="cursor"):
        other.seek(b"nonsense")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "row 1, column prompt"),
        ({"prompt": [{"role": "user"}]}, "row 1, column prompt, message 0"),
        ({"prompt": [{"content": "x"}]}, "row 1, column prompt, message 0"),
        ({"prompt": []}, "row 1, column prompt"),
        ({"reward_model": None}, "row 1, column reward_model"),
        ({"reward_model": {"ground_truth": None}}, "row 1, column reward_model"),
        ({"extra_info": "x"}, "row 1, column extra_info"),
        ({"agent_name": 3}, "row 1, column agent_name"),
        ({"tools": "x"}, "row 1, column tools"),
        ({"priority": "high"}, "row 1, column priority: needs a finite number"),
        ({"priority": True}, "row 1, column priority"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = jsonl(tmp_path / "bad.jsonl", [row(), row(**changes)])
    with pytest.raises(DataError, match=rf"bad\.jsonl, {message}"):
        make_sources(run_config(path))


@pytest.mark.parametrize("changes", [{"agent_name": "evil.py:run"}, {"tools": ["calculator", "os:system"]}])
def test_rows_name_no_code_unless_data_trust_code(tmp_path: Path, changes: dict[str, Any]) -> None:
    bad = jsonl(tmp_path / "bad.jsonl", [row(), row(**changes)])
    with pytest.raises(DataError, match=rf"bad\.jsonl, row 1, column {next(iter(changes))} .*data\.trust_code"):
        make_sources(run_config(bad))
    held_out = msgspec.structs.replace(run_config(jsonl(tmp_path / "good.jsonl", [row()])).data, eval_path=bad)
    with pytest.raises(DataError, match=r"data\.trust_code"):
        make_sources(RunConfig(model=ModelConfig(path="none"), data=held_out))
    assert make_sources(run_config(bad, trust_code=True))
    listed = AgentConfig(loop="evil.py:run", tools=("os:system",))
    assert make_sources(msgspec.structs.replace(run_config(bad), agent=listed)), "the config names it itself"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b"q,a\n1+1?,2,3\n", "row 0"),
        (b"q,q\n1+1?,2\n", "column q"),
        (b'q,a\n3,4\n"1+1?,2\n', "line 3.*CSV"),
        (b"q,a\n\xff,2\n", "UTF-8"),
        (b"q,a\n", "no rows"),
    ],
)
def test_a_bad_csv_file_is_refused(tmp_path: Path, text: bytes, place: str) -> None:
    (tmp_path / "bad.csv").write_bytes(text)
    with pytest.raises(DataError, match=place):
        list(open_rows(str(tmp_path / "bad.csv")))


def test_values_of_csv_are_text(tmp_path: Path) -> None:
    (tmp_path / "numbers.csv").write_bytes(b"\xef\xbb\xbfq,a\r\n1+1?,02\r\n\r\n,%s\r\n" % (tests := b"x" * 200_000))
    assert list(open_rows(str(tmp_path))) == [{"q": "1+1?", "a": "02"}, {"q": "", "a": tests.decode()}]


def test_floats_of_fewer_bits_are_the_decimals_that_were_written_at_any_depth(tmp_path: Path) -> None:
    narrow = pa.float32()
    columns = {
        "struct": pa.array([{"truth": 0.1}, {"truth": None}], pa.struct([("truth", narrow)])),
        "list": pa.array([[0.1], None], pa.list_(narrow)),
        "map": pa.array([[("a", 0.1)], []], pa.map_(pa.string(), narrow)),
        "structs": pa.array([[{"x": 0.1}]] * 2, pa.large_list(pa.struct([("x", narrow)]))),
        "half": pa.array([np.float16(0.1), None], pa.float16()),
        "alone": pa.array([0.1, math.inf], narrow),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    first, second = open_rows(str(tmp_path / "a.parquet"))
    assert first == {"struct": {"truth": 0.1}, "list": [0.1], "map": {"a": 0.1}} | {
        "structs": [{"x": 0.1}],
        "half": 0.1,
        "alone": 0.1,
    }
    assert (second["struct"], second["half"], second["alone"]) == ({"truth": None}, None, math.inf)


def test_files_that_are_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.parquet"):
        make_sources(run_config(str(tmp_path / "none.parquet")))
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"text\.parquet"):
        make_sources(run_config(str(tmp_path / "text.parquet")))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty\.parquet"):
        make_sources(run_config(str(tmp_path / "empty.parquet")))
    (tmp_path / "data.txt").write_text("a,b")
    with pytest.raises(DataError, match=r"known: \.parquet"):
        make_sources(run_config(str(tmp_path / "data.txt")))
    (tmp_path / "deep.jsonl").write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(DataError, match=r"deep\.jsonl, row 0"):
        make_sources(run_config(str(tmp_path / "deep.jsonl")))
    (tmp_path / "broken.jsonl").write_text('{"a": 1}\n[1]')
    with pytest.raises(DataError, match=r"broken\.jsonl, row 0, column reward_model"):
        make_sources(run_config(str(tmp_path / "broken.jsonl")))


@pytest.mark.parametrize("key", ["data.path", "data.eval_path"])
def test_first_rows_alone_show_what_the_queue_would_refuse(tmp_path: Path, key: str) -> None:
    good = jsonl(tmp_path / "good.jsonl", [row()])

    def check(path: str) -> None:
        train, held_out = (path, good) if key == "data.path" else (good, path)
        check_first_rows(run_config(train, eval_path=held_out))

    (tmp_path / "text.parquet").write_text("no parquet")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "list.jsonl").write_text("\n[1]\n")
    (tmp_path / "data.csv").write_text("a,b")
    late = [row() for _ in range(FIRST_ROWS)] + [row(prompt=None)]
    jsonl(tmp_path / "early.jsonl", late[1:])
    pq.write_table(pa.Table.from_pylist(late[1:]), tmp_path / "early.parquet")
    named = {"early.jsonl": f"early.jsonl, row {FIRST_ROWS - 1}, column prompt", "list.jsonl": "list.jsonl, row 0"}
    for name in ("text.parquet", "empty.jsonl", "list.jsonl", "data.csv", "early.jsonl", "early.parquet"):
        with pytest.raises(DataError, match=rf"^{key}: .*{named.get(name, name)}"):
            check(str(tmp_path / name))
    check(jsonl(tmp_path / "late.jsonl", late))
    check(good)
    check("reasoning_gym:chain_sum")


def test_of_each_file_the_first_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    rows = [row(f"task {number}", extra_info={"n": number}) for number in range(30)]
    table = pa.Table.from_pylist(rows)
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as file:
        file.write_table(table.slice(0, 0), row_group_size=7)
        file.write_table(table, row_group_size=7)
    pq.write_table(table.slice(0, 0), tmp_path / "b.parquet")
    assert [list(found) for found in open_files(str(tmp_path), 3)] == [rows[:3], []]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    assert [list(found) for found in open_files(path, 3)] == [rows[:3]]


def test_long_prompts_are_named(tmp_path: Path) -> None:
    from rl_async.agent_loop.tiny_tokenizer import train_tokenizer

    conversation = [{"role": "user", "content": "add 1"}, {"role": "assistant", "content": "2"}]
    train_tokenizer([conversation], 200).save_pretrained(tmp_path / "model")
    path = jsonl(tmp_path / "long.jsonl", [row("1" * 600), row("1" * 700)])
    config = RunConfig(
        model=ModelConfig(path=str(tmp_path / "model"), dtype="float32"),
        data=DataConfig(path=path, max_prompt_tokens=650),
    )
    with pytest.raises(DataError, match=r"long\.jsonl, row 1, column prompt: 7\d\d tokens"):
        make_sources(config)


def test_the_length_of_a_prompt_has_what_the_template_adds(tmp_path: Path) -> None:
    """Its own system message, the schemas of the tools that a row may call, and past calls."""
    template = (
        "{{ '<|im_start|>' + 's' * 300 }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
        "{{ '<|im_start|>' + message.role + message.content }}{% for call in message.tool_calls %}"
        "{{ call.function.name + (call.function.arguments | tojson) }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    )
    byte_tokenizer(template).save_pretrained(tmp_path / "model")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"x": "7" * 400}}}
    called = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    called.append({"role": "tool", "content": "7"})
    schemas = {"add": {"type": "function", "function": {"name": "add", "description": "d" * 500}}}
    cases = (("plain", row(tools=[]), 300), ("tools", row(), 800), ("calls", row(prompt=called, tools=[]), 700))
    for name, given, least in cases:
        for longest in (least, least + 150):
            config = RunConfig(
                model=ModelConfig(path=str(tmp_path / "model")),
                data=DataConfig(path=jsonl(tmp_path / f"{name}.jsonl", [given]), max_prompt_tokens=longest),
                agent=AgentConfig(tools=("add",)),
            )
            if longest > least:
                assert make_sources(config, schemas)
                continue
            with pytest.raises(DataError, match=rf"{name}\.jsonl, row 0, column prompt: {least // 100}\d\d tokens"):
                make_sources(config, schemas)


def test_a_prompt_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ '<|im_start|>' }}"
    byte_tokenizer(template).save_pretrained(tmp_path / "model")
    said = [{"role": "system", "content": "x" * 99}, {"role": "user", "content": "x"}]
    data = DataConfig(path=jsonl(tmp_path / "s.jsonl", [row(prompt=said)]), max_prompt_tokens=50)
    with pytest.raises(DataError, match=r"s\.jsonl, row 0, column prompt"):
        make_sources(RunConfig(model=ModelConfig(path=str(tmp_path / "model")), data=data))


def test_made_data_with_held_out_tasks(tmp_path: Path) -> None:
    make_data("shop", tmp_path, train=20, held_out=80, demos=1)
    config = run_config(str(tmp_path / "train.parquet"), eval_path=str(tmp_path / "test.parquet"))
    source, held_out = make_sources(config)
    assert [task.task_id for task in held_out] == [f"test:{i}" for i in range(64)]
    task = source.next()
    assert task.agent == "tool_agent"
    assert task.extra["price"] >= 2


def test_numbers_and_plain_text_are_taken(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [row(prompt="hello", reward_model={"ground_truth": [1, 2]})])
    task = make_sources(run_config(path))[0].next()
    assert task.prompt == [{"role": "user", "content": "hello"}]
    assert task.ground_truth == "[1, 2]"


def test_reasoning_gym() -> None:
    config = run_config("reasoning_gym:chain_sum", eval_path="reasoning_gym:chain_sum")
    source, held_out = make_sources(config)
    task = source.next()
    assert task.task_id == "reasoning_gym.chain_sum:0"
    assert task.prompt != held_out[0].prompt
    with pytest.raises(ConfigError, match="nothing"):
        make_sources(run_config("reasoning_gym:nothing"))


def test_the_tasks_of_a_replay_do_not_depend_on_how_far_the_recorded_run_has_got(tmp_path: Path) -> None:
    size = ["data.train_batch_groups=2", "trainer.steps=2"]
    config = load_config("calculator", [*size, f"rollout.replay={tmp_path}"], mode="disaggregated")
    for step in range(4):
        append_trained(tmp_path / "trained.jsonl", 0, step, make_rows(step, groups=2))
    source, held_out = tasks_of(config)
    assert [place_of(task) for task in iter(lambda: source.next(0), None) if task] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert held_out == []


# Images in rows: each form becomes bytes at its mark, and anything else is refused by name.


def picture(kind: str = "PNG", grey: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("L", (8, 8), grey).save(file, kind)
    return file.getvalue()


PNG, JPEG = picture(), picture("JPEG")
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def task_of(row: dict[str, Any], folder: Path | None = None) -> Task:
    return to_task({"reward_model": {"ground_truth": "3"}, **row}, "file, row 0", "t", folder)


def asked(content: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content, **more}]}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_formats_are_told_by_their_first_bytes(kind: str) -> None:
    assert mime_of(picture(kind)) == f"image/{kind.lower()}"


@pytest.mark.parametrize(
    "row",
    [
        # verl's column.
        asked("<image>what?") | {"images": [{"bytes": PNG, "path": None}]},
        {"prompt": "<image>what?", "images": [PNG]},
        asked("<image>what?") | {"images": [{"bytes": None, "path": "in/a.png"}]},
        asked("<image>what?") | {"images": ["in/a.png"]},
        asked("<image>what?") | {"images": [URL]},
        asked("<image>what?", images=[PNG]),
        # OpenAI's parts, of both dialects, and those of Qwen's and TRL's data.
        asked([{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "what?"}]),
        asked([{"type": "image_url", "image_url": "in/a.png"}, {"type": "text", "text": "what?"}]),
        asked([{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "what?"}]),
        asked([{"type": "image", "image": PNG}, {"type": "text", "text": "what?"}]),
        asked([{"type": "image"}, {"type": "text", "text": "what?"}]) | {"images": [PNG]},
        # As a message already is.
        asked(f"{MARK}what?", images=[PNG]),
    ],
)
def test_every_form_becomes_bytes_at_a_mark(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(PNG)
    task = task_of(row, tmp_path)
    assert task.prompt == [{"role": "user", "content": f"{MARK}what?", "images": [PNG]}]
    # The queue's journal and its messages keep the bytes.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task) == task


def test_images_go_to_the_messages_with_their_marks() -> None:
    prompt = [
        {"role": "system", "content": "Compare <image>"},
        {"role": "user", "content": "with <image> and <image>."},
    ]
    task = task_of({"prompt": prompt, "images": [PNG, JPEG, PNG]})
    assert [message["images"] for message in task.prompt] == [[PNG], [JPEG, PNG]]
    assert as_parts(task.prompt[1])["content"] == [
        {"type": "text", "text": "with "},
        {"type": "image"},
        {"type": "text", "text": " and "},
        {"type": "image"},
        {"type": "text", "text": "."},
    ]


def test_without_images_the_marks_are_text() -> None:
    assert task_of({"prompt": f"write <image> or {MARK}"}).prompt[0]["content"] == f"write <image> or {MARK}"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (asked("what?") | {"images": [PNG]}, "column images: 1 images for 0 marks"),
        (asked("<image><image>") | {"images": [PNG]}, "1 images for 2 marks"),
        (asked("<image>") | {"images": PNG}, "needs a list"),
        (asked("<image>") | {"images": [b"GIF89"]}, "not an image"),
        (asked("<image>") | {"images": [PNG[1:]]}, "not an image"),
        (asked("<image>") | {"images": [5]}, "int"),
        (asked("<image>") | {"images": [{"path": None}]}, "needs bytes, url or path"),
        (asked("<image>") | {"images": ["https://example.org/a.png"]}, "not fetched"),
        (asked("<image>") | {"images": ["file:///etc/passwd"]}, "not fetched"),
        (asked("<image>") | {"images": ["../secret.png"]}, "outside"),
        (asked("<image>") | {"images": ["/etc/hostname"]}, "outside"),
        (asked("<image>") | {"images": ["link.png"]}, "outside"),
        (asked("<image>") | {"images": ["missing.png"]}, "No such file"),
        (asked("<image>") | {"images": ["data:image/png,xx"]}, "needs base64"),
        (asked("<image>") | {"images": ["data:image/png;base64,%%%"]}, "not base64"),
        (asked("<image>") | {"images": [b"<svg xmlns='http://www.w3.org/2000/svg'/>"]}, "not an image in PNG"),
        (asked("<image>") | {"images": [b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"]}, "not an image in PNG"),
        (asked("<image>") | {"images": [b"%PDF-1.7"]}, "not an image in PNG"),
        (asked("<image>") | {"images": [b""]}, "needs|not an image"),
        (asked("<image>" * (MOST_IMAGES + 1)) | {"images": [PNG] * (MOST_IMAGES + 1)}, "65 images"),
        (asked([{"type": "video_url", "video_url": {"url": "x"}}]), "message 0: content part 0: of type 'video_url'"),
        (asked([{"type": "input_audio", "input_audio": {}}]), "input_audio"),
        (asked([{"type": "text"}]), "content part 0: needs its text"),
        (asked([{"type": "image_url"}]), "content part 0"),
        (asked([{"type": "image", "image": PNG}], images=[PNG]), "in its content and beside it"),
        (asked([{"type": "image", "image": PNG}, {"type": "text", "text": MARK}]), "U\\+FFFC"),
        (asked(f"{MARK}<image>") | {"images": [PNG]}, "U\\+FFFC"),
        (asked({"text": "x"}), "message 0"),
        (asked("x") | {"videos": ["a.mp4"]}, "has videos"),
    ],
)
def test_other_images_are_refused_by_name(row: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path.parent / "secret.png").write_bytes(PNG)
    (tmp_path / "link.png").symlink_to(tmp_path.parent / "secret.png")
    with pytest.raises(DataError, match=f"file, row 0.*{named}"):
        task_of(row, tmp_path)


# As parameters of a test, values of this size would take seconds.
def test_images_of_too_many_bytes_are_refused_by_name(tmp_path: Path) -> None:
    for image in (PNG + b"\0" * MOST_BYTES, "data:;base64," + "A" * (2 * MOST_BYTES)):
        with pytest.raises(DataError, match="more than 20 MiB"):
            task_of(asked("<image>") | {"images": [image]}, tmp_path)


def test_the_first_bytes_decide_about_the_kind_of_an_image(tmp_path: Path) -> None:
    (tmp_path / "photograph.jpg").write_bytes(PNG)
    assert read_image("photograph.jpg", tmp_path) == PNG
    assert mime_of(PNG) == "image/png"
    assert read_image("data:image/svg+xml;base64," + base64.b64encode(PNG).decode()) == PNG
    # As MIME and the command base64 write it.
    assert read_image("data:image/png;base64,\r\n " + base64.encodebytes(PNG).decode()) == PNG


def test_clients_name_no_files() -> None:
    with pytest.raises(DataError, match="only data sets may name files"):
        to_messages([{"role": "user", "content": "<image>", "images": ["a.png"]}], "a client's task")

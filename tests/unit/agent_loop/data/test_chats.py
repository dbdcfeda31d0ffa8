"""Bad conversations are named with file, line and message."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_async.agent_loop.training_data import read_chats
from rl_async.configs.schema.data import DataSource
from rl_async.errors import DataError

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', r"c\.jsonl, line 3: not a JSON object"),
        ("[1]", r"c\.jsonl, line 3: not a JSON object"),
        ({"text": "x"}, r"line 3: needs `messages`"),
        ({"messages": []}, r"line 3: needs `messages`"),
        ({"messages": [USER]}, "line 3: no assistant turn"),
        ({"messages": [ANSWER]}, "line 3: begins with the assistant"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "line 3, message 1"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, "line 3, message 1: unknown role 'bot'; known: system"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "line 3, message 1: needs its content as text"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": 1}]}]}, "line 3, message 1: a tool call needs"),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "line 3, message 1: arguments of f are not JSON",
        ),
        ({"messages": [USER, ANSWER], "tools": ["add"]}, "line 3: tools are a list of JSON schemas"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path / "c.jsonl", {"messages": [USER, ANSWER]}, "", line)
    with pytest.raises(DataError, match=message):
        list(read_chats(DataSource(path=path)))


def test_parquet_with_columns_that_are_null_reads_as_jsonl_does(tmp_path: Path) -> None:
    messages = [USER, ANSWER]
    table = pa.table({"messages": [[{**message, "tool_calls": None} for message in messages]], "tools": ["[]"]})
    pq.write_table(table, tmp_path / "c.parquet")
    (chat,) = read_chats(DataSource(path=str(tmp_path / "c.parquet")))
    assert chat.messages == messages and chat.tools == []


def test_parquet_calls_have_their_own_arguments_alone(tmp_path: Path) -> None:
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "look", "arguments": {"query": "x"}}]
    rows = [[USER, {**ANSWER, "tool_calls": [call]}] for call in calls]
    pq.write_table(pa.table({"messages": rows}), tmp_path / "c.parquet")
    chats = read_chats(DataSource(path=str(tmp_path / "c.parquet")))
    read = [chat.messages[1]["tool_calls"][0]["function"] for chat in chats]
    assert read == calls


@pytest.mark.parametrize(
    ("name", "message"), [("none.jsonl", "no file"), ("c.txt", "unknown kind"), ("e.jsonl", "no conversations")]
)
def test_files_that_hold_none(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path / "c.txt", "x")
    write(tmp_path / "e.jsonl", "")
    with pytest.raises(DataError, match=message):
        list(read_chats(DataSource(path=str(tmp_path / name))))


def test_a_data_set_has_a_system_message_and_a_template_of_its_own(tmp_path: Path) -> None:
    tool = {"role": "tool", "content": "9"}
    row = {"messages": [{"role": "system", "content": "x"}, USER, ANSWER, tool, USER, ANSWER], "level": 3}
    path = write(tmp_path / "c.jsonl", row)
    (chat,) = read_chats(DataSource(path=path, system="level {level}", prompt="{prompt} Think."))
    asked = {"role": "user", "content": f"{USER['content']} Think."}
    assert chat.messages == [{"role": "system", "content": "level 3"}, USER, ANSWER, tool, asked, ANSWER]
    (same,) = read_chats(DataSource(path=path))
    assert same.messages == row["messages"]
    with pytest.raises(DataError, match=r"line 1: .*\{grade\}"):
        list(read_chats(DataSource(path=path, prompt="{grade}")))

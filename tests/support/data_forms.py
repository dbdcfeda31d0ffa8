"""Forms in which rows come, and what becomes of each: the list behind a test and a table of the documentation."""

import datetime
import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

USER: dict[str, Any] = {"role": "user", "content": "1+2?"}
SAID: dict[str, Any] = {"role": "assistant", "content": "3"}
RESULT: dict[str, Any] = {"role": "tool", "content": "3", "tool_call_id": "c1"}
NESTED = 100  # levels


class Form(NamedTuple):
    """A row, and either ``value``, which ``part`` of it becomes, or ``refused``, the place that the error names.

    ``row`` is a mapping, written as JSONL or, with ``parquet``, as Parquet, or the bytes of a JSONL file; a table is
    written as it is.
    """

    name: str
    row: Mapping[str, Any] | bytes | pa.Table
    value: Any = None
    refused: str = ""
    part: str = ""
    parquet: bool = False
    template: str = ""


def _task(**columns: Any) -> dict[str, Any]:
    return {"prompt": [USER], "reward_model": {"ground_truth": "3"}, **columns}


def _truth(name: str, truth: Any, value: Any = None, *, parquet: bool = False) -> Form:
    refused = "" if value is not None else "row 0, column reward_model"
    row = _task(reward_model={"ground_truth": truth})
    return Form(name, row, value, refused, "ground_truth", parquet)


def _prompt(name: str, prompt: Any, value: Any = None, refused: str = "") -> Form:
    return Form(name, _task(prompt=prompt), value, "" if value is not None else refused, "prompt")


def _extra(name: str, extra: Any, value: Any = None, refused: str = "row 0, column extra_info", **how: Any) -> Form:
    return Form(name, _task(extra_info=extra), value, "" if value is not None else refused, "extra", **how)


def _chat(name: str, row: Mapping[str, Any], value: Any = None, refused: str = "", *, parquet: bool = False) -> Form:
    return Form(name, row, value, "" if value is not None else refused, "messages", parquet)


def _calling(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call], **more}, RESULT]


def _called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT]


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


_LATIN = json.dumps(_task(prompt="é"), ensure_ascii=False).encode("latin-1")
_LATER = json.dumps(_task()).encode() + b"\n\n" + _LATIN
_TEXT = {"prompt": "1+2?", "reward_model": {"ground_truth": "3"}}
_NOT_UTF8 = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xe9")])
_KEYS = pa.array([[(1, "a")]], pa.map_(pa.int64(), pa.string()))
_TWO_CALLS = {"add": {"a": 1, "to": {"x": 2, "y": None}}, "look": {"query": "x", "to": {"y": [{"z": 3}, {"w": 4}]}}}
_BEFORE_ARROW = [
    {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": given}]}
    for name, given in _TWO_CALLS.items()
]
_AFTER_ARROW = [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "to": {"x": 2}}}},
    {
        "type": "function",
        "function": {"name": "look", "arguments": {"query": "x", "to": {"y": [{"z": 3}, {"w": 4}]}}},
    },
]

_PARALLEL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}} for name in ("c1", "c2")
    ],
}

GROUND_TRUTHS = [
    _truth("text", "3", "3"),
    _truth("text of JSON", '{"a": 1}', '{"a": 1}'),
    _truth("an integer", 3, "3"),
    _truth("an integer of 30 digits", 10**29, "1" + "0" * 29),
    _truth("a number with a fraction", 42.0, "42.0"),
    _truth("a boolean", True, "true"),
    _truth("a list", [1, "é"], '[1, "é"]'),
    _truth("a mapping", {"inputs": ["1"], "fn_name": None}, '{"inputs": ["1"], "fn_name": null}'),
    Form(
        "mappings with different keys, in Parquet, where Arrow adds the keys that a row lacks",
        pa.Table.from_pylist([_task(reward_model={"ground_truth": truth}) for truth in ({"a": 1}, {"b": [{"c": 2}]})]),
        '{"a": 1}',
        part="ground_truth",
    ),
    _truth("a decimal number", Decimal("18.90"), "18.90", parquet=True),
    _truth("a date", datetime.date(2024, 5, 1), "2024-05-01", parquet=True),
    _truth("a time stamp", datetime.datetime(2024, 5, 1, 12), "2024-05-01T12:00:00", parquet=True),
    _truth("a list of dates", [datetime.date(2024, 5, 1)], '["2024-05-01"]', parquet=True),
    _truth("null", None),
    Form("no column `reward_model`", {"prompt": "1+2?"}, refused="row 0, column reward_model"),
    _truth("NaN, in Parquet", float("nan"), parquet=True),
    _truth("infinity inside a list, in Parquet", [1.0, float("inf")], parquet=True),
    Form("`NaN` in JSON", b'{"prompt": "x", "reward_model": {"ground_truth": NaN}}', refused="row 0 (line 1)"),
    Form(
        "template `{answer}` of a number of 32 bits, in Parquet",
        pa.table({"answer": pa.array([0.1], pa.float32())}),
        "0.1",
        part="ground_truth",
        template="{answer}",
    ),
    Form(
        "a number with digits that no float has",
        b'{"prompt": "x", "reward_model": {"ground_truth": 3.14159265358979323846}}',
        refused="row 0 (line 1)",
    ),
    _truth("bytes", b"3", parquet=True),
    _truth("a duration", datetime.timedelta(seconds=3), parquet=True),
    Form("template `{answer}` of a list", {"answer": ["a", 1]}, '["a", 1]', part="ground_truth", template="{answer}"),
    Form(
        "template `{answer}` of NaN, in Parquet",
        {"answer": float("nan")},
        refused="row 0: the template has {answer}",
        parquet=True,
        template="{answer}",
    ),
    Form(
        "template `{answer}` of an image or a sound of the library `datasets`",
        {"answer": {"bytes": None, "path": "a.wav"}},
        refused="row 0: the template has {answer}",
        template="{answer}",
    ),
]
PROMPTS = [
    _prompt("a text", "1+2?", [USER]),
    _prompt("messages", [{"role": "system", "content": "Add."}, USER], [{"role": "system", "content": "Add."}, USER]),
    _prompt("a text that begins as JSON does", "[1, 2] sorted?", [{"role": "user", "content": "[1, 2] sorted?"}]),
    _prompt("an empty system message, which replaces a template's own", [{"role": "system", "content": ""}, USER],
            [{"role": "system", "content": ""}, USER]),
    _prompt("an empty tool result", [*_calling({})[:2], {"role": "tool", "content": None}],
            [*_called("{}")[:2], {"role": "tool", "content": ""}]),
    _prompt("calls with arguments as JSON text, content null", _calling('{"a":1}'), _called('{"a":1}')),
    _prompt("calls with arguments as a mapping", _calling({"a": None, "b": "é"}), _called('{"a": null, "b": "é"}')),
    _prompt("calls without arguments", _calling(None), _called("{}")),
    _prompt(
        "calls without `function`",
        [USER, {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}]}, RESULT],
        [
            USER,
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{}"}}],
                "content": "",
            },
            RESULT,
        ],
    ),
    _prompt("messages as JSON text", json.dumps([USER]), refused="row 0, column prompt"),
    _prompt("messages as Python prints them", repr([USER]), refused="row 0, column prompt"),
    _prompt("messages as NumPy prints them", f"array([{USER}], dtype=object)", refused="row 0, column prompt"),
    _prompt("messages as JSON text, twice", json.dumps(json.dumps([USER])), refused="row 0, column prompt"),
    _prompt("a text that a chat template has printed", "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n",
            refused="row 0, column prompt"),
    _prompt("an object with messages, as JSON text", json.dumps({"messages": [USER]}), refused="row 0, column prompt"),
    _prompt("an empty text", " ", refused="row 0, column prompt"),
    _prompt("no messages", [], refused="row 0, column prompt"),
    _prompt("a role `human`", [USER, {"role": "human", "content": "x"}], refused="row 0, column prompt, message 1"),
    _prompt("`from` and `value`", [{"from": "human", "value": "x"}], refused="row 0, column prompt, message 0"),
    _prompt("an empty turn of the user", [USER, {"role": "user", "content": " "}],
            refused="row 0, column prompt, message 1"),
    _prompt("an empty turn of the assistant", [USER, {"role": "assistant", "content": None}],
            refused="row 0, column prompt, message 1"),
    _prompt("content in parts", [{"role": "user", "content": [{"type": "text", "text": t} for t in ("1+", "2?")]}],
            [USER]),
    _prompt("a part with a video", [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}],
            refused="row 0, column prompt, message 0"),
    _prompt("an image that would have to be fetched", [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]}],
            refused="row 0, column prompt, message 0"),
    _prompt("arguments that are not JSON", _calling("{'a': 1}"), refused="row 0, column prompt, message 1"),
    _prompt("arguments that are JSON twice", _calling(json.dumps('{"a": 1}')),
            refused="row 0, column prompt, message 1"),
    _prompt("arguments with a key twice", _calling('{"a": 1, "a": 2}'), refused="row 0, column prompt, message 1"),
    _prompt("a result of a call that there is not", [*_calling({})[:2], {**RESULT, "tool_call_id": "c2"}],
            refused="row 0, column prompt, message 2"),
    _prompt(
        "results of parallel calls in another order, put into that of the calls",
        [USER, _PARALLEL, *({**RESULT, "tool_call_id": name} for name in ("c2", "c1"))],
        [USER, _PARALLEL, *({**RESULT, "tool_call_id": name} for name in ("c1", "c2"))],
    ),
    _prompt(
        "images in results of parallel calls in another order",
        [USER, _PARALLEL, *({**RESULT, "content": "<image>", "tool_call_id": name} for name in ("c2", "c1"))],
        refused="row 0, column prompt, message 2",
    ),
    _prompt("`attachments` and the like", [{**USER, "attachments": ["a.pdf"]}],
            refused="row 0, column prompt, message 0"),
    _prompt("OpenAI's old `function_call`", _calling({}, function_call={"name": "add", "arguments": "{}"}),
            refused="row 0, column prompt, message 1"),
    _prompt("a call that is not of a function", [USER, {"role": "assistant", "tool_calls": [
        {"type": "custom", "name": "add", "input": "x"}]}], refused="row 0, column prompt, message 1"),
    _prompt("arguments beside `function`", [USER, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "function": {"name": "add"}, "arguments": {"a": 1}}]}, RESULT], _called('{"a": 1}')),
    _prompt("`parameters` in place of `arguments`", [USER, {"role": "assistant", "tool_calls": [
        {"name": "add", "parameters": {"a": 1}}]}, RESULT], refused="row 0, column prompt, message 1"),
    _prompt("an identity of a call that is a number", [*_calling({})[:2], {**RESULT, "tool_call_id": 1}],
            refused="row 0, column prompt, message 2"),
    _prompt("`images` in a message without a mark", [{**USER, "images": ["a.png"]}],
            refused="row 0, column prompt, message 0"),
    _prompt("a last turn of the assistant", [USER, SAID], refused="row 0, column prompt"),
    _prompt("a call of a user", [{**USER, "tool_calls": [{"name": "add", "arguments": {}}]}],
            refused="row 0, column prompt, message 0"),
]  # fmt: skip
OTHER_COLUMNS = [
    _extra("`extra_info` with an integer of 64 bits", {"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
    _extra("`extra_info` with null", {"seed": None}, {"seed": None}),
    _extra("`extra_info` with a decimal number", {"n": Decimal("1.50")}, {"n": "1.50"}, parquet=True),
    _extra("`extra_info` with an integer of more than 64 bits", {"seed": 10**29}),
    _extra("`extra_info` with one inside a list", {"seeds": [{"a": [-(2**63) - 1]}]}),
    _extra("`extra_info` that is a text", "x"),
    _extra("`extra_info` nested 100 levels deep", {"a": _nested(NESTED)}, refused="row 0 (line 1)"),
    Form(
        "`extra_info` with keys that are not text, in Parquet",
        pa.Table.from_pylist([_task()]).append_column("extra_info", pa.StructArray.from_arrays([_KEYS], ["a"])),
        refused="row 0, column extra_info",
    ),
    Form("`tools` as schemas", _task(tools=[{"type": "function"}]), refused="row 0, column tools"),
    Form("`images` that are missing", _task(images=[{"bytes": "", "path": "a.png"}]), refused="row 0, column images"),
    Form(
        "`system` beside a prompt that has its text",
        _task(system="Add.", prompt="Add. 1+2?"),
        [{"role": "user", "content": "Add. 1+2?"}],
        part="prompt",
    ),
    Form("`system` or `system_prompt` beside a prompt without it", _task(system_prompt="Add."), refused="row 0"),
    Form("`chat_template_kwargs`", _task(chat_template_kwargs={"enable_thinking": False}), refused="row 0"),
    Form("`image`", _task(image="a.png"), refused="row 0"),
    Form("`videos`", _task(videos=["a.mp4"]), refused="row 0"),
    Form("`priority` beyond any float", _task(priority=10**400), refused="row 0, column priority"),
]
FILES = [
    Form(
        "JSONL in UTF-8 that begins with its mark", b"\xef\xbb\xbf" + json.dumps(_TEXT).encode(), [USER], "", "prompt"
    ),
    Form("JSONL in Latin-1", _LATIN, refused="row 0 (line 1)"),
    Form("JSONL with a line in Latin-1 behind a blank one", _LATER, refused="row 1 (line 3)"),
    Form("JSONL in UTF-16", json.dumps(_task()).encode("utf-16"), refused="row 0 (line 1)"),
    Form("JSONL with a key twice in one object", b'{"prompt": "x", "prompt": "y"}', refused="row 0 (line 1)"),
    Form("JSONL that is a pointer of Git LFS", b"version https://git-lfs.github.com/spec/v1", refused="row 0 (line 1)"),
    Form("JSONL with a list on a line", b"[1]", refused="row 0 (line 1)"),
    Form("JSONL nested deeper than any reader goes", b'{"a": ' + b"[" * 100_000, refused="row 0 (line 1)"),
    Form("Parquet with text that is not UTF-8", pa.table({"prompt": _NOT_UTF8}), refused="row 0, column prompt"),
    Form(
        "Parquet with two columns of one name",
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"]),
        refused="column prompt",
    ),
]
CHATS = [
    _chat("arguments as JSON text", {"messages": _calling('{"a": 1}')}, _called({"a": 1})),
    _chat("arguments as a mapping", {"messages": _calling({"a": None})}, _called({"a": None})),
    _chat(
        "calls with different arguments, in Parquet, where Arrow adds the keys that a call lacks",
        {"messages": [USER, *_BEFORE_ARROW]},
        [USER, *({"role": "assistant", "tool_calls": [call], "content": ""} for call in _AFTER_ARROW)],
        parquet=True,
    ),
    _chat("`tools` as JSON text", {"messages": [USER, SAID], "tools": '[{"name": "add"}]'}, [USER, SAID]),
    _chat("`system` or `system_prompt` in a column of its own", {"messages": [USER, SAID], "system": "Add."},
          refused="line 1"),
    _chat("`tools` without a name", {"messages": [USER, SAID], "tools": [{"type": "function"}]}, refused="line 1"),
    _chat("messages as JSON text", {"messages": json.dumps([USER, SAID])}, refused="line 1"),
    _chat("`prompt` and `completion` in place of `messages`", {"prompt": "x", "completion": "y"}, refused="line 1"),
    _chat("an empty turn of the user", {"messages": [{**USER, "content": ""}, SAID]}, refused="line 1, message 0"),
    _chat("a turn with `weight: 0`", {"messages": [USER, {**SAID, "weight": 0}]}, refused="line 1, message 1"),
    _chat("`train: false`, `loss: false` or another weight of a turn", {"messages": [USER, {**SAID, "train": False}]},
          refused="line 1, message 1"),
    _chat("reasoning in parts", {"messages": [USER, {**SAID, "reasoning_content": ["so"]}]},
          refused="line 1, message 1"),
    _chat("OpenAI's old `functions`", {"messages": [USER, SAID], "functions": [{"name": "add"}]}, refused="line 1"),
    _chat("arguments nested 100 levels deep as JSON text",
          {"messages": _calling(json.dumps({"a": _nested(NESTED)}))}, refused="line 1, message 1"),
]  # fmt: skip
TABLES = {
    "ground truth of a task": GROUND_TRUTHS,
    "`prompt` of a task": PROMPTS,
    "other columns of a task": OTHER_COLUMNS,
    "file": FILES,
    "`messages` of a conversation for `sft`": CHATS,
}
FORMS = [form for forms in TABLES.values() for form in forms]


def write(form: Form, folder: Path) -> Path:
    """Write a form's row as the only one of a file, or its whole table."""
    if isinstance(form.row, bytes):
        (folder / "rows.jsonl").write_bytes(form.row)
    elif isinstance(form.row, pa.Table) or form.parquet:
        table = form.row if isinstance(form.row, pa.Table) else pa.Table.from_pylist([dict(form.row)])
        pq.write_table(table, folder / "rows.parquet")
        return folder / "rows.parquet"
    else:
        (folder / "rows.jsonl").write_text(json.dumps(form.row))
    return folder / "rows.jsonl"


def tables() -> str:
    """Return the tables of the documentation."""
    parts = []
    for title, forms in TABLES.items():
        lines = [f"| {title} | becomes |", "|---|---|"]
        lines += [f"| {form.name} | {_outcome(form)} |" for form in forms]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _outcome(form: Form) -> str:
    if form.refused:
        return "refused"
    shown = form.value if isinstance(form.value, str) else json.dumps(form.value, ensure_ascii=False)
    return f"`{shown}`" if len(shown) < 130 else "read, with calls"

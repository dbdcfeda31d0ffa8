"""Bytes from outside a process are decoded under a guard, and end in the module's own error, which names the file."""

import ast
import gzip
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_async.configs.importing.translation import read_settings
from rl_async.errors import ConfigError, UserError
from rl_async.insight.live_figures import conversation_of
from rl_async.insight.recorded_evaluations import side_by_side
from rl_async.insight.tail import last_record
from rl_async.insight.view.trajectories import row_at
from rl_async.launcher.plan.memory import read_shape
from rl_async.model_files import read_object
from rl_async.process.run_files import read_beats, read_budget, read_progress, read_request
from rl_async.recording import trained_file
from rl_async.trainer.checkpoints import read_state
from rl_async.trainer.finetune.loop import keep_lines
from rl_async.trainer.records import is_evaluated
from rl_async.transfer_queue.chat_messages import read_schemas

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {"tests", "benchmarks", "examples", "docs", "scripts"}
DECODERS = ("json.loads", "json.load", "json.decode", "msgpack.decode", "yaml.decode", "toml.decode", "tomllib.loads")

PEER = "another process of the run, which sends what this version encodes"
CALLER = "the caller holds the guard"
CHECKED = "decoded once before, when it was checked"
# Functions that decode without a guard of their own: where the bytes come from, or who holds the guard.
WITHOUT = {
    ("rl_async/installation.py", "_source"): "metadata of the installed distribution",
    ("rl_async/recording.py", "read_trajectories"): CALLER,
    ("rl_async/json_values.py", "lost_when_read"): CHECKED,
    ("reward_loop/scorers/code_tests.py", "_decoded_value"): CALLER,
    ("rl_async/template_tokens.py", "_unprefixed"): "the tokenizer's library prints it",
    ("configs/engines.py", "with_float32_logits"): "what the same file declares; the user's part is guarded",
    ("launcher/plan/trials.py", "main"): PEER,
    ("launcher/runs/rehearsal.py", "main"): PEER,
    ("launcher/runs/rehearsal.py", "rehearse"): PEER,
    ("launcher/handle.py", "_named"): "what the same line has encoded",
    (
        "trainer/finetune/chat_rows.py",
        "map",
    ): "written by the launcher beside the arrays",
    ("transfer_queue/store.py", "decode_snapshot"): CALLER,
    ("transfer_queue/chat_messages.py", "_with_mapping"): CHECKED,
    ("transfer_queue/store.py", "recover"): CALLER,
    ("rollout_server/embedded/server.py", "generate"): CALLER,
    ("rollout_server/embedded/server.py", "abort"): CALLER,
    ("rollout_server/embedded/server.py", "init_transfer"): CALLER,
    ("rollout_server/embedded/server.py", "update"): CALLER,
    ("rollout_server/embedded/server.py", "finish_update"): CALLER,
    ("rollout_server/embedded/server.py", "weight_checker"): CALLER,
    ("rollout_server/json_schemas.py", "_one_line"): CALLER,
    ("rollout_server/vllm/slices.py", "weight_boxes"): PEER,
    ("reward_loop/scorers/code_driver.py", "main"): PEER,
    ("reward_loop/scorers/code_driver.py", "main_apart"): PEER,
    ("reward_loop/scorers/code_driver.py", "serve"): PEER,
    (
        "reward_loop/scorers/scorer_registry.py",
        "_open_dataset",
    ): "a config key that has been checked",
    ("reward_loop/server/app.py", "_read"): CALLER,
    ("agent_loop/chat_formats/render.py", "_within"): CHECKED,
    ("agent_loop/chat_formats/render.py", "nested"): CHECKED,
    ("agent_loop/endpoint.py", "_last_said"): "the endpoint's client encodes it",
    ("agent_loop/environments/harbor.py", "_numbers"): CALLER,
    ("agent_loop/tools/mcp_connection.py", "_asked"): "the SDK encodes it in this process",
    ("agent_loop/tools/mcp_connection.py", "_answered"): "the SDK encodes it in this process",
    ("agent_loop/environments/host_process.py", "serve"): PEER,
    ("agent_loop/environments/player/verifiers.py", "main"): PEER,
    ("agent_loop/environments/verifiers.py", "_load"): CHECKED,
    ("agent_loop/gateway/anthropic.py", "blocks"): CHECKED,
    ("sandbox/inside.py", "serve"): PEER,
    ("insight/tail.py", "record_of"): CALLER,
    ("insight/view/index.py", "_index"): CALLER,
}
GUARDS = ("UNDECODABLE", "DAMAGE", "undamaged", "RecursionError")


def _decodes(node: ast.AST, function: str = "", guards: str = "") -> Iterator[tuple[str, int, str]]:
    """Yield function, line and guards of each decode below a node."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function, guards = node.name, ""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(DECODERS):
        yield function, node.lineno, guards
    inside = guards
    if isinstance(node, ast.Try):
        inside += "".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
    if isinstance(node, ast.With | ast.AsyncWith):
        inside += "".join(ast.unparse(item) for item in node.items)
    body = getattr(node, "body", [])
    for child in ast.iter_child_nodes(node):
        yield from _decodes(child, function, inside if isinstance(body, list) and child in body else guards)


def test_decodes_of_bytes_from_outside_are_guarded() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in tracked.stdout.splitlines() if name.split("/")[0] not in OTHERS]
    found = {name: list(_decodes(ast.parse((ROOT / name).read_text()))) for name in files}
    bare = {
        (name, function): line
        for name, decodes in found.items()
        for function, line, guards in decodes
        if not any(guard in guards for guard in GUARDS)
    }

    assert sum(map(len, found.values())) > len(WITHOUT)
    assert bare.keys() - WITHOUT.keys() == set(), "guard them, or say in WITHOUT where their bytes come from"
    assert WITHOUT.keys() - bare.keys() == set(), "these are guarded, or gone"


CONTENTS = {
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "half a pair": b'"\\ud800"',
    "not UTF-8": b'"\xff"',
    "long": b"1" * 5000,
    "negative": b"-" + b"1" * 5000,
    "NaN": b"NaN",
    "cut": b'{"a": 1',
    "list": b"[]",
    "nothing": b"",
}


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "profile request": ("profiles/request.json", read_request),
    "schemas": ("tools.json", read_schemas),
    "budget": ("memory.json", read_budget),
    "heartbeat": ("ranks/0.json", read_beats),
    "progress": ("progress/engine-0.json", lambda run: read_progress(run, "engine-0")),
    "evaluated": ("evaluations.jsonl", lambda run: is_evaluated(run, 3)),
    "lines of a finetune run": ("metrics.jsonl", lambda run: keep_lines(run / "metrics.jsonl", "step", 3)),
    "last record": ("metrics.jsonl", lambda run: last_record(run / "metrics.jsonl")),
    "checkpoint": ("state.json", read_state),
    "object": ("config.json", lambda run: read_object(run / "config.json", "model.path")),
    "shape": ("config.json", lambda run: read_shape("model.path", run)),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_damaged_files_of_a_run_are_named(
    reader: tuple[str, Callable[[Path], Any]], content: bytes, tmp_path: Path
) -> None:
    name, read = reader
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content if not name.endswith("l") else content + b"\n")
    # JSON Lines files may have an empty line at the end.
    if name == "metrics.jsonl" and not content:
        return

    with pytest.raises(UserError) as caught:
        read(tmp_path)

    assert str(file) in str(caught.value)


ROWS: dict[str, Callable[[Path, Path], Any]] = {
    "row of the view": lambda run, file: row_at(file, 0),
    "conversation of the view": lambda run, file: conversation_of(run, {"step": 1, "lineage": 0}, 1),
    "evaluations side by side": lambda run, file: side_by_side(file, file, "a", "b"),
}


@pytest.mark.parametrize("content", [content for content in CONTENTS.values() if content], ids=list(CONTENTS)[:-1])
@pytest.mark.parametrize("read", ROWS.values(), ids=ROWS)
def test_damaged_rows_are_named(read: Callable[[Path, Path], Any], content: bytes, tmp_path: Path) -> None:
    file = trained_file(tmp_path, 1, 0, 0)
    file.parent.mkdir()
    for written in (gzip.compress(content + b"\n"), content):
        file.write_bytes(written)

        with pytest.raises(UserError) as caught:
            read(tmp_path, file)

        assert str(file) in str(caught.value)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "true", '"64"', "1.5", "[]", "1" * 400, '"\\ud800"'])
@pytest.mark.parametrize("name", ["hidden_size", "max_position_embeddings"])
def test_sizes_of_a_model_are_whole_numbers(name: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in (f'{{"{name}": {value}}}', f'{{"text_config": {{"{name}": {value}}}}}'):
        file.write_text(text)

        with pytest.raises(UserError, match=name) as caught:
            read_shape("model.path", tmp_path)

        assert "model.path" in str(caught.value) and str(file) in str(caught.value)


def test_other_values_of_a_model_may_be_infinite(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "head_dim": null, "time_step_limit": [0.0, Infinity]}')

    assert read_shape("model.path", tmp_path) is not None


def test_a_number_of_thousands_of_digits_in_foreign_settings_is_named(tmp_path: Path) -> None:
    for name, text in (("a.toml", f"a = {'1' * 5000}"), ("a.yaml", f"a: {'1' * 5000}"), ("a.json", "[" * 100_000)):
        file = tmp_path / name
        file.write_text(text)

        with pytest.raises(ConfigError) as caught:
            read_settings(file)

        assert str(file) in str(caught.value)

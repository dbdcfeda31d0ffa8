"""The `rl-async` command as a process: what it imports, its exit code, a reader that goes away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "pyarrow", "zmq", "aiohttp", "rich", "numpy"}


def cli(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "rl_async.launcher.cli", *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("command", [[], ["reward-model"]])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys\nfrom rl_async.launcher.cli.__main__ import main\n"
        f"try:\n    main({[*command, '--help']})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"found = {HEAVY!r} & sys.modules.keys()\nassert not found, found"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "usage: rl-async" in result.stdout


def test_neither_planning_nor_launching_imports_torch() -> None:
    code = "import sys, rl_async.launcher.runs.launch, rl_async.launcher.runs.launch\nassert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_a_mistake_ends_the_process_with_2_and_no_traceback() -> None:
    result = cli("launch", "--config", "calculator", "queue.max_stalness=2")
    assert result.returncode == 2
    assert "did you mean queue.max_staleness?" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "rl_async.launcher.cli", "config", "explain", "algorithm.correction"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_files_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("extends: calculator\nreward: {functions: [{name: 漢.py:f}]}\n", encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "rl_async.launcher.cli", "config", "show", str(tmp_path / "c.yaml")]
    shown = subprocess.run(command, capture_output=True, env=os.environ | plain, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert b"\\u6F22.py:f" in shown.stdout


def test_a_directory_that_is_gone_and_a_name_that_is_too_long_are_mistakes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rl_async.launcher.cli", "audit", "a" * 300]
    for script in ('rmdir "$PWD"; exec "$@"', 'exec "$@"'):
        (tmp_path / "x").mkdir(exist_ok=True)
        ended = subprocess.run(
            ["sh", "-c", script, "sh", *command], cwd=tmp_path / "x", capture_output=True, timeout=120
        )
        assert ended.returncode == 2 and ended.stderr.count(b"\n") == 1, ended.stderr

"""The code of a model's repository is never run, nor is the user asked for permission to run it."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_async.errors import UserError
from tests.support.configs import float32_config

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent_loop", "insight", "launcher", "reward_loop", "rollout_server", "trainer")


def describe(folder: Path) -> Any:
    from rl_async.launcher.model_info import describe

    return describe(folder, float32_config(None, [f"model.path={folder}", "data.path=none"]))


def train(folder: Path) -> Any:
    from rl_async.trainer.model import build_headed

    return build_headed(str(folder), "policy")


def serve(folder: Path) -> Any:
    from rl_async.rollout_server.embedded.server import load_model

    return load_model(float32_config(None, [f"model.path={folder}", "data.path=none", "model.device=cpu"]))


@pytest.mark.parametrize("load", [describe, train, serve])
def test_a_model_that_needs_code_of_its_own_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[Path], Any]
) -> None:
    asked: list[str] = []

    def answer(prompt: str = "") -> str:
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    code = {"AutoConfig": "conf.Conf", "AutoModelForCausalLM": "conf.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    (tmp_path / "conf.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError):
        load(tmp_path)
    assert asked == [] and not (tmp_path / "ran").exists()


def test_every_auto_class_is_told_to_run_no_code() -> None:
    found = [
        (file, call)
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        if "from_" in (text := file.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("from_pretrained", "from_config"))
    ]
    autos = [(file, call) for file, call in found if ast.unparse(call.func).startswith(("Auto", "kind."))]
    silent = [f"{file}:{call.lineno}" for file, call in autos if "trust_remote_code=False" not in ast.unparse(call)]
    assert len(autos) >= 10 and silent == []

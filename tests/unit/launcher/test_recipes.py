"""Every recipe of examples/recipes: its data can be made, and a dry run takes its config."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from rl_async.launcher.cli.__main__ import main

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "examples" / "recipes"
# The script that makes a recipe's data, and the package that it imports.
SCRIPTS = {"search": ("search.py", "bm25s"), "retool": ("tasks.py", ""), "self_play": ("nim.py", "textarena")}
NAMES = sorted(file.parent.name for file in RECIPES.glob("*/config.yaml"))


def row(prompt: str, answer: str) -> dict[str, object]:
    """Return a row with the columns of all published data sets that recipes name."""
    messages = [{"role": "user", "content": prompt}]
    return {
        "data_source": "x",
        "prompt": messages,
        "question": prompt,
        "answer": f"#### {answer}",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"seed": 1},
    }


def test_each_recipe_is_described_in_its_folder() -> None:
    folders = {path.name for path in RECIPES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(NAMES) == folders
    for name in NAMES:
        assert f"examples/recipes/{name}/" in (RECIPES / name / "README.md").read_text()
        assert f"({name}/README.md)" in (RECIPES / "README.md").read_text()

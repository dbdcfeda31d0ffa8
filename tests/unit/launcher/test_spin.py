"""examples/spin.py: the answers of a data set, and the model's own."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rl_async.errors import DataError

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def spin(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("spin")


def conversations(file: Path, *rows: Any) -> str:
    file.write_text("".join(f"{json.dumps({'messages': row})}\n" for row in rows))
    return str(file)


def test_each_turn_of_the_assistant_is_an_answer(spin: Any, tmp_path: Path) -> None:
    asked, answered = ({"role": role, "content": role[0]} for role in ("user", "assistant"))
    data = conversations(tmp_path / "x.jsonl", [asked, answered, asked, answered], [asked, answered], [asked, answered])
    assert list(spin.turns(data, 2)) == [
        ([asked], "a"),
        ([asked, answered, asked], "a"),
        ([asked], "a"),
    ]
    for row in ([asked], [asked, answered | {"content": None}], None):
        with pytest.raises(DataError, match="row 0"):
            list(spin.turns(conversations(tmp_path / "y.jsonl", row), 2))


def test_answers_are_sampled_by_the_seed(spin: Any, model_folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(model_folder, tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer.save_pretrained(model)
    prompts = [[{"role": "user", "content": words}] for words in ("w3 w4", "w5", "w6 w7 w8")]
    own = spin.sampled(model, prompts, tokens=5, seed=1)
    assert len(own) == 3 and all(len(text.split()) <= 5 for text in own)
    assert spin.sampled(model, prompts, tokens=5, seed=1) == own != spin.sampled(model, prompts, tokens=5, seed=9)

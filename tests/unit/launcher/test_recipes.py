"""The recipes load, and score answers to rows of their data sets in the published form."""

import json
from pathlib import Path

import pytest
import yaml

from rl_async.configs.load import load_config
from rl_async.launcher.cli.__main__ import main

RECIPES = Path(__file__).parents[3] / "examples" / "recipes"
GSM8K = {
    "question": "Natalia sold clips to 48 friends in April, and half as many in May. How many did she sell?",
    "answer": "In May she sold 48/2 = <<48/2=24>>24.\nTogether 48+24 = <<48+24=72>>72.\n#### 72",
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": 'The last line should be "Answer: $Answer".\n\nWhat is 30 + 4?', "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_recipe_loads(file: Path) -> None:
    load_config(str(file), [])


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong"),
    [
        ("gsm8k_lora", GSM8K, ["24 + 48\n#### 72", "#### 72.0", r"\boxed{72}"], ["#### 24\nwas May", "72", ""]),
        ("dapo_math_7b", DAPO, ["so\nAnswer: 34", "Answer: $34$", r"Answer: \boxed{34}"], ["34", "Answer: 35", ""]),
    ],
)
def test_a_recipe_scores_answers_to_published_rows(
    name: str, row: object, right: list[str], wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    for key in ("path", "eval_path"):
        if isinstance(config["data"][key], list):
            config["data"][key][0]["path"] = str(tmp_path / "rows.jsonl")
        else:
            config["data"][key] = str(tmp_path / "rows.jsonl")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(config))
    lines = [json.dumps({"row": 0, "answer": answer}) for answer in right + wrong]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    given = ["--answers", str(tmp_path / "answers.jsonl"), "--config", str(tmp_path / "recipe.yaml")]
    assert main(["reward", "test", str(tmp_path / "rows.jsonl"), *given]) == 0
    rewards = [block.partition("\n")[0] for block in capsys.readouterr().out.split("row ")[1:]]
    assert rewards == ["0: reward 1"] * len(right) + ["0: reward 0"] * len(wrong)

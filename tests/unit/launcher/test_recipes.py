"""Every recipe of examples/recipes: its data can be made, and a dry run takes its config."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest

from rl_async.configs.load import load_config
from rl_async.launcher.cli.__main__ import main
from rl_async.messages import Turn

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "examples" / "recipes"
# The script that makes a recipe's data, and the package that it imports.
SCRIPTS = {"search": ("search.py", "bm25s"), "retool": ("tasks.py", ""), "self_play": ("nim.py", "textarena")}
# Their dry runs do what another recipe's does, or take longest.
SLOW = {"dapo_math", "reasoning_gym", "retool", "search", "self_play"}
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


@pytest.fixture(scope="module")
def chat_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}w1{% endfor %}")
    return folder


def test_each_recipe_is_described_in_its_folder() -> None:
    folders = {path.name for path in RECIPES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(NAMES) == folders
    for name in NAMES:
        assert re.search(rf"examples([./])recipes\1{name}\1", (RECIPES / name / "README.md").read_text()), name
        assert f"({name}/README.md)" in (RECIPES / "README.md").read_text()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in NAMES if name != "dpo"]
)
def test_a_dry_run_takes_each_recipe(
    name: str, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Paths in recipes are relative to the repository's root.
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    given = []
    if name in SCRIPTS:
        script, package = SCRIPTS[name]
        if package:
            pytest.importorskip(package)
        monkeypatch.setattr("sys.argv", [script])
        runpy.run_path(str(RECIPES / name / script), run_name="__main__")
    elif name == "distillation":
        given = [f"algorithm.teacher.path={chat_model}"]
    else:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row("What is 1 + 1?", "2")) + "\n")
        # The models and data of these come from elsewhere.
        given = [f"model.path={chat_model}", "rollout.engine=embedded", "data.path=rows.jsonl"]
    if name in ("gsm8k", "dapo_math"):
        given += ["data.eval_path=rows.jsonl"]
    if name == "dapo_math":
        # Its eight GPUs' batch does not fit the memory of a small machine.
        given += ["data.train_batch_groups=16", "rollout.engines=1", "trainer.ranks=1", "trainer.sequence_parallel=1"]
    assert main(["launch", "--config", f"examples/recipes/{name}/config.yaml", "--dry-run", *given]) == 0


def test_moves_of_nim_are_counted() -> None:
    tally = runpy.run_path(str(RECIPES / "self_play" / "nim.py"))["tally"]
    said = [
        ("user", "Current Pile:\n  pile 0: 2\n  pile 1: 3"),
        ("assistant", "[1 5]"),
        ("user", "Cannot remove 5 from pile 1 (only 3 left)."),
        ("assistant", "[1 1]"),
        ("user", "  pile 0: 2\n  pile 1: 2\n  pile 0: 1\n  pile 1: 2"),
        ("assistant", "[0 1]"),
        ("user", "  pile 0: 1\n  pile 1: 1"),
        ("assistant", "no move"),
    ]
    found = tally(Turn(role=role, text=text) for role, text in said)
    assert found == {"moves": 4, "broken": 2, "winning": 3, "won": 1}


def test_every_config_loads_also_those_that_no_dry_run_takes() -> None:
    dpo = load_config(str(RECIPES / "dpo" / "config.yaml"))
    assert dpo.finetune.out not in ("", dpo.model.path)
    tiny, whole = (load_config(str(RECIPES / "reasoning_gym" / f"{name}.yaml")) for name in ("tiny", "config"))
    assert tiny.agent.environment_options == whole.agent.environment_options

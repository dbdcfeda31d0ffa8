"""Code that a config names is loaded, in a process of its own, before a run has a folder."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_async.agent_loop.tiny_tokenizer import VISION_TEMPLATE
from rl_async.configs.load import load_config
from rl_async.errors import ConfigError, RlAsyncError
from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.plan.trials import check_user_code
from rl_async.launcher.runs.rehearsal import rehearse, rehearse_here
from tests.support.tiny_models import drawing, save_vision_model

MINE = """
import sys
sys.modules["a_module_of_the_users_code"] = sys
print("hello", file=sys.stderr)
async def loop(episode): return "stop"
def tool(x: int) -> str: "Say it."
class World: ...
def score(solution_str): return 1.0
def odd(solution): return 1.0
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("broken.py").write_text("x = 1\nimport nothing_like_this\n")
    Path("leaves.py").write_text("import sys\nsys.exit(0)\n")


@pytest.mark.usefixtures("mine")
def test_code_that_fits_is_loaded_outside_this_process() -> None:
    own = ["agent.loop=mine.py:loop", "agent.tools=[mine.py:tool]", "agent.environment=mine.py:World"]
    check_user_code(load_config("calculator", [*own, "reward.functions=[{name: mine.py:score}]"]))
    assert "a_module_of_the_users_code" not in sys.modules


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("agent.environment=leaves.py:World", ["agent.environment", "SystemExit", "leaves.py:2"]),
        *(
            # Each starts a process of its own.
            pytest.param(override, named, marks=pytest.mark.slow)
            for override, named in (
                ("agent.loop=mine.py:score", ["agent.loop", "mine.py:score"]),
                ("reward.functions=[{name: mine.py:odd}]", ["reward.functions", "'solution'"]),
                ("agent.loop=mine.py:nope", ["agent.loop", "'nope'"]),
                ("agent.tools=[no/such.py:tool]", ["agent.tools", "no/such.py"]),
                ("agent.environment=broken.py:World", ["agent.environment", "nothing_like_this", "broken.py:2"]),
                ("algorithm.loss=mine.py:nope", ["algorithm.loss", "'nope'"]),
            )
        ),
    ],
)
def test_a_mistake_names_the_key(override: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_user_code(load_config("calculator", [override]))
    assert all(part in str(caught.value) for part in named) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("more", [[], pytest.param(["--dry-run"], marks=pytest.mark.slow)])
def test_a_mistake_does_not_use_up_the_name(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--config", "calculator", "--name", "mine", "agent.loop=mine.py:nope", *more]) == 2
    assert "agent.loop" in capsys.readouterr().err and not Path("runs").exists()


# What a run does first with its own code, its reward and its data is tried before it has a folder.


# Without torch where it is not needed: the processes of rewards import this, too.
REHEARSAL_MINE = """
def raises(inputs): return inputs.nothing_like_this
def one_number(inputs): return inputs.mask.float().sum()
def not_finite(inputs): return inputs.mask * float("nan")
def boom(solution_str): raise RuntimeError("boom")
def endless(solution_str): return float("inf")
def strict(solution_str): return 1.0 / len(solution_str)
def length(solution_str): return float(len(solution_str))
"""

# The model's end token closes each turn.
TEMPLATE = "{% for m in messages %}{{ m.content }}w1{% endfor %}"


@pytest.fixture
def rehearsal_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REHEARSAL_MINE)


@pytest.mark.usefixtures("rehearsal_mine")
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("override", "key", "named"),
    [
        ("algorithm.loss=mine.py:raises", "algorithm.loss", "nothing_like_this"),
        pytest.param("algorithm.loss=mine.py:one_number", "algorithm.loss", "shape", marks=pytest.mark.slow),
        pytest.param("algorithm.advantage=mine.py:raises", "algorithm.advantage", "nothing", marks=pytest.mark.slow),
        pytest.param("algorithm.advantage=mine.py:not_finite", "algorithm.advantage", "", marks=pytest.mark.slow),
        # test_broken_inputs.py has a reward function that raises, in this process.
        pytest.param(
            "reward.functions=[{name: mine.py:boom}]", "reward.functions", "RuntimeError: boom", marks=pytest.mark.slow
        ),
        pytest.param("reward.functions=[{name: mine.py:endless}]", "reward.functions", "", marks=pytest.mark.slow),
    ],
)
def test_the_users_function_that_fails_is_named_with_its_key(override: str, key: str, named: str, whole: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        rehearse(load_config("calculator", [override]), whole=whole)
    told = str(caught.value)
    assert told.startswith(f"{key}: ") and "mine.py:" in told and named in told and "\n" not in told


@pytest.mark.usefixtures("rehearsal_mine")
def test_a_reward_that_cannot_score_some_answers_is_a_warning_and_others_are_shown() -> None:
    terms = "reward.functions=[{name: mine.py:strict}, {name: mine.py:length}, {name: exact_answer}]"
    findings = rehearse(load_config("calculator", [terms]), whole=False)
    (warning,) = findings.warnings
    assert "mine.py:strict" in warning and "ZeroDivisionError" in warning and "empty answer" in warning
    assert [text.partition(":")[0] for _, text in findings.lines] == ["mine.py", "mine.py"]


@pytest.mark.usefixtures("rehearsal_mine")
def test_an_environments_reward_waits_for_an_episode() -> None:
    findings = rehearse_here(load_config("order"), whole=True)
    assert not findings.warnings and "reward" not in [label for label, _ in findings.lines]


@pytest.mark.usefixtures("rehearsal_mine")
def test_a_teacher_with_another_tokenizer_is_found_before_the_run_starts(tmp_path: Path, model_folder: Path) -> None:
    teacher = shutil.copytree(model_folder, tmp_path / "teacher")
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    tokenizer["model"]["vocab"] |= {one: vocabulary[two], two: vocabulary[one]}
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1"}]}) + "\n")
    given = [f"model.path={model_folder}", "data.path=train.jsonl", "data.make=null", "data.eval_path=null"]
    with pytest.raises(ConfigError, match=r"^algorithm\.teacher\.path: "):
        rehearse_here(load_config("calculator", [*given, f"algorithm.teacher.path={teacher}"]), whole=False)


@pytest.mark.usefixtures("rehearsal_mine")
def test_nothing_is_started_for_a_run_without_code_of_its_own() -> None:
    findings = rehearse(load_config("calculator"), whole=False)
    assert (findings.lines, findings.warnings) == ([], [])


@pytest.mark.usefixtures("rehearsal_mine")
def test_a_dry_run_shows_the_first_prompt_and_the_rows(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_template = tmp_path / "model"
    shutil.copytree(model_folder, own_template)
    (own_template / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": f"w{n}", "reward_model": {"ground_truth": "w7"}, "data_source": "x"} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [f"data.path={tmp_path / 'rows.jsonl'}", "data.make=null", "data.eval_path=null", "eval.every=0"]
    own += [f"model.path={own_template}", "warm_start=null", "agent.tools=[]"]
    assert main(["launch", "--mode", "disaggregated", "--config", "calculator", "--dry-run", *own]) == 0
    shown = capsys.readouterr().out
    labels = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert labels[:3] == ["model", "algorithm", "step"] and {"data", "prompt", "answers", "reward"} <= set(labels)
    assert "data        3 rows" in shown
    assert "answers end at w1" in shown


@pytest.mark.usefixtures("rehearsal_mine")
def test_the_tokens_of_images_in_the_first_prompt_are_counted(tmp_path: Path) -> None:
    save_vision_model("qwen2_5_vl", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(VISION_TEMPLATE)
    image = {"bytes": drawing(0, 32, 32), "path": None}
    row = {"prompt": "see <image><image>", "images": [image, image], "reward_model": {"ground_truth": "7"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    own = [f"data.path={tmp_path / 'rows.parquet'}", "data.make=null", "data.eval_path=null", "eval.every=0"]
    own += [f"model.path={tmp_path / 'model'}", "warm_start=null", "agent.tools=[]"]
    lines = dict(rehearse_here(load_config("vision", own), whole=True).lines)
    # Of 4 x 4 patches, a token for 2 x 2 of them.
    assert ", 8 of them of images:" in lines["prompt"]


@pytest.mark.usefixtures("rehearsal_mine")
def test_a_row_that_the_queue_would_refuse_is_named(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": "x", "reward_model": {"ground_truth": "1"}, "data_source": "x"})] * 2000
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, '{"prompt": 7}', ""]))
    own = [f"data.path={tmp_path / 'rows.jsonl'}", "data.make=null", "data.eval_path=null", "eval.every=0"]
    with pytest.raises(RlAsyncError, match="row 2000"):
        rehearse_here(load_config("calculator", own), whole=True)

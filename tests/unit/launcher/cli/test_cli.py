"""The command line as users meet it: exit codes and one clear line for each mistake."""

import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_async import installation
from rl_async.launcher.cli.__main__ import _parse, main

DOCS = Path(__file__).parents[4] / "docs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths of the presets lead nowhere."""
    monkeypatch.chdir(tmp_path)


def only_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must end with 2 and one line of error."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_misspelt_run_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").touch()
    for command in ("show", "doctor", "audit"):
        assert "did you mean runs/mine?" in only_error(capsys, command, "runs/mien")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["launch", "--config", "calculator", "queue.max_stalness=2"], "queue.max_staleness"),
        (["launch", "--config", "calculater"], "calculator"),
        (["launch", "--config", "nowhere/x.yaml"], "nowhere/x.yaml"),
        (["launch", "--config", "calculator", "trainer.steps=many"], "trainer.steps"),
        (["launch", "--config", "calculator", "rollout.top_p=0.5"], "rollout.top_p"),
        (["launch", "--config", "calculator", "data.make=null"], "data.path"),
        (["launch", "--config", "calculator", "--resume"], "--resume"),
        (["launch", "--config", "calculator", "agent.loop=tool_agnt"], "agent.loop"),
        (["launch", "--config", "calculator", "--dry-run", "agent.tools=[calculater]"], "agent.tools"),
        (["eval", "--config", "calculator", "reward.functions=[{name: exact}]"], "reward.functions"),
        (["launch", "--config", "sort", "rollout.engine=vllm"], "rollout.engine=vllm"),
        (["launch", "--config", "sort", "rollout.engine=vllm", "rollout.python=nix"], "rollout.python: nix"),
        (["engine", "verify", "http://127.0.0.1:9", "--model", "nowhere"], "--model: nowhere"),
        (["config", "show", "nothing"], "'nothing'"),
        (["config", "explain", "queue.max_stale"], "queue.max_staleness"),
        (["config", "from-verl", "missing.sh"], "missing.sh"),
        (["data", "make", "nothing"], "'nothing'"),
        (["data", "inspect", "missing.parquet"], "missing.parquet"),
        (["data", "inspect", "missing.parquet", "data.shuffle=false"], "data.shuffle=false changes a config"),
        (["audit", "missing"], "no run folder missing"),
        (["gateway", "missing"], "missing/endpoints.json"),
        (["reward-model", "--pairs", "x.jsonl", "--model", "m", "--out", "rm"], "x.jsonl"),
        (["eval", "--config", "calculator", "data.eval_path=null"], "data.eval_path"),
        (["eval", "--config", "calculator", "model.path=typo"], "folder typo"),
        (["doctor", ".", "--config", "calculator"], "--config"),
        (["doctor", "--json"], "--json"),
    ],
)
def test_a_mistake_is_one_line_that_names_it_and_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in only_error(capsys, *arguments)


def test_a_missing_checkpoint_is_answered_with_those_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, torn = (tmp_path / "runs" / "mine" / "checkpoints" / f"step-{step:06d}" for step in (10, 20))
    whole.mkdir(parents=True)
    (whole / "state.json").touch()
    torn.mkdir()
    wanted = "model.path=runs/mine/checkpoints/step-000099/model"
    error = only_error(capsys, "eval", "--config", "calculator", wanted)
    assert "step-000099" in error and "step-000010" in error and "step-000020" not in error
    assert "no checkpoint" in only_error(capsys, "eval", "--config", "calculator", wanted.replace("mine", "my"))
    (tmp_path / "models" / "checkpoints" / "llama").mkdir(parents=True)
    error = only_error(capsys, "eval", "--config", "calculator", "model.path=models/checkpoints/lama")
    assert "lama" in error and "no checkpoint" not in error


def test_an_error_spells_out_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in only_error(capsys, "config", "show", "\x1b[2Jpreset")
    assert "\x1b" not in only_error(capsys, "audit", "\x1b[2Jrun")


def test_no_run_folder_is_left_by_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only_error(capsys, "launch", "--config", "calculator", "data.make=null")
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        error = only_error(capsys, "launch", "--config", "calculator", "queue.curve=always", f"queue.port={port}")
    assert "queue.port" in error
    assert str(port) in error
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    error = only_error(capsys, "launch", "--config", "calculator", "model.path=model")
    assert "model.path" in error and "tokenizer" in error


def test_the_existing_name_of_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "notes.txt").touch()
    assert "--name" in only_error(capsys, "launch", "--config", "calculator", "--name", "mine")


def test_folders_that_cannot_be_written_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    said = only_error(capsys, "launch", "--config", "calculator", "--name", "mine", "launcher.run_dir=file")
    assert "launcher.run_dir" in said


def test_a_config_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe")
    assert "--config" in only_error(capsys, "launch", "--config", "./c.yaml")


@pytest.mark.parametrize(
    "arguments",
    [[], ["nothing"], ["launch"], ["launch", "--config", "sort", "--mode", "x"], ["launch", "--config", "sort", "--x"]],
)
def test_usage_errors_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: rl-async" in capsys.readouterr().err


def test_a_dry_run_shows_the_plan_and_creates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["launch", "--mode", "colocated", "--config", "calculator", "rollout.engines=2", "--dry-run"])
    shown = capsys.readouterr().out
    assert code == 0
    for text in ("colocated", "ipc", "queue", "engine-1", "worker-0", "trainer-0", "GiB", "calculator-colocated-001"):
        assert text in shown
    assert "made first: calculator data" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_of_a_model_that_is_to_be_fine_tuned_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--mode", "disaggregated", "--config", "smollm2-tools", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for text in ("market data for", "a warm-started model in artifacts/smollm2-tools/model"):
        assert f"made first: {text}" in shown


def test_a_new_run_that_nothing_can_teach_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "reward.functions" in only_error(capsys, "launch", "--config", "calculator", "reward.functions=[]")


@pytest.mark.parametrize(("longest", "lines"), [(127, 0), (128, 1), pytest.param(1024, 0, marks=pytest.mark.slow)])
def test_prompts_that_leave_no_room_to_answer_are_warned_of(
    longest: int, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"data.max_prompt_tokens={longest}", "agent.max_tokens=128"]
    assert main(["launch", "--config", "calculator", "--dry-run", *given]) == 0
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if given[0] in line and given[1] in line]) == lines


@pytest.mark.parametrize(("temperature", "lines"), [("0", 1), ("1.0", 0)])
def test_several_greedy_samples_of_an_evaluation_are_warned_of(
    temperature: str, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["eval.samples=4", f"eval.temperature={temperature}", f"model.path={tmp_path / 'none'}", "eval.tasks=1"]
    assert main(["eval", "--config", "calculator", *given]) == 2, "there is no such model"
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if "eval.temperature" in line and "eval.samples=4" in line]) == lines


def test_overrides_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "agent.workers=2", "--config", "calculator", "rollout.engines=2", "--dry-run", "trainer.ranks=2"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "worker-1" in shown
    assert "engine-1" in shown
    assert "trainer-1" in shown


def test_presets_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} >= {"calculator", "calculator-sync", "calculator-async", "shop", "sort"}
    assert all(len(line.split()) > 3 for line in lines)


def test_a_key_is_explained_and_a_config_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "queue.max_staleness"]) == 0
    assert "staleness" in capsys.readouterr().out
    assert main(["config", "show", "calculator", "trainer.steps=17"]) == 0
    shown = capsys.readouterr().out
    assert "steps: 17" in shown and "dtype: float32" in shown, "roles that are started by hand need a settled type"


def test_a_config_that_is_refused_is_shown_with_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "calculator", "rollout.group_size=1", "queue.sampling=freshest"]) == 2
    printed = capsys.readouterr()
    assert "sampling: freshest" in printed.out and "group_size" in printed.err and "queue.sampling" in printed.err


def test_a_data_set_is_inspected_and_a_bad_row_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = [{"role": "user", "content": "1+1\x1b[2J"}]
    row = {"data_source": "toy", "prompt": prompt, "reward_model": {"ground_truth": "2"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "good.parquet")
    assert main(["data", "inspect", "good.parquet"]) == 0
    shown = capsys.readouterr().out
    assert "toy" in shown and "\x1b" not in shown and "\\x1b[2J" in shown
    bad = row | {"reward_model": {"style": "rule"}}
    pq.write_table(pa.Table.from_pylist([bad]), tmp_path / "bad.parquet")
    assert main(["data", "inspect", "bad.parquet"]) == 2
    assert "row 0" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["-n", "2", "RUN"], ["RUN", "-n", "2"]])
def test_a_programs_own_arguments_stay_as_they_are(options: list[str]) -> None:
    arguments = _parse(["play", *options, "--", "agent", "-n", "3", "--", "{prompt}"])
    assert arguments.program == ["agent", "-n", "3", "--", "{prompt}"] and arguments.n == 2


def test_other_commands_take_arguments_behind_dashes_too() -> None:
    assert _parse(["doctor", "--", "run"]).run == Path("run")
    assert _parse(["audit", "--", "run"]).run == Path("run")


def test_the_version_is_printed_without_importing_torch() -> None:
    code = (
        "import sys; from rl_async.launcher.cli.__main__ import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    first, *lines, last = done.stdout.splitlines()
    assert first.split()[:2] == ["rl-async", installation.version()]
    assert f"torch {metadata.version('torch')}" in lines and last == "0 False"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["lanch"], "launch"),
        (["config", "shw", "calculator"], "show"),
        (["launch", "--config", "calculator", "--dryrun"], "--dry-run"),
        (["launch", "--config", "calculator", "--mode", "disagregated"], "disaggregated"),
        (["view", "runs", "--prot=80"], "--port"),
        # A required option is missing because it is misspelt.
        (["launch", "--confg", "calculator"], "--config?"),
    ],
)
def test_the_nearest_command_or_option_is_named(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert meant in capsys.readouterr().err.splitlines()[-1]


def test_the_nearest_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").touch()
    assert "mine.yaml" in only_error(capsys, "config", "show", "mien.yaml")


def test_the_nearest_data_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.csv").touch()
    assert f"did you mean {tmp_path / 'mine.csv'}?" in only_error(capsys, "data", "inspect", str(tmp_path / "min.csv"))


def test_the_commands_are_listed_where_none_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2 and "Train a model" in capsys.readouterr().err


def test_pages_named_in_messages_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "docs/how-to/memory.md"]) == 0
    page = capsys.readouterr().out
    assert page == (DOCS / "how-to/memory.md").read_text()
    assert main(["docs", "memory"]) == 0
    assert capsys.readouterr().out == page
    assert main(["docs"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len([*DOCS.rglob("*.md")])


@pytest.mark.parametrize(
    ("page", "named"), [("memry", "how-to/memory"), ("clusters", "tutorials/clusters"), ("../README", "known|mean")]
)
def test_an_unknown_page_gets_the_nearest(page: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", page]) == 2
    assert re.search(named, capsys.readouterr().err)


def test_a_path_may_have_any_character(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--model", "/no/😀", "--data", "/no/😀.jsonl", "--out", "o"]) != 0
    assert "/no/😀" in capsys.readouterr().err

"""The Slurm and Kubernetes examples, held to what can be had without a cluster: they parse, and each role's argument
parser takes the command line that they give it. (tests/e2e/clusters/test_slurm_script.py runs the former.)"""

import argparse
import importlib
import io
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from rl_async.configs.load import dump, load_config
from rl_async.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USER
from rl_async.launcher.cli.__main__ import _parse, main
from rl_async.messages import Turn

EXAMPLES = Path(__file__).parents[3] / "examples"
VARIABLES = {"$(INDEX)": "0", "$(POD_IP)": "10.0.0.7"}
ROLES = {"rl_async.transfer_queue", "rl_async.rollout_server", "rl_async.agent_loop", "rl_async.trainer"}


class Parsed(Exception):
    """Ends a role at the end of its argument parser."""


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes" / "rl_async.yaml").read_text()))


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for document in documents():
        if "template" in document["spec"]:
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def commands() -> list[tuple[str, ...]]:
    """Module and arguments of every role of the manifest, with Kubernetes' variables filled in."""
    found = []
    for _, pod in pods():
        for container in pod["containers"]:
            words = [*container["command"], *container["args"]]
            if words[:2] == ["python", "-m"]:
                found.append(tuple(VARIABLES.get(word, word) for word in words[2:]))
    return found


def test_the_manifest_has_every_role() -> None:
    assert {command[0] for command in commands()} == ROLES
    assert all(isinstance(word, str) for command in commands() for word in command)


@pytest.mark.parametrize("command", commands(), ids=lambda command: command[0])
def test_each_role_takes_its_arguments(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *given: Any) -> None:
        parse(self, *given)
        with pytest.raises(SystemExit):  # what it does not know is refused
            parse(self, [*sys.argv[1:], "--nonsense"])
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", list(command))
    with pytest.raises(Parsed):
        importlib.import_module(f"{command[0]}.__main__").main()


def test_what_a_pod_names_is_there() -> None:
    names = {(document["kind"], document["metadata"]["name"]) for document in documents()}
    assert len(names) == len(documents())
    assert ("Service", "rl-queue") in names
    for name, pod in pods():
        (volume,) = pod["volumes"]
        assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            own = [{"name": "journal", "mountPath": "/journal"}] if container["name"] == "queue" else []
            assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/work"}, *own], name
            used = {v for word in container.get("args", ()) for v in VARIABLES if v in word}
            assert used <= {f"$({variable['name']})" for variable in container.get("env", ())}, name


def test_the_queues_journal_is_on_no_shared_file_system() -> None:
    (queue,) = [d for d in documents() if d["kind"] == "StatefulSet" and d["metadata"]["name"] == "rl-queue"]
    (claim,) = queue["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "journal" and claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    (script,) = [pod["containers"][0]["args"][0] for name, pod in pods() if name == "rl-prepare"]
    assert "queue.sqlite.folder=/journal" in script
    assert "queue.sqlite.folder=$local" in (EXAMPLES / "slurm" / "rl_async.sbatch").read_text()


def test_a_job_that_was_asked_to_stop_is_neither_done_nor_failed() -> None:
    (job,) = [document["spec"] for document in documents() if document["metadata"]["name"] == "rl-trainer"]
    rules = {rule["action"]: rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert rules["FailJob"]["onExitCodes"]["values"] == [EXIT_USER, EXIT_FAILED]
    assert rules["Ignore"]["onExitCodes"]["values"] == sorted(EXIT_STOPPED)
    assert (
        f"0 | {EXIT_USER} | {EXIT_FAILED} | {' | '.join(map(str, sorted(EXIT_STOPPED)))})"
        in (EXAMPLES / "slurm" / "rl_async.sbatch").read_text()
    )


def test_services_select_pods_that_there_are() -> None:
    labels = [d["spec"]["template"]["metadata"]["labels"] for d in documents() if d["kind"] == "StatefulSet"]
    services = [document for document in documents() if document["kind"] == "Service"]
    assert services
    for service in services:
        assert any(service["spec"]["selector"].items() <= of.items() for of in labels)


def test_the_network_policy_covers_every_pod_and_admits_these_alone() -> None:
    (policy,) = [document["spec"] for document in documents() if document["kind"] == "NetworkPolicy"]
    selector = policy["podSelector"]
    assert policy["policyTypes"] == ["Ingress"] and policy["ingress"] == [{"from": [{"podSelector": selector}]}]
    templates = [d["spec"]["template"] for d in documents() if "template" in d["spec"]]
    assert len(templates) == 5
    for template in templates:
        assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_overrides_of_the_examples_are_keys() -> None:
    prepare = next(pod for name, pod in pods() if name == "rl-prepare")
    (line,) = [line for line in prepare["containers"][0]["args"][0].splitlines() if line.startswith("set=(")]
    config = load_config("calculator", line.removeprefix("set=(").removesuffix(")").split(), mode="disaggregated")
    engines = next(document for document in documents() if document["metadata"]["name"] == "rl-engine")
    assert config.rollout.engines == engines["spec"]["replicas"]


def test_the_slurm_script_is_one() -> None:
    script = EXAMPLES / "slurm" / "rl_async.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n") and all(f"{role} --run" in text for role in ROLES)


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


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong"),
    [
        ("gsm8k", GSM8K, ["24 + 48\n#### 72", "#### 72.0", r"\boxed{72}"], ["#### 24\nwas May", "72", ""]),
        ("dapo_math", DAPO, ["so\nAnswer: 34", "Answer: $34$", r"Answer: \boxed{34}"], ["34", "Answer: 35", ""]),
    ],
)
def test_a_recipe_scores_answers_to_published_rows(
    name: str, row: object, right: list[str], wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = yaml.safe_load((RECIPES / name / "config.yaml").read_text())
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


ROOT = Path(__file__).parents[3]
IMAGE = ROOT / "examples" / "clouds" / "Containerfile"
TASKS = sorted((ROOT / "examples").rglob("Dockerfile"))
COPYING = [(IMAGE, ROOT), *((task, task.parent) for task in TASKS if "\nCOPY" in task.read_text())]
INSTALL = "install the linter and the parser of container files: pip install 'rl-async[test]'"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def read(file: Path) -> Any:
    parser = pytest.importorskip("dockerfile_parse", reason=INSTALL)
    return parser.DockerfileParser(fileobj=io.BytesIO(file.read_bytes()))


def instructions(file: Path, name: str) -> Iterator[str]:
    return (part["value"] for part in read(file).structure if part["instruction"] == name)


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lint(file: Path) -> "subprocess.CompletedProcess[str]":
    if HADOLINT is None:
        pytest.skip(INSTALL)
    return subprocess.run([HADOLINT, "--no-color", str(file)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("file", [IMAGE, *TASKS], ids=lambda file: file.relative_to(ROOT).as_posix())
def test_the_linter_has_no_complaint(file: Path) -> None:
    done = lint(file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "wrong", ["FROM python", "COPY . .", "FROM python:3.12\nRUN cd /tmp", "FROM python:3.12\nRUNS ls"]
)
def test_the_linter_would_complain(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "Containerfile").write_text(wrong + "\n")
    assert lint(tmp_path / "Containerfile").returncode != 0


@pytest.mark.parametrize(("file", "context"), COPYING)
def test_what_is_copied_is_there(file: Path, context: Path) -> None:
    sources = [source for copied in instructions(file, "COPY") for source in shlex.split(copied)[:-1]]
    assert sources and all((context / source).exists() for source in sources), sources


def test_what_is_installed_is_there() -> None:
    words = [word for command in instructions(IMAGE, "RUN") for word in shlex.split(command)]
    (constraints,) = [words[at + 1] for at, word in enumerate(words) if word == "--constraint"]
    (extras,) = [found[1].split(",") for word in words if (found := re.fullmatch(r"\.\[(.+)\]", word))]
    assert (ROOT / constraints).is_file()
    assert "ray" in extras and set(extras) <= project()["optional-dependencies"].keys()


def test_it_starts_the_command_with_a_python_that_the_project_takes() -> None:
    (entry,) = [json.loads(command) for command in instructions(IMAGE, "ENTRYPOINT")]
    assert entry == ["rl-async"] and entry[0] in project()["scripts"]
    assert read(IMAGE).baseimage.rpartition(":")[2] in SpecifierSet(project()["requires-python"])


def test_the_commands_that_its_comments_give_are_right() -> None:
    build, run = [shlex.split(said) for said in instructions(IMAGE, "COMMENT") if "podman" in said]
    assert ROOT / build[build.index("--file") + 1] == IMAGE
    image = build[build.index("--tag") + 1]
    assert _parse(run[run.index(image) + 1 :]).config == "calculator"


SHOP = "examples/mcp_shop.yaml"
SMALL = ("trainer.steps=2", "model.path=models/small")  # the preset's own model may not be installed
OPTIONS = ("seed=1", *SMALL)


@pytest.fixture
def seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, with a program `rl-async` that only notes its arguments."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("seeds")
    program = tmp_path / "rl-async"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/said"\n')
    program.chmod(0o700)
    monkeypatch.setattr(module, "RL_ASYNC", str(program))
    return module


def said(tmp_path: Path) -> list[str]:
    """The first word of each command, of those since the last call."""
    lines = (tmp_path / "said").read_text().splitlines()
    (tmp_path / "said").unlink()
    return [line.split()[0] for line in lines]


def make_run(
    folder: Path,
    *,
    checkpoint: int,
    steps: list[int],
    config: str = "smollm2",
    mode: str = "disaggregated",
    options: Sequence[str] = OPTIONS,
) -> None:
    """Make the folder of a run with these records, whose config wants two steps."""
    (folder / f"checkpoints/step-{checkpoint:06d}").mkdir(parents=True)
    (folder / f"checkpoints/step-{checkpoint:06d}/state.json").touch()
    resolved = load_config(config, [*options, f"launcher.run_dir={folder.parent}"], mode=mode)
    (folder / "config.yaml").write_text(dump(resolved))
    (folder / "ledger.jsonl").write_text('{"event":"finish"}\n')
    lines = [{"step": step, "time": 60.0 * n, "time/step_s": 60.0, "reward/mean": n} for n, step in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "evaluations.jsonl").write_text("")


def train(
    seeds: Any, tmp_path: Path, *, checkpoint: int, steps: list[int], mode: str = "disaggregated", more: str = ""
) -> Any:
    """Have the example train a run whose folder is there."""
    make_run(tmp_path / "mine", checkpoint=checkpoint, steps=steps)
    return seeds.train("smollm2", mode, "mine", tmp_path, [*OPTIONS, *more.split()])


@pytest.mark.parametrize(
    ("mode", "more", "named"),
    [
        ("disaggregated", "rollout.temperature=0.7", "rollout.temperature"),
        ("colocated", "queue.max_staleness=0", "mode"),
    ],
)
def test_a_run_of_another_config_is_not_taken_for_this_one(
    seeds: Any, tmp_path: Path, mode: str, more: str, named: str
) -> None:
    with pytest.raises(SystemExit, match=named):
        train(seeds, tmp_path, checkpoint=2, steps=[0, 1], mode=mode, more=more)
    assert not (tmp_path / "said").exists()


def test_an_interrupted_run_is_continued_and_audited(seeds: Any, tmp_path: Path) -> None:
    found = train(seeds, tmp_path, checkpoint=1, steps=[0, 1, 1])
    assert said(tmp_path) == ["launch", "audit"]
    assert found.rewards == [0, 2]  # step 1 was trained again


def test_a_run_that_has_ended_is_audited_alone(seeds: Any, tmp_path: Path) -> None:
    assert len(train(seeds, tmp_path, checkpoint=2, steps=[0, 1]).rewards) == 2
    assert said(tmp_path) == ["audit"]


def test_a_run_without_all_its_steps_is_not_tabulated(seeds: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="1 of 2 steps"):
        train(seeds, tmp_path, checkpoint=2, steps=[0])


def test_each_config_and_seed_is_a_row(
    seeds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (3, 4):
        options = [f"seed={seed}", "trainer.steps=2"]
        make_run(tmp_path / f"seeds-mcp_shop-{seed}", checkpoint=2, steps=[0, 1], config=SHOP, options=options)
    words = [SHOP, "--seeds", "3", "4", "--runs", str(tmp_path), "trainer.steps=2"]
    monkeypatch.setattr(sys, "argv", ["seeds.py", *words])
    seeds.main()
    assert said(tmp_path) == ["audit", "audit"]
    rows = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["| mcp_shop", "3"], ["| mcp_shop", "4"]]


def test_the_real_seeds_are_trained_by_it(seeds: Any, tmp_path: Path) -> None:
    options = ["queue.max_staleness=0", *OPTIONS]
    folder = tmp_path / "real-sums-colocated-seed1"
    make_run(folder, checkpoint=2, steps=[0, 1], mode="colocated", options=options)
    arguments = argparse.Namespace(runs=tmp_path, vllm=None, override=list(SMALL))
    found = importlib.import_module("real_seeds").run("sums", "colocated", 1, arguments)
    assert said(tmp_path) == ["audit"]
    assert found.records.rewards == [0, 1]


def tabulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The last line that examples/algorithms.py prints about one estimator with two seeds."""
    words = ["--tasks", "sums", "--advantages", "remax", "--losses", "--seeds", "1", "2", "--steps", "1"]
    small = ["data.train_batch_groups=2", "rollout.group_size=2"]
    monkeypatch.setattr(sys, "argv", ["algorithms.py", *words, "--runs", str(tmp_path), *more, *small])
    algorithms = importlib.import_module("algorithms")
    monkeypatch.setitem(algorithms.TASKS, "sums", algorithms.TASKS["sums"]._replace(demonstrations=1))
    algorithms.main()
    return capsys.readouterr().out.splitlines()[-1]


def test_algorithms_are_trained_unless_they_were_and_tabulated_as_far_as_they_have_ended(
    seeds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sums-advantage-remax-1.json"
    file.write_text('{"before": 0.25, "after": 0.5, "rewards": []}')
    found = tabulated(tmp_path, monkeypatch, capsys, "--ended")
    assert found == "| advantage | remax | 0.25 | 0.50 (0.50 to 0.50) | 1 |"
    assert "2 |" in tabulated(tmp_path, monkeypatch, capsys)
    record = json.loads((tmp_path / "sums-advantage-remax-2.json").read_text())
    assert len(record["rewards"]) == 1 and 0 <= record["after"] <= 1
    assert '"rewards": []' in file.read_text()


def test_a_cell_has_the_mean_and_the_range_of_its_seeds(seeds: Any) -> None:
    cells = importlib.import_module("algorithms").cells
    ended = [{"before": 0.25, "after": after} for after in (0.5, 0.75)]
    assert cells([*ended, {"before": 0.25, "diverged": "NaN"}]) == ["0.25", "0.62 (0.50 to 0.75)", "2, 1 diverged"]
    assert cells([]) == ["", "not run", "0"]


def test_tasks_hold_out_whole_prompts_and_a_perfect_answer_is_rewarded(seeds: Any) -> None:
    algorithms = importlib.import_module("algorithms")
    for task in algorithms.TASKS.values():
        trained, held_out = task.split()
        assert not {tuple(each.prompt) for each in trained} & {tuple(each.prompt) for each in held_out}
        perfect = SimpleNamespace(random=lambda: 1.0)
        for problem in held_out:
            episode = algorithms.Episode(problem, list(problem.prompt), [algorithms.asked(problem)])
            for token in task.demonstration(problem, perfect)[len(problem.prompt) :]:
                if token < algorithms.NUMBERS:
                    episode.tokens.append(token)
                if token < algorithms.NUMBERS and (len(episode.tokens) - len(problem.prompt)) % task.length == 0:
                    task.answer(episode)
            assert episode.reward == 1 and episode.ended, problem
            assert [turn.role for turn in episode.turns[1::2]] == ["assistant"] * (len(episode.turns) // 2)


# Every recipe of examples/recipes: its data can be made, and a dry run takes its config.


RECIPE_FOLDERS = ROOT / "examples" / "recipes"
# The script that makes a recipe's data, and the package that it imports.
SCRIPTS = {"search": ("search.py", "bm25s"), "retool": ("tasks.py", ""), "self_play": ("nim.py", "textarena")}
# Their dry runs do what another recipe's does, or take longest.
SLOW = {"dapo_math", "reasoning_gym", "retool", "search", "self_play"}
NAMES = sorted(file.parent.name for file in RECIPE_FOLDERS.glob("*/config.yaml"))


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
    folders = {path.name for path in RECIPE_FOLDERS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(NAMES) == folders
    for name in NAMES:
        assert re.search(rf"examples([./])recipes\1{name}\1", (RECIPE_FOLDERS / name / "README.md").read_text()), name
        assert f"({name}/README.md)" in (RECIPE_FOLDERS / "README.md").read_text()


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
        runpy.run_path(str(RECIPE_FOLDERS / name / script), run_name="__main__")
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
    tally = runpy.run_path(str(RECIPE_FOLDERS / "self_play" / "nim.py"))["tally"]
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
    dpo = load_config(str(RECIPE_FOLDERS / "dpo" / "config.yaml"))
    assert dpo.finetune.out not in ("", dpo.model.path)
    tiny, whole = (load_config(str(RECIPE_FOLDERS / "reasoning_gym" / f"{name}.yaml")) for name in ("tiny", "config"))
    assert tiny.agent.environment_options == whole.agent.environment_options

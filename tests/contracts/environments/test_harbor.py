"""Harbor's tasks: those of examples/harbor and broken ones, in a real sandbox."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rl_async.agent_loop.environments.environment_registry import get_environment
from rl_async.agent_loop.environments.harbor import read_task, write_rows
from rl_async.agent_loop.environments.session import Session
from rl_async.errors import ConfigError, DataError, EnvironmentFailed
from rl_async.reward_loop.api import Score
from rl_async.sandbox.bubblewrap import INSTALL
from tests.unit.agent_loop.fakes import session

TASKS = Path(__file__).parents[3] / "examples/harbor"
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"bwrap is not here; {INSTALL} installs it")


@asynccontextmanager
async def playing(name: str, folder: Path = TASKS) -> AsyncIterator[Session]:
    async with session(f"harbor:{folder}", extra={"task": name}) as world:
        assert await world.reset() == []
        yield world


async def said(world: Session, code: str, tool: str = "bash") -> str:
    (found,) = (found for found in world.tools() if found.name == tool)
    argument = {"bash": "command", "python": "code"}[tool]
    return (await found.call({argument: code}, timeout_s=60.0)).text


async def judged(world: Session) -> Score:
    score = await world.reward()
    assert score is not None
    return score


@needs_bwrap
@pytest.mark.parametrize("name", ["greeting", "average"])
async def test_a_solution_is_worth_one_and_nothing_zero(name: str) -> None:
    async with playing(name) as world:
        assert await said(world, (TASKS / name / "solution/solve.sh").read_text()) == ""
        assert (await judged(world)).value == 1.0
    async with playing(name) as world:
        idle = await judged(world)
        assert (idle.value, idle.extra["verified"]) == (0.0, 1.0)


@needs_bwrap
async def test_rewards_by_name_are_recorded() -> None:
    async with playing("average") as world:
        await said(world, "sed -i 's|//|/|' average.py")
        score = await judged(world)
    assert score.value == 0.5
    assert score.extra == {"reward": 0.5, "fraction": 1.0, "empty": 0.0, "verified": 1.0}


@needs_bwrap
async def test_programs_start_in_the_tasks_folder_with_its_files_and_variables() -> None:
    async with playing("average") as world:
        assert await said(world, "pwd; find . -type f | sort; echo $NUMBERS") == (
            "/app\n./average.py\n./data/numbers.txt\ndata/numbers.txt\n"
        )
        assert await said(world, "from __future__ import annotations\nprint(open('/app/average.py').read(9))", "python")
        assert await said(world, "echo kept > it") == "" and await said(world, "cat /app/it") == "kept\n"


@needs_bwrap
async def test_the_tests_are_nowhere_before_the_end() -> None:
    async with playing("average") as world:
        assert "No such file" in await said(world, "ls /tests/")
        assert "judge.py" not in await said(world, "find / -name judge.py 2>/dev/null")


@pytest.mark.thinned("sabotage", 3)
@needs_bwrap
@pytest.mark.parametrize(
    "sabotage",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json",
        "mkdir /workspace/tests && echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "ln -s /app /workspace/tests; ln -s /app /workspace/logs/verifier; echo 1 > reward.txt; echo 1 > reward.json",
        "rm -r /workspace/logs; touch /workspace/logs",
        "mkdir -p /workspace/tests/a/b && chmod 0 /workspace/tests/a",
        "head -c 1G /dev/zero > /workspace/full",
        "echo 'print(1)' > /app/sitecustomize.py; (while :; do echo 1 > /logs/verifier/reward.txt; done) &",
        "rm -rf /workspace/app",
    ],
)
async def test_what_the_model_left_earns_nothing(sabotage: str) -> None:
    for name in ("greeting", "average"):
        async with playing(name) as world:
            await said(world, sabotage)
            assert (await judged(world)).value == 0.0


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with the task `average`, to be changed."""
    shutil.copytree(TASKS / "average", tmp_path / "tasks/average")
    return tmp_path / "tasks"


@needs_bwrap
@pytest.mark.parametrize(
    ("test", "reward"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25),
        ("echo 1 > /logs/verifier/reward.txt; echo '{\"only\": 0.5}' > /logs/verifier/reward.json", 0.5),
        ("echo true > /logs/verifier/reward.json", 1.0),
        ('test "$KEY" = "a b" && echo 1 > /logs/verifier/reward.txt', 1.0),
    ],
)
async def test_rewards_are_read_as_harbor_reads_them(copied: Path, test: str, reward: float) -> None:
    (copied / "average/tests/test.sh").write_text(test)
    toml = copied / "average/task.toml"
    toml.write_text(toml.read_text().replace("[verifier]", '[verifier]\nenv = {KEY = "a b"}'))
    async with playing("average", copied) as world:
        assert await judged(world) == Score(reward, (await judged(world)).extra)


@needs_bwrap
@pytest.mark.parametrize(
    "test",
    [
        "exit 0",
        "sleep 5; echo 1 > /logs/verifier/reward.txt",
        "echo soon > /logs/verifier/reward.txt",
        "echo nan > /logs/verifier/reward.txt",
        "echo 1e309 > /logs/verifier/reward.json",
        'echo \'{"reward": "1"}\' > /logs/verifier/reward.json',
        "echo 1 > /logs/verifier/reward.txt; : > /logs/verifier/reward.json",
    ],
)
async def test_no_usable_reward_is_worth_nothing(copied: Path, test: str, caplog: pytest.LogCaptureFixture) -> None:
    (copied / "average/tests/test.sh").write_text(test)
    toml = copied / "average/task.toml"
    toml.write_text(toml.read_text().replace("timeout_sec = 20.0", "timeout_sec = 1.0"))
    async with playing("average", copied) as world:
        score = await judged(world)
    assert (score.value, score.extra) == (0.0, {"verified": 0.0})
    assert str(copied / "average") in caplog.text


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("task.toml", "[environment]\ngpus = 1\n", r"task\.toml: .*gpus"),
        ("task.toml", "[environment]\ndocker_image = 'x'\n", r"task\.toml: .*docker_image"),
        ("task.toml", "[[steps]]\nname = 'one'\n", r"task\.toml: .*steps"),
        ("task.toml", "[verifier]\nenv = {KEY = '${KEY}'}\n", r"task\.toml: verifier\.env\.KEY"),
        ("task.toml", "not toml", r"task\.toml: "),
        ("instruction.md", "<!-- canary GUID 1 -->\n\n", r"instruction\.md"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /app\n\nRUN apt-get install \\\n  gcc\n", r"Dockerfile:4: RUN"),
        ("environment/Dockerfile", "FROM a\nFROM b\n", r"Dockerfile:2: "),
        ("environment/Dockerfile", "FROM a\n", r"Dockerfile: .*WORKDIR"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /srv\n", r"Dockerfile:2: /srv"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /app\nCOPY data ../etc\n", r"Dockerfile:3: /etc"),
        (
            "environment/Dockerfile",
            "FROM a\nWORKDIR /app\nCOPY ../tests .\n",
            r"Dockerfile:3: COPY: .*/tests",
        ),
        ("environment/Dockerfile", "FROM a\nWORKDIR /app\nCOPY *.py .\n", r"Dockerfile:3: COPY"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /app\nCOPY --from=a x .\n", r"Dockerfile:3: COPY"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /app\nENV PATH=/x:$PATH\n", r"Dockerfile:3: variables"),
        ("environment/docker-compose.yaml", "", r"docker-compose\.yaml"),
        ("environment/.dockerignore", "", r"\.dockerignore"),
    ],
)
def test_what_cannot_be_played_is_refused_by_file(copied: Path, file: str, text: str, named: str) -> None:
    read_task(copied / "average")
    (copied / "average" / file).write_text(text)
    with pytest.raises(DataError, match=named):
        read_task(copied / "average")


@pytest.mark.parametrize("file", ["instruction.md", "environment/Dockerfile", "tests/test.sh"])
def test_missing_files_are_named(copied: Path, file: str) -> None:
    (copied / "average" / file).unlink()
    with pytest.raises(DataError, match=file):
        read_task(copied / "average")


@pytest.mark.parametrize("link", ["environment/data/other", "tests", "instruction.md"])
def test_links_are_not_followed(copied: Path, link: str) -> None:
    path = copied / "average" / link
    if path.exists():
        path.rename(copied / "elsewhere")
    path.symlink_to(copied / "elsewhere")
    with pytest.raises(DataError, match=link):
        read_task(copied / "average")


@needs_bwrap
async def test_several_rewards_need_one_of_that_name(copied: Path) -> None:
    (copied / "average/tests/test.sh").write_text('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json')
    async with playing("average", copied) as world:
        with pytest.raises(EnvironmentFailed, match="reward"):
            await world.reward()


def test_copied_folders_keep_their_files_and_modes(copied: Path) -> None:
    context = copied / "average/environment"
    (context / "average.py").chmod(0o755)
    (context / "Dockerfile").write_text("FROM a\nWORKDIR /app/src\nENV OLD two words\nENV A=1 \\\n B='b c'\nCOPY . .\n")
    task = read_task(copied / "average")
    placed = {file.path: file.executable for file in task.files}
    assert placed == {"app/src/average.py": True, "app/src/data/numbers.txt": False}
    assert (task.workdir, task.env) == ("/app/src", {"OLD": "two words", "A": "1", "B": "b c"})


def test_rows_of_a_folder_leave_out_what_cannot_be_played(copied: Path, tmp_path: Path) -> None:
    shutil.copytree(TASKS / "greeting", copied / "greeting")
    (copied / "average/environment/Dockerfile").write_text("FROM a\nWORKDIR /app\nRUN make\n")
    written, refused = write_rows(copied, tmp_path / "out/rows.jsonl")
    (row,) = map(json.loads, (tmp_path / "out/rows.jsonl").read_text().splitlines())
    assert (written, row["extra_info"]["task"]) == (1, "greeting")
    assert row["prompt"] == [{"role": "user", "content": (TASKS / "greeting/instruction.md").read_text()}]
    assert "Dockerfile:3: RUN" in str(refused[0])


@needs_bwrap
@pytest.mark.parametrize("name", [None, "", "..", "average/tests", "/etc"])
def test_a_row_names_a_task_of_the_folder(name: str | None) -> None:
    with pytest.raises(DataError, match=r"extra_info\.task"):
        session(f"harbor:{TASKS}", extra={"task": name})


def test_a_folder_without_tasks_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.environment=harbor:"):
        get_environment(f"harbor:{tmp_path}")

"""An environment of verifiers 0.4, which plays through a gateway in a Python of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.configs.load import dump, load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_SIGNAL, ConfigError
from rl_async.launcher.plan.trials import try_environment
from rl_async.process.http_auth import make_tokens
from tests.contracts.gateway.peers import RunningGateway
from tests.unit.agent_loop.fakes import leased

ROOT = Path(__file__).parents[3]
VARIABLE = "RL_ASYNC_VERIFIERS_PYTHON"
PYTHON = Path(os.environ.get(VARIABLE, ROOT / ".venv-verifiers/bin/python"))
MODULES = ROOT / "tests/contracts/environments/modules"
FOUND = {"PYTHONPATH": str(MODULES)}  # where verifiers finds environments by name
KEEPER = "rl_async.agent_loop.environments.player"
MISSING = f"no verifiers 0.4 to play; install it with scripts/install verifiers ({VARIABLE})"
# verifiers takes seconds to import, on a busy machine a minute.
pytestmark = [pytest.mark.skipif(not PYTHON.is_file(), reason=MISSING), pytest.mark.timeout(600)]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    command = [str(PYTHON), "-m", f"{KEEPER}.verifiers", "write", "adding-env", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300, env=os.environ | FOUND)
    written: dict[str, Any] = json.loads(path.read_text())
    return written


@pytest.fixture
def config(row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    for name, value in FOUND.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    options = "{taskset: {system_text: Add them.}, agent: {runtime: {type: subprocess}}}"
    given = [f"data.path={tmp_path}/rows.jsonl", "data.eval_path=null", "data.make=null", "eval.every=0"]
    given += ["agent.gateway={}", "agent.environment=verifiers:adding-env", f"agent.environment_options={options}"]
    given += [f"agent.environment_hosts={{python: {PYTHON}}}", "agent.concurrency=1", "agent.max_tokens=3000"]
    given += ["agent.tools=[]", "rollout.max_model_len=4000", "rollout.max_tokens=100"]

    def made(*overrides: str) -> RunConfig:
        return load_config("calculator", [*given, *overrides])

    return made


SUBPROCESS = "agent: {runtime: {type: subprocess}}"
SEVERAL = (
    "agent.environment=verifiers:hard,adding-env",
    f"agent.environment_options={{hard: {{taskset: {{id: adding-env}}, {SUBPROCESS}}}, adding-env: {{{SUBPROCESS}}}}}",
)


@pytest.mark.parametrize("overrides", [(), SEVERAL], ids=["one", "several"])
def test_its_rollouts_become_rows_with_its_rewards(
    config: Callable[..., RunConfig],
    row: dict[str, Any],
    renderer: ChatRenderer,
    tmp_path: Path,
    overrides: tuple[str, ...],
) -> None:
    run = config(*overrides)
    (tmp_path / "config.yaml").write_text(dump(run))
    make_tokens(tmp_path / "keys")
    says = (CALL, "5", "4", "give up", "raise")
    gateway = RunningGateway(run, leased(samples=4, extra=row["extra_info"]), renderer, says)
    command = [sys.executable, "-m", KEEPER, "--run", str(tmp_path), "--gateway", gateway.url, "--index", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as keeper:
        assert keeper.stderr is not None
        said = ""
        while "given back" not in said and (line := keeper.stderr.readline()):
            said += line
        keeper.terminate()
        said += keeper.communicate(timeout=60)[1]
    gateway.stop()
    assert keeper.returncode == EXIT_SIGNAL + signal.SIGTERM, said
    assert "no number" in gateway.queue.failures[0]
    right, wrong, error = [rows[0] for rows in gateway.queue.rows]
    assert (right.reward, right.reward_parts) == (1.5, {"right": 1.0, "called": 1.0, "turns": 2.0})
    assert (wrong.reward, wrong.reward_parts) == (0.0, {"right": 0.0, "called": 0.0, "turns": 1.0})
    assert error.reward == 0.0 and error.error
    assert [turn.role for turn in right.turns] == ["system", "user", "assistant", "tool", "assistant"]


def test_one_of_several_has_its_own_options_and_rows(config: Callable[..., RunConfig], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^agent\.environment_options: hard is none of"):
        try_environment(config(SEVERAL[1], "agent.environment=verifiers:adding-env,other"))
    try_environment(config(*SEVERAL))
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace('"environment": "adding-env"', '"environment": "third"'))
    with pytest.raises(ConfigError, match=r"^data: extra_info\.environment is 'third'"):
        try_environment(config(*SEVERAL))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("agent.environment=verifiers:nowhere", r"agent\.environment: .*nowhere"),
        (f"agent.environment_hosts={{python: {sys.executable}}}", r"agent\.environment_hosts\.python"),
        ("agent.environment_hosts={python: /no/python}", r"agent\.environment_hosts\.python"),
    ],
)
def test_one_that_cannot_work_is_refused_before_the_run(
    config: Callable[..., RunConfig], override: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{named}"):
        try_environment(config(override))


def test_a_row_without_its_task_is_refused_before_the_run(config: Callable[..., RunConfig], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text().replace("answer", "no_such"))
    with pytest.raises(ConfigError, match=r"^data: extra_info\.task"):
        try_environment(config())

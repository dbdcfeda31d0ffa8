"""The Pythons of engines are checked for the engine's package, and for this rl-async beside it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rl_async
from rl_async.configs.load import load_config
from rl_async.errors import ConfigError, UserError
from rl_async.launcher.plan.machine import check_engine_python, gpu_bytes
from rl_async.launcher.plan.trials import check_user_code, try_environment, write_tool_schemas
from rl_async.process import role as own_python
from rl_async.process.role import own_module
from rl_async.reward_loop.api import Conversation
from rl_async.reward_loop.service import ProcessPool
from rl_async.transfer_queue.chat_messages import TOOLS_FILE


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing in it."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    return folder


@pytest.fixture
def no_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.usefixtures("no_python_path")
def test_sglang_needs_its_package_and_ours(bare: Path) -> None:
    [site] = bare.glob("lib/python*/site-packages")
    python = f"{bare}/bin/python"
    with pytest.raises(UserError, match=r"rollout\.engine=sglang.*rl-async\[sglang\].*rollout\.python"):
        check_engine_python("sglang", python)
    (site / "sglang.py").touch()
    with pytest.raises(UserError, match=r"rollout\.python.*SGLang.*rl-async"):
        check_engine_python("sglang", python)
    (site / "rl_async.py").touch()
    with pytest.raises(UserError, match=r"rollout\.python.*xxhash"):
        check_engine_python("sglang", python)
    (site / "xxhash.py").touch()
    check_engine_python("sglang", python)


@pytest.mark.usefixtures("no_python_path")
def test_vllm_needs_its_package_and_our_plugin_of_this_version(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True, timeout=60)
    [site] = tmp_path.glob("lib/python*/site-packages")
    python = f"{tmp_path}/bin/python"
    with pytest.raises(UserError, match=r"rollout\.engine=vllm.*install vllm.*rollout\.python"):
        check_engine_python("vllm", python)
    (site / "vllm.py").touch()
    with pytest.raises(UserError, match=r"rollout\.python.*vLLM.*rl-async"):
        check_engine_python("vllm", python)
    installed = site / "rl_async-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-async\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nrl_async = rl_async.rollout_server.vllm.plugin:register\n"
    )
    (site / "rl_async.py").touch()
    (site / "xxhash.py").touch()
    with pytest.raises(UserError, match=rf"rollout\.python.*1.*{re.escape(rl_async.__version__)}"):
        check_engine_python("vllm", python)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rl-async\nVersion: {rl_async.__version__}\n")
    check_engine_python("vllm", python)
    # An editable installation of this checkout may have been made when the checkout had another version.
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-async\nVersion: 1\n")
    (site / "rl_async.py").unlink()
    (site / "here.pth").write_text(f"{Path(rl_async.__file__).parents[1]}\n")
    check_engine_python("vllm", python)


@pytest.mark.usefixtures("no_python_path")
def test_the_embedded_engine_needs_nothing_and_a_python_must_be_there(tmp_path: Path) -> None:
    check_engine_python("embedded", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"rollout\.python.*none"):
        check_engine_python("vllm", str(tmp_path / "none"))


@pytest.mark.usefixtures("no_python_path")
def test_the_python_that_runs_this_is_no_key_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(UserError) as caught:
        gpu_bytes()
    assert str(tmp_path / "none") in str(caught.value) and "rollout.python" not in str(caught.value)


# A working directory whose files are named as modules of Python's and of others are.


NAMES = ["random", "queue", "socket", "json", "types", "logging", "numpy", "msgspec", "torch", "zmq", "uvicorn"]
# One role that imports torch, one that does not, and the command itself; then all others.
ROLES = ["transfer_queue", "rollout_server", "launcher.cli"]
OTHERS = [
    *("transfer_queue.shard", "agent_loop", "agent_loop.gateway", "reward_loop.server", "trainer", "trainer.finetune"),
    *("launcher.runs.prepare", "trainer.compute_type"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        Path(f"{name}.py").write_text("raise SystemExit('a file of the user is imported')\n")
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("role", [*ROLES, *(pytest.param(role, marks=pytest.mark.slow) for role in OTHERS)])
def test_a_role_imports_nothing_from_the_working_directory(role: str) -> None:
    done = subprocess.run(own_module(role, "--help"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("here")
def test_users_code_finds_its_neighbours_behind_what_is_installed() -> None:
    Path("mine").mkdir()
    Path("mine/beside.py").write_text("import random, queue\nSHARE = random.random()\n")
    Path("above.py").write_text("SHARE = 1\n")
    Path("mine/scores.py").write_text("import beside, above\ndef score(solution_str): return beside.SHARE\n")
    Path("package").mkdir()
    Path("package/scores.py").write_text("from above import SHARE\ndef score(solution_str): return SHARE\n")
    terms = "reward.functions=[{name: 'mine/scores.py:score'}, {name: 'package.scores:score'}]"
    check_user_code(load_config("calculator", [terms]))
    Path("mine/scores.py").write_text("import nowhere\n")
    with pytest.raises(ConfigError, match="nowhere"):
        check_user_code(load_config("calculator", [terms]))


@pytest.mark.usefixtures("here")
async def test_a_scorers_process_imports_nothing_from_the_working_directory() -> None:
    answer = Conversation(data_source="", solution_str="\\boxed{7}", ground_truth="7", answer="\\boxed{7}")
    async with ProcessPool(["math"], [], 1) as pool:
        assert (await pool.score("math", answer, 120.0)).value == 1.0


@pytest.mark.usefixtures("here")
def test_trials_before_a_run_import_nothing_from_the_working_directory(tmp_path: Path) -> None:
    Path("tools.py").write_text("def add(a: int, b: int) -> int:\n    '''Add.'''\n    return a + b\n")
    Path("world.py").write_text(
        "class World:\n    def __init__(self, task): pass\n    def reset(self): return 'begin'\n"
        "    def step(self, answer): return None\n    def close(self): pass\n"
    )
    rows = [{"data_source": "x", "prompt": "1+1?", "reward_model": {"ground_truth": "2"}}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = ["agent.tools=[tools.py:add]", "agent.environment=world.py:World", "data.path=rows.jsonl", "data.make=null"]
    config = load_config("calculator", named)
    write_tool_schemas(config, tmp_path)
    assert "tools.py:add" in json.loads((tmp_path / TOOLS_FILE).read_text())
    try_environment(config)


@pytest.mark.usefixtures("here")
def test_every_process_of_the_package_is_started_without_the_working_directory() -> None:
    package = Path(own_python.__file__).parents[1]
    parts = [part.resolve() for part in package.iterdir() if part.is_symlink() and (part / "__init__.py").exists()]
    files = {file for folder in (package, *parts) for file in folder.rglob("*.py")} - {Path(own_python.__file__)}
    assert len(files) > 150
    assert [str(file) for file in files if re.search(r'sys\.executable, "-m"', file.read_text())] == []

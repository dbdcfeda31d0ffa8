"""Code that a config names is loaded, in a process of its own, before a run has a folder."""

import sys
from pathlib import Path

import pytest

from rl_async.configs.load import load_config
from rl_async.errors import ConfigError
from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.plan.trials import check_user_code

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


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("broken.py").write_text("x = 1\nimport nothing_like_this\n")
    Path("leaves.py").write_text("import sys\nsys.exit(0)\n")


def test_code_that_fits_is_loaded_outside_this_process() -> None:
    own = ["agent.loop=mine.py:loop", "agent.tools=[mine.py:tool]", "agent.environment=mine.py:World"]
    check_user_code(load_config("calculator", [*own, "reward.functions=[{name: mine.py:score}]"]))
    assert "a_module_of_the_users_code" not in sys.modules


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("agent.loop=mine.py:score", ["agent.loop", "mine.py:score"]),
        ("agent.environment=leaves.py:World", ["agent.environment", "SystemExit", "leaves.py:2"]),
        ("reward.functions=[{name: mine.py:odd}]", ["reward.functions", "'solution'"]),
        *(
            # Each starts a process of its own.
            pytest.param(override, named, marks=pytest.mark.slow)
            for override, named in (
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


@pytest.mark.parametrize("more", [[], pytest.param(["--dry-run"], marks=pytest.mark.slow)])
def test_a_mistake_does_not_use_up_the_name(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--config", "calculator", "--name", "mine", "agent.loop=mine.py:nope", *more]) == 2
    assert "agent.loop" in capsys.readouterr().err and not Path("runs").exists()

"""An environment is tried before a run begins."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_async.configs.load import load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.launcher.plan.trials import try_environment

WORLD = """
from pathlib import Path
from rl_async.errors import ConfigError
class World:
    def __init__(self, task, what=""): self.task, self.what = task, what
    def reset(self):
        if self.what == "raises": raise OSError("no such level")
        if self.what == "hangs":
            import time; time.sleep(600)
        if self.what == "exits":
            import os; os._exit(7)
        if self.what == "refuses": raise ConfigError("agent.environment: not this one")
        Path("tried").write_text(self.task.extra["level"])
        return 7 if self.what == "number" else "begin"
    def close(self): Path("closed").write_text("")
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("world.py").write_text(WORLD)
    row = {"data_source": "d", "prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": "1"}}
    Path("rows.jsonl").write_text(json.dumps(row | {"extra_info": {"level": "first"}}) + "\n")

    def made(*overrides: str) -> RunConfig:
        data = ("data.path=rows.jsonl", "data.eval_path=null", "data.make=null", "eval.every=0")
        return load_config("calculator", [*data, "agent.environment=world.py:World", *overrides])

    return made


def test_an_environment_begins_and_ends_an_episode_of_the_first_task(config: Any) -> None:
    try_environment(config())
    assert Path("tried").read_text() == "first" and Path("closed").exists()


@pytest.mark.parametrize("what", ["raises", "refuses", "number", "exits", "hangs"])
def test_one_that_the_run_could_not_use_is_refused_with_its_key(config: Any, what: str) -> None:
    given = config(f"agent.environment_options={{what: {what}}}", "agent.environment_timeout_s=2")
    with pytest.raises(ConfigError, match=r"^agent\.environment: "):
        try_environment(given)


def test_what_the_run_does_not_use_is_not_tried(config: Any) -> None:
    try_environment(config("agent.environment_options={what: raises}", "agent.environment=null"))
    assert not Path("tried").exists()

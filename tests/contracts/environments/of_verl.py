"""verl: its tools, made by its classes from its config, with the columns that its data sets have."""

import importlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from verl.tools.tool_registry import initialize_tools_from_config

from rl_async.agent_loop.environments.session import Session
from rl_async.agent_loop.tools.tool import CallableTool, ToolResult
from rl_async.reward_loop.api import Score
from rl_async.transfer_queue.dataset import open_rows, to_task
from tests.unit.agent_loop.fakes import session

MODULES = Path(__file__).with_name("modules")
CONFIG = """
tools:
  - class_name: gsm8k_like.CheckTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: check
        description: Says what an answer is worth.
        parameters:
          type: object
          properties: {answer: {type: string, description: The answer.}}
          required: [answer]
  - class_name: gsm8k_like.Shouts
    config: {type: native}
"""


def row(truth: str, **extra: Any) -> dict[str, Any]:
    """A row as verl's preprocessing of GSM8K for multi-turn tool calls writes it."""
    kwargs = {"check": {"create_kwargs": {"ground_truth": truth}, "execute_kwargs": {"mark": "!"}}}
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": "2+3?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 0, "need_tools_kwargs": True, "tools_kwargs": kwargs, **extra},
    }


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(MODULES))
    path = tmp_path / "tools.yaml"
    path.write_text(CONFIG)
    return path


def opened(config: Path, rows: list[dict[str, Any]]) -> Session:
    """The environment of the first row, as read from a file of all."""
    file = config.with_name("train.parquet")
    pq.write_table(pa.Table.from_pylist(rows), file)
    task = to_task(open_rows(str(file))[0], "train", "t:0")
    return session(f"verl:{config}", prompt=task.prompt, ground_truth=task.ground_truth, extra=task.extra)


async def call(tool: CallableTool, **arguments: str) -> ToolResult:
    return await tool.call(arguments, timeout_s=60.0)


async def test_a_tool_keeps_its_state_for_an_episode_and_gets_what_the_row_says(config: Path) -> None:
    other = row("7")
    other["extra_info"]["tools_kwargs"]["shout"] = {"create_kwargs": {"loud": True}}  # Arrow fills it in everywhere
    async with opened(config, [row("5"), other]) as episode:
        await episode.reset()
        check, shout = episode.tools()
        assert [await call(check, answer=answer) for answer in ("4", "4", "5")] == [
            ToolResult("worth 0!"),
            ToolResult("worth 0!"),
            ToolResult("worth 1!"),
        ]
        assert (await call(check)).error == "'answer'", "what it raises is the call's result"
        assert (await call(shout)).text == "Updated the tool state."
        assert (await episode.step("5"))[0].done
        assert await episode.reward() == Score(0.9, {"tool_check": 1.0, "tool_shout": 0.0, "calls": -0.1})
        open_tools = importlib.import_module("gsm8k_like").OPEN
        assert len(open_tools) == 1
    assert not open_tools


async def test_schemas_are_those_that_verl_shows(config: Path) -> None:
    theirs = [tool.tool_schema for tool in initialize_tools_from_config(str(config))]
    async with opened(config, [row("5")]) as episode:
        await episode.reset()
        ours = [tool.schema for tool in episode.tools()]
    assert ours == [schema.model_dump(exclude_unset=True, exclude_none=True) for schema in theirs]


async def test_a_row_may_select_tools(config: Path) -> None:
    async with opened(config, [row("5", tool_selection=["shout"])]) as episode:
        await episode.reset()
        assert [tool.name for tool in episode.tools()] == ["shout"]

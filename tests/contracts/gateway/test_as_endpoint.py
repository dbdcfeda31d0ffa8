"""`rl-async eval --endpoint` against our own server of chat completions."""

from collections.abc import Callable
from pathlib import Path

from rl_async.configs.load import load_config
from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.gateway import Gateway
from rl_async.launcher.runs.evaluate_endpoint import HeldOutSamples, play
from tests.contracts.gateway.peers import RunningGateway
from tests.unit.agent_loop.fakes import leased

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'


async def test_an_open_episode_can_be_evaluated(start: Callable[..., RunningGateway], tmp_path: Path) -> None:
    gateway = start("OK", CALL, "5")
    episode = next(Gateway(gateway.url).episodes())
    config = load_config("calculator")
    samples = HeldOutSamples([leased().task], config)
    endpoint = EndpointConfig(url=episode.base_url, model="any", attempts=1)
    await play(config, endpoint, samples, tmp_path / "run")
    (row,) = samples.rows
    assert (row.reward, [turn.role for turn in row.turns]) == (1.0, ["user", "assistant", "tool", "assistant"])
    assert row.turns[1].tool_calls[0].result == "5"

"""The greedy episode that a group is compared with: sampled at temperature 0, and marked."""

import msgspec
import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.configs.schema.algorithm import AlgorithmConfig
from rl_async.configs.schema.run import EvalConfig
from rl_async.messages import Sampling
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config


@pytest.mark.parametrize(
    ("partition", "sample", "temperature", "baseline"),
    [("train", 1, 0.7, False), ("train", 2, 0.0, True), ("eval", 2, 0.3, False)],
)
async def test_the_sample_behind_the_group_is_the_greedy_one(
    renderer: ChatRenderer, partition: str, sample: int, temperature: float, baseline: bool
) -> None:
    config = msgspec.structs.replace(
        run_config({"group_size": 2, "temperature": 0.7}, loop="single_turn"),
        algorithm=AlgorithmConfig(advantage="remax"),
        eval=EvalConfig(temperature=0.3),
    )
    engine = ScriptedEngine(renderer, ["5"])
    (row,) = await EpisodeRunner(config, renderer, engine).run(leased(partition=partition, samples=3), sample)
    assert engine.requests[0].sampling == row.sampling == Sampling(temperature=temperature)
    assert row.baseline == row.header().baseline == baseline

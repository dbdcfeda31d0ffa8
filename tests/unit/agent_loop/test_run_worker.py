"""A worker and a gateway, up to the first request to a queue that is not there."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.gateway.server import run_gateway
from rl_async.agent_loop.worker import run_worker
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.reward import JudgeConfig, RewardConfig, RewardTerm
from rl_async.configs.schema.rollout import AgentConfig, GatewayConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.process.http_auth import Access, make_tokens, run_token
from rl_async.process.role import bind
from rl_async.transfer_queue.auth.keys import provide_keys

KEY = "RL_ASYNC_TEST_JUDGE_KEY"


async def worker(config: RunConfig, queue: str, folder: Path) -> None:
    await run_worker(config, 0, queue, folder=folder)


async def gateway(config: RunConfig, queue: str, folder: Path, listener: socket.socket | None = None) -> None:
    access = Access.of_run(folder, "gateway", ())
    with listener or bind("127.0.0.1", 0, "agent.gateway") as listening:
        await run_gateway(config, listening, access, queue, folder=folder, reward_model="")


@pytest.fixture
def config(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Of a run in ``tmp_path`` whose judge has a key."""
    monkeypatch.setenv(KEY, "secret")
    tokenizer.save_pretrained(tmp_path / "model")
    judge = JudgeConfig(url="http://127.0.0.1:1/v1", model="m", api_key_env=KEY)
    config = RunConfig(
        model=ModelConfig(path=str(tmp_path / "model")),
        data=DataConfig(path="none"),
        agent=AgentConfig(gateway=GatewayConfig()),
        reward=RewardConfig(functions=(RewardTerm(name="judge"),), judge=judge),
    )
    provide_keys(config, tmp_path)
    make_tokens(tmp_path / "keys")
    return config


async def ended(running: asyncio.Task[None]) -> None:
    """Cancel a role, which is still at work."""
    running.cancel()
    assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], asyncio.CancelledError)


@pytest.mark.parametrize("role", [worker, gateway])
async def test_keys_leave_the_environment_once_they_are_read(role: Any, config: RunConfig, tmp_path: Path) -> None:
    running = asyncio.create_task(role(config, f"ipc://{tmp_path}/nobody", tmp_path))
    async with asyncio.timeout(10):
        while KEY in os.environ and not running.done():  # noqa: ASYNC110 - an environment sets no event
            await asyncio.sleep(0.01)
    await ended(running)
    assert KEY not in os.environ


async def test_a_gateway_refuses_requests_without_its_token(config: RunConfig, tmp_path: Path) -> None:
    listener = bind("127.0.0.1", 0, "agent.gateway")
    listener.listen()
    running = asyncio.create_task(gateway(config, f"ipc://{tmp_path}/nobody", tmp_path, listener))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/models"
    own, engines = (run_token(tmp_path, audience) for audience in ("gateway", "engines"))
    async with aiohttp.ClientSession() as session:
        for token, refused in ((None, True), (engines, True), (own, False)):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with session.get(url, headers=headers) as response:
                assert (response.status == 401) == refused
    await ended(running)

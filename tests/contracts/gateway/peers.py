"""A gateway on a thread with a scripted engine, and one as a process with a real engine and a real queue."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway.server import PING_S, GatewayServer, OpenEpisodes
from rl_async.configs.load import dump
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.reward import RewardConfig
from rl_async.configs.schema.rollout import AgentConfig, RolloutConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.gateway import Gateway, RemoteEpisode
from rl_async.messages import Done, Leased, LeasedGroup, Renewed, SampleKey, Trajectory, Version
from rl_async.process.role import bind
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Heard
from tests.contracts.engines.engine_peers import Peer
from tests.unit.agent_loop.fakes import ScriptedEngine

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'


class Queue:
    """Has one group, keeps what comes (once ``takes`` is set, as it is), and is over when told to."""

    def __init__(self, group: LeasedGroup) -> None:
        self.groups, self.rows, self.failures = [group], list[tuple[Trajectory, ...]](), list[str]()
        self.over, self.takes, self.putting = asyncio.Event(), asyncio.Event(), threading.Event()
        self.takes.set()

    async def lease(self, max_groups: int, wait_s: float, *, idle_s: float | None = None) -> Leased:
        if max_groups and self.groups:
            return Leased(groups=[self.groups.pop()])
        await self.over.wait()
        return Leased(groups=[], finished=True)

    async def renew(self, held: list[SampleKey]) -> Renewed:
        return Renewed()

    async def put(self, *rows: Trajectory, media: Mapping[str, bytes] | None = None) -> Done:
        self.putting.set()
        await self.takes.wait()
        self.rows.append(rows)
        return Done()

    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done:
        self.failures.append(error)
        return Done()


class Engine:
    """Says what the test gave it; waits with an empty text until the request is cancelled."""

    def __init__(self, renderer: ChatRenderer, says: Sequence[str]) -> None:
        self.scripted = ScriptedEngine(renderer, says)
        self.waiting, self.cancelled = threading.Event(), threading.Event()

    async def generate(self, request: GenerateRequest, *, session: str, heard: Heard | None = None) -> GenerateResult:
        if self.scripted.says[len(self.scripted.requests)]:
            result = await self.scripted.generate(request, session=session)
            for size in range(1, len(result.token_ids) if heard is not None else 0):
                heard(result.token_ids[:size])
                await asyncio.sleep(0)
            return result
        self.scripted.says.pop(len(self.scripted.requests))
        self.waiting.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError("nobody cancelled the request")


class RunningGateway:
    """A gateway on a thread with its own event loop; real HTTP on a free port.

    It closes the clients of ``clients`` when it is asked to end: a socket that is left to the garbage collection fails
    another test, which happens to run then.
    """

    def __init__(
        self,
        config: RunConfig,
        group: LeasedGroup,
        renderer: ChatRenderer,
        says: Sequence[str],
        *,
        engine: Any = None,
        ping_s: float = PING_S,
    ) -> None:
        self._config, self._renderer, self._ping_s = config, renderer, ping_s
        self.queue, self.engine = Queue(group), engine or Engine(renderer, says)
        self.begun: dict[str, Any] = {}
        self.clients: list[Any] = []
        self._listener = bind("127.0.0.1", 0, "port")
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with RewardService(RewardConfig()) as rewards:
            episodes = OpenEpisodes(self._config, self._renderer, self.engine, self.queue, rewards)
            self._gateway = GatewayServer(self._config, episodes, self._ping_s)
            server = uvicorn.Server(uvicorn.Config(self._gateway.app, log_level="warning", lifespan="off"))
            serving = asyncio.create_task(server.serve(sockets=[self._listener]))
            self._ready.set()
            await episodes.run()
            server.should_exit = True
            await serving

    def dropped(self) -> dict[tuple[str, str], int]:
        """Requests by client and field that the gateway dropped."""
        return dict(self._gateway.fields.dropped)

    def taken(self) -> str:
        """The id of the episode that the test plays."""
        if not self.begun:
            status, self.begun = Gateway(self.url).post("/episodes", {"wait_s": 60})
            assert status == 200
        return str(self.begun["episode_id"])

    def end(self) -> None:
        status, ended = Gateway(self.url).post(f"/episodes/{self.taken()}/reward", {"reward": 1.0})
        assert status == 200 and ended["accepted"]

    def take_rows(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.queue.takes.set)

    def openai(self) -> tuple[RemoteEpisode, Any]:
        """Take an episode, and return it with an openai client for it."""
        import openai

        episode = next(Gateway(self.url).episodes())
        self.clients.append(openai.OpenAI(base_url=episode.base_url, api_key="none", max_retries=0))
        return episode, self.clients[-1]

    def ask_to_end(self) -> None:
        for client in self.clients:
            client.close()
        if self._loop is not None and not self._asked and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.queue.over.set)
        self._asked = True

    def stop(self) -> None:
        self.ask_to_end()
        self._thread.join(10)
        assert not self._thread.is_alive()


def make_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A random Qwen3 with this tokenizer."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **shape, **heads)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def serve_as_version_0(peer: Peer) -> None:
    """An update without buckets: the engine keeps its weights and serves them as version 0."""
    engine = peer.client()
    try:
        await engine.pause("keep")
        await engine.start_update()
        await engine.finish_update(Version())
        await engine.resume()
    finally:
        await engine.close()


@contextmanager
def gateway_process(folder: Path, model: Path, queue: str) -> Iterator[str]:
    """The URL of a gateway of a run with this model, this queue and the tokens in ``folder``."""
    config = RunConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        data=DataConfig(path="none"),
        agent=AgentConfig(max_tokens=200, unprinted_tools="allow"),
        rollout=RolloutConfig(max_tokens=6, max_model_len=256),
    )
    (folder / "config.yaml").write_text(dump(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_async.agent_loop.gateway", "--run", str(folder), "--queue", queue],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]
    finally:
        process.terminate()
        process.communicate(timeout=20)
        assert process.returncode == 0

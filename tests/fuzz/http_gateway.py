"""The gateway under attack, with a queue that never ends and an engine that says what a model may say."""

import asyncio
import hashlib
import random
from typing import Any

import uvicorn
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway.open_episodes import OpenEpisodes
from rl_async.agent_loop.gateway.server import GatewayServer
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.reward import RewardConfig
from rl_async.configs.schema.rollout import AgentConfig, GatewayConfig, RolloutConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EngineRejected
from rl_async.messages import Done, Leased, LeasedGroup, Renewed, SampleKey, Task, Trajectory, Version, VersionRun
from rl_async.process.http_auth import Access
from rl_async.process.http_server import server_of
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Heard
from tests.fuzz.http_client import ask
from tests.fuzz.http_requests import Route
from tests.fuzz.http_served import Served

PROMPT = [{"role": "user", "content": "what is 2+3?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
# A template takes tools and calls for what they should be.
PRINTS_TOOLS = "{% for tool in tools or [] %}{{ 'tool ' + tool.function.name }}{{ tool | tojson }}{% endfor %}"
PRINTS_CALLS = """\
{%- for message in messages %}{% for call in message.tool_calls or [] %}{{ 'call ' + call.function.name }}
{%- for key, value in call.function.arguments | items %}{{ key ~ value }}{% endfor %}{% endfor %}{% endfor %}"""
# What a model may write. Numbers and nesting in a call are the model's, not the client's.
SAYS = (
    "5",
    '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": 99999999999999999999999999}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": 1e400}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 50 + "1" + "}" * 50 + "}</tool_call>",
    "<tool_call>" * 3,
    "",
)


class EndlessQueue:
    """Has a group whenever one is asked for, and forgets what comes."""

    def __init__(self) -> None:
        self._groups = 0
        self.put_rows = self.failures = 0

    async def lease(self, max_groups: int, wait_s: float, *, idle_s: float | None = None) -> Leased:
        if not max_groups:
            await asyncio.sleep(3600)
        self._groups += 1
        task = Task(task_id="t", data_source="test", prompt=PROMPT, ground_truth="5")
        group = LeasedGroup(
            group_id=self._groups, partition="train", attempt=1, samples=[0], task=task, min_version=Version()
        )
        return Leased(groups=[group])

    async def renew(self, held: list[SampleKey]) -> Renewed:
        return Renewed()

    async def put(self, *rows: Trajectory) -> Done:
        self.put_rows += len(rows)
        return Done()

    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done:
        self.failures += 1
        return Done()


class TalkingEngine:
    """Says something that depends on the prompt alone; rejects some prompts."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._usual = renderer.prompt(PROMPT)

    async def generate(self, request: GenerateRequest, *, session: str, heard: Heard | None = None) -> GenerateResult:
        digest = hashlib.sha256(repr(request.token_ids).encode()).digest()
        if digest[0] == 0:
            raise EngineRejected("this engine rejects this prompt")
        says = "5" if request.token_ids == self._usual else SAYS[digest[1] % len(SAYS)]
        spoken = [*self._renderer.encode(says), self._renderer.end_of_turn][: request.max_tokens]
        await asyncio.sleep(0)
        for size in range(1, len(spoken) if heard is not None else 0):
            heard(spoken[:size])
            await asyncio.sleep(0)
        return GenerateResult(
            token_ids=spoken,
            logprobs=[-0.5] * len(spoken),
            versions=[VersionRun(Version(), 0, len(spoken))],
            finish_reason="stop" if spoken[-1] == self._renderer.end_of_turn else "length",
        )


_CALL = {"function": {"name": "f", "arguments": '{"x": 1}'}}
_CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "what is 2+3?"}]},
        {"role": "assistant", "content": "hm", "tool_calls": [{"id": "c", **_CALL}]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "max_tokens": 20,
    "temperature": 1.0,
    "stop": ["x"],
    "stream": False,
    "stream_options": {"include_usage": True},
}
_MESSAGES = {
    "model": "m",
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {"role": "user", "content": "what is 2+3?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "5"}]}],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "max_tokens": 20,
    "stream": True,
}
_RESPONSES = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "in words"}]},
        {"type": "message", "role": "user", "content": "what is 2+3?"},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "aG0="},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "max_output_tokens": 20,
    "store": True,
    "include": ["reasoning.encrypted_content"],
}


def _called_with(arguments: str) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [*PROMPT, {"role": "assistant", "content": "", "tool_calls": [call]}, *PROMPT], "tools": [TOOL]}


class GatewayTarget:
    """The gateway with a queue that never ends and an engine that says what a model may say."""

    name = "gateway"
    token = "g" * 43
    routes = (
        Route("POST", "/episodes", {"wait_s": 0.1}),
        Route("GET", "/episodes"),
        Route("POST", "/episodes/give-back", {"episode": "0.0.1", "error": "x"}),
        Route("POST", "/episodes/{id}/heartbeat", {}),
        Route(
            "POST",
            "/episodes/{id}/reward",
            {"reward": 0.5, "parts": {"tidy": 1.0}, "reasons": {"tidy": "x"}, "error": ""},
        ),
        Route("POST", "/episodes/{id}/v1/chat/completions", _CHAT),
        Route("POST", "/episodes/{id}/v1/chat/completions", _CHAT | {"stream": True}),
        *(Route("POST", "/episodes/{id}/v1/chat/completions", _called_with(text)) for text in ("{", "[1]")),
        Route("POST", "/episodes/{id}/v1/responses", _RESPONSES),
        Route("POST", "/episodes/{id}/v1/responses", {"input": "what is 2+3?", "stream": True}),
        Route("POST", "/episodes/{id}/v1/messages", _MESSAGES, anthropic=True),
        Route("POST", "/episodes/{id}/v1/messages/count_tokens", _MESSAGES, anthropic=True),
        Route("POST", "/episodes/{id}/v1/completions", {"prompt": "2+3=", "max_tokens": 5, "stop": ["x"]}),
        Route("POST", "/episodes/{id}/v1/completions", {"prompt": [5, 6, 7], "stream": True}),
        Route("GET", "/episodes/{id}/v1/models"),
        Route("GET", "/episodes/{id}/v1/models/m"),
        Route("GET", "/health"),
    )

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._queue, self._current = EndlessQueue(), ""
        config = RunConfig(
            model=ModelConfig(path="none"),
            data=DataConfig(path="none"),
            agent=AgentConfig(
                max_tokens=3000,
                episode_timeout_s=300.0,
                gateway=GatewayConfig(max_body_bytes=300_000, max_answers=1000),
            ),
            rollout=RolloutConfig(max_tokens=100, max_model_len=4000),
        )
        template = f"{PRINTS_TOOLS}{PRINTS_CALLS}{tokenizer.chat_template}"
        made = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token, chat_template=template
        )
        renderer = ChatRenderer(made, cache_bytes=1 << 20)

        def make() -> tuple[uvicorn.Server, Any]:
            rewards = RewardService(RewardConfig())
            self._episodes = OpenEpisodes(config, renderer, TalkingEngine(renderer), self._queue, rewards)

            async def run() -> None:
                async with rewards:
                    await self._episodes.run()

            return server_of(GatewayServer(config, self._episodes).app, Access(self.token)), run

        self._served = Served(make)
        self.port, self.crashed = self._served.port, self._served.crashed

    def prepare(self, rng: random.Random) -> str:
        """Begin an episode."""
        self._current = self._begin()
        return self._current

    def _begin(self) -> str:
        status, answer = ask(self.port, self.token, "POST", "/episodes", {"wait_s": 60})
        assert status == 200, answer
        return str(answer["episode_id"])

    def release(self) -> None:
        """Nothing is held back for long."""

    def check(self) -> Any:
        """Play an episode."""
        episode = self._begin()
        chat = {"messages": PROMPT, "max_tokens": 20}
        status, answer = ask(self.port, self.token, "POST", f"/episodes/{episode}/v1/chat/completions", chat)
        assert status == 200, answer
        status, ended = ask(self.port, self.token, "POST", f"/episodes/{episode}/reward", {"reward": 0.5})
        assert status == 200, ended
        return answer["choices"], answer["usage"], ended

    def state(self) -> Any:
        """Requests of the newest episode, if it is still open, and rows that were handed over."""
        newest = self._episodes._open.get(self._current)
        return newest and newest._requests, self._queue.put_rows

    def close(self) -> None:
        """End the server."""
        self._served.stop()

"""The HTTP servers of a run, each on a thread of this process with the settings that its own process gives it.

The gateway's queue never ends, and its engine says what a model may say.
"""

import asyncio
import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import uvicorn
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway.server import GatewayServer, OpenEpisodes
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.reward import RewardConfig
from rl_async.configs.schema.rollout import AgentConfig, GatewayConfig, RolloutConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EngineRejected
from rl_async.messages import Done, Leased, LeasedGroup, Renewed, SampleKey, Task, Trajectory, Version, VersionRun
from rl_async.process.http_auth import Access
from rl_async.process.http_server import server_of
from rl_async.process.role import bind
from rl_async.reward_loop.server.app import Application, Batcher
from rl_async.reward_loop.server.classifier import score
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Heard
from rl_async.rollout_server.embedded.core import EngineCore
from rl_async.rollout_server.embedded.engine_thread import EngineThread
from rl_async.rollout_server.embedded.server import EngineServer
from rl_async.transfer_queue.telemetry import serve_metrics
from rl_async.weight_sync.buckets import Piece
from tests.fuzz.http_attacks import Route, ask
from tests.fuzz.queue_servers import LiveQueue
from tests.support.ports import free_port
from tests.support.weights import make_buckets

START_S = 60.0


class Served:
    """uvicorn on a thread. ``make`` builds the server on its event loop; ``beside`` runs there too."""

    def __init__(self, make: Callable[[], tuple[uvicorn.Server, Any]]) -> None:
        self._make = make
        self._listener = bind("127.0.0.1", 0, "port")
        self.port = int(self._listener.getsockname()[1])
        self.crashed: list[BaseException] = []
        self._ready = threading.Event()
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._main, name="served")
        self._thread.start()
        if not self._ready.wait(START_S):
            raise RuntimeError("the server did not start")
        if self.crashed:
            raise self.crashed[0]

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.crashed.append(error)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._server, beside = self._make()
        self._listener.listen(1024)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(beside()) if beside else None
            self._ready.set()
            await group.create_task(self._server.serve(sockets=[self._listener]))
            if task is not None:
                task.cancel()

    def stop(self) -> None:
        """End it. Raises what it died of."""
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(START_S)
        if self._thread.is_alive():
            raise RuntimeError("the server hangs")
        if self.crashed:
            raise self.crashed[0]


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

    async def put(self, *rows: Trajectory, media: Mapping[str, bytes] | None = None) -> Done:
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
        """Begin an episode, and return its id for the attacks."""
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
        """Stop the server, and wait for its thread."""
        self._served.stop()


LENGTH = 64


class Target(Protocol):
    """A server under attack. ``prepare`` brings it into some state and returns an episode's id, if it has episodes;
    ``state`` is what no stranger may change; ``release`` makes it answer what it holds back, and serve again; ``check``
    returns what a valid client gets then, the same each time."""

    name: str
    port: int
    token: str
    routes: tuple[Route, ...]
    crashed: list[BaseException]

    def prepare(self, rng: random.Random) -> str: ...
    def release(self) -> None: ...
    def check(self) -> Any: ...
    def state(self) -> Any: ...
    def close(self) -> None: ...


_GENERATE = {
    "token_ids": [1, 2, 3],
    "request_id": "r",
    "stream": False,
    "sampling_params": {
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.01,
        "seed": 1,
        "n": 2,
        "stop_token_ids": [1],
        "logprobs": 0,
        "stream_interval": 1,
    },
}
_GLOO = {
    "init_info": {
        "backend": "gloo",
        "master_address": "127.0.0.1",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
        "timeout_s": 0.1,
        "group_name": "g",
    }
}
_UPDATE = {
    "update_info": {
        "names": ["lm_head.weight"],
        "dtype_names": ["float32"],
        "shapes": [[64, 32]],
        "checksum": "0",
        "shm_name": "none",
        "file": "none",
        "hold": "no",
        "version": "0.1",
        "index": 0,
        "count": 1,
        "kind": "full",
    }
}


_HELD = {"hold": "stage", "version": "0.1", "index": 0, "count": 1, "kind": "full"}


class EngineTarget:
    """The embedded engine with a tiny random model."""

    name = "engine"
    token = "e" * 43
    routes: tuple[Route, ...] = (
        *[Route("POST", "/inference/v1/generate", _GENERATE)] * 4,
        Route("POST", "/inference/v1/generate", _GENERATE | {"stream": True}),
        Route("POST", "/abort_requests", {"request_ids": ["r"]}),
        Route("POST", "/pause", queries=("?mode=keep", "?mode=wait", "?mode=abort", "?mode=x", "")),
        Route("POST", "/resume"),
        Route("GET", "/is_paused"),
        Route("POST", "/init_weight_transfer_engine", _GLOO),
        Route("POST", "/start_weight_update", queries=("", "?staged=true", "?staged=x")),
        Route("POST", "/update_weights", _UPDATE),
        Route("POST", "/finish_weight_update", {"weight_version": "0.1"}),
        Route("GET", "/weight_info"),
        Route("GET", "/get_world_size"),
        Route("POST", "/weight_checker", {"action": "checksum"}),
        Route("POST", "/sleep", queries=("?level=1", "?level=2", "?level=3", "?level=x", "")),
        Route("POST", "/wake_up", queries=("?tags=weights", "?tags=kv_cache", "?tags=x", "")),
        *(Route("GET", path) for path in ("/health", "/load", "/metrics")),
    )

    def __init__(self, model: Path) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self.crashed: list[BaseException] = []
        self._engine = EngineThread(EngineCore(loaded.eval(), max_batch=4, max_length=LENGTH), self.crashed.append)
        bucket = make_buckets(loaded.named_parameters(), 1 << 24)[0]
        save_file({"bucket": bucket.data}, model / "bucket.safetensors")
        self._init = {"init_info": {"backend": "disk", "folder": str(model)}}
        update = msgspec.to_builtins(bucket.info) | {"file": "bucket.safetensors"}
        self.routes = (
            *self.routes,
            Route("POST", "/init_weight_transfer_engine", self._init),
            *[Route("POST", "/update_weights", {"update_info": update})] * 2,
            Route("POST", "/update_weights", {"update_info": update | _HELD}),
        )
        self._weights = [Piece(name, p.shape, 0, p.detach().clone().view(-1)) for name, p in loaded.named_parameters()]
        server = EngineServer(self._engine, "m")
        self._served = Served(lambda: (server_of(server.app, Access(self.token)), None))
        self.port = self._served.port

    def prepare(self, rng: random.Random) -> str:
        """Begin a weight update now and then."""
        if rng.random() < 0.3:
            self._control("/init_weight_transfer_engine", self._init)
            self._control("/pause?mode=keep")
            self._control("/start_weight_update")
        return ""

    def release(self) -> None:
        """Send the weights anew as a trainer does, after whatever state the engine was left in."""
        self._control("/wake_up")
        self._control("/pause?mode=abort")
        self._control("/start_weight_update")
        self._engine.load_weights(self._weights)
        self._control("/finish_weight_update", {"weight_version": "0.0"})
        self._control("/resume")

    def _control(self, path: str, body: Any = None) -> None:
        headers = {"X-Trainer-Lineage": "0"}  # refused if a stranger has named a newer one
        status, answer = ask(self.port, self.token, "POST", path, body, **headers)
        assert status == 200, (path, status, answer)

    def check(self) -> Any:
        """Sample greedily, and with a seed."""
        greedy = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "temperature": 0}}
        seeded = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "seed": 3}}
        found = []
        for body in (greedy, seeded):
            status, answer = ask(self.port, self.token, "POST", "/inference/v1/generate", body)
            assert status == 200, answer
            found.append([part["token_ids"] for part in answer["choices"]])
        return found, self.state()

    def state(self) -> Any:
        """What the control routes change, and whether the trainer of lineage 0 is still let in."""
        status, info = ask(self.port, self.token, "GET", "/weight_info", **{"X-Trainer-Lineage": "0"})
        return status, info, self._engine.paused, self._engine.asleep

    def close(self) -> None:
        """End the server, then the engine."""
        self._served.stop()
        self._engine.stop()


class RewardTarget:
    """The reward model's server with a tiny random classifier."""

    name = "reward model"
    token = "r" * 43
    routes = (
        Route("POST", "/classify", {"input": "what is 2+3?", "model": "m", "use_activation": True}),
        Route("POST", "/classify", {"input": ["a", "b c"], "add_special_tokens": False}),
        Route("POST", "/classify", {"input": [[1, 2], [3]]}),
        Route("POST", "/classify", {"input": [1, 2, 3]}),
        Route("GET", "/health"),
    )

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        torch.manual_seed(1)
        shape = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_labels": 1, "pad_token_id": 0}
        config = Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=96, **shape, **heads)
        model = Qwen3ForSequenceClassification(config).eval()

        def make() -> tuple[uvicorn.Server, Any]:
            batcher = Batcher(lambda rows: score(model, rows), 4)
            app = Application(batcher, tokenizer, name="m", label=None, vocabulary=len(tokenizer), longest=96).app
            return server_of(app, Access(self.token), lifespan="on"), None

        self._served = Served(make)
        self.port, self.crashed = self._served.port, self._served.crashed

    def prepare(self, rng: random.Random) -> str:
        """Nothing is needed."""
        return ""

    def release(self) -> None:
        """Nothing is held back."""

    def check(self) -> Any:
        """Score a text and token ids."""
        found = []
        for given in ("what is 2+3?", [1, 2, 3]):
            status, answer = ask(self.port, self.token, "POST", "/classify", {"input": given})
            assert status == 200, answer
            found.append([round(item["probs"][0], 4) for item in answer["data"]])
        return found

    def state(self) -> Any:
        """It keeps none."""

    def close(self) -> None:
        """Stop the server, and wait for its thread."""
        self._served.stop()


class MetricsTarget:
    """The metrics of a queue."""

    name = "metrics"
    token = "m" * 43
    routes = (Route("GET", "/metrics"), Route("GET", "/metrics", queries=("?x=y",)), Route("GET", "/health"))

    def __init__(self) -> None:
        self.crashed: list[BaseException] = []
        self._stack = ExitStack()
        self._queue = LiveQueue()
        self._stack.callback(self._queue.stop)
        self.port = free_port()
        self._stack.enter_context(serve_metrics(self.port, self._queue.address, self.token))

    def prepare(self, rng: random.Random) -> str:
        """Nothing is needed."""
        return ""

    def release(self) -> None:
        """Nothing is held back."""

    def check(self) -> Any:
        """Scrape the names of the metrics."""
        status, text = ask(self.port, self.token, "GET", "/metrics")
        assert status == 200, text
        return sorted({line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")})

    def state(self) -> Any:
        """Scraping changes nothing."""

    def close(self) -> None:
        """End both."""
        self._stack.close()


@contextmanager
def targets(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[Target]]:
    """All servers, with the model in ``folder``."""
    with ExitStack() as stack:
        found: list[Target] = []
        for make in (
            lambda: GatewayTarget(tokenizer),
            lambda: EngineTarget(folder),
            lambda: RewardTarget(tokenizer),
            MetricsTarget,
        ):
            found.append(make())
            stack.callback(found[-1].close)
        yield found

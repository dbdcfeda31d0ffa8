"""The HTTP servers of a run, each on a thread of this process with the settings that its own process gives it."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import uvicorn
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

from rl_async.process.http_auth import Access
from rl_async.process.http_server import server_of
from rl_async.reward_loop.server.app import Application, Batcher
from rl_async.reward_loop.server.classifier import score
from rl_async.rollout_server.embedded.core import EngineCore
from rl_async.rollout_server.embedded.engine_thread import EngineThread
from rl_async.rollout_server.embedded.server import EngineServer
from rl_async.transfer_queue.telemetry import serve_metrics
from rl_async.weight_sync.buckets import Piece
from tests.fuzz.http_client import ask
from tests.fuzz.http_gateway import GatewayTarget
from tests.fuzz.http_requests import Route
from tests.fuzz.http_served import Served
from tests.fuzz.queue_servers import LiveQueue
from tests.support.ports import free_port
from tests.support.weights import make_buckets

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
        """End the server."""
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

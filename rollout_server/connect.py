"""The client of an engine, by its kind, and the pool of all of a run's engines."""

from rl_async.configs.schema import RolloutConfig
from rl_async.errors import ProtocolError
from rl_async.messages import EngineRecord, Version
from rl_async.rollout_server.answers import ReadVersion
from rl_async.rollout_server.pool import EnginePool
from rl_async.rollout_server.sglang import SglangEngine
from rl_async.rollout_server.vllm import VllmEngine

EngineClient = VllmEngine | SglangEngine

CLIENTS: dict[str, type[VllmEngine] | type[SglangEngine]] = {
    "embedded": VllmEngine,
    "vllm": VllmEngine,
    "sglang": SglangEngine,
}


def connect(
    kind: str, url: str, timeout_s: float | None = 600.0, read_version: ReadVersion = Version.parse
) -> EngineClient:
    """A client of the engine at ``url``; nothing is sent yet. Raises ProtocolError for a kind that is not known."""
    if kind not in CLIENTS:
        raise ProtocolError(f"the engine at {url} is of kind {kind!r}; known: {', '.join(CLIENTS)}")
    return CLIENTS[kind](url, timeout_s, read_version)


def engine_pool(config: RolloutConfig) -> EnginePool:
    """A pool without engines yet: ``watch`` finds them."""

    def client(record: EngineRecord) -> EngineClient:
        return connect(record.kind, record.url, timeout_s=None)  # the pool knows which time counts

    return EnginePool(client, config.request_timeout_s, config.max_batch_size)

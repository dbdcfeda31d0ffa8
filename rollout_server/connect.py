"""The client of an engine, by its kind, and the pool of all of a run's engines."""

from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.errors import ProtocolError
from rl_async.messages import EngineRecord, Version
from rl_async.rollout_server.answers import ReadVersion
from rl_async.rollout_server.pool import EnginePool
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.rollout_server.vllm.client import VllmEngine

EngineClient = VllmEngine | SglangEngine

KINDS = ("embedded", "vllm", "sglang")


def connect(
    kind: str,
    url: str,
    timeout_s: float | None = 600.0,
    read_version: ReadVersion = Version.parse,
    together: int = 1,
) -> EngineClient:
    """A client of the engine at ``url``; nothing is sent yet. Raises ProtocolError for a kind that is not known.

    Up to ``together`` requests for one prompt are sent as one, where the client can.
    """
    if kind not in KINDS:
        raise ProtocolError(f"the engine at {url} is of kind {kind!r}; known: {', '.join(KINDS)}")
    if kind == "sglang":
        return SglangEngine(url, timeout_s, read_version)
    return VllmEngine(url, timeout_s, read_version, together)


def engine_pool(config: RolloutConfig) -> EnginePool:
    """A pool without engines yet: ``watch`` finds them."""

    def client(record: EngineRecord) -> EngineClient:
        # The pool knows which time counts.
        return connect(record.kind, record.url, timeout_s=None, together=config.max_batch_size)

    return EnginePool(client, config.request_timeout_s, config.max_batch_size)

"""The client of an engine, by its kind, and the pool of all of a run's engines."""

from collections.abc import Callable, Mapping

from rl_async.configs.engines import EngineKind
from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.errors import ProtocolError
from rl_async.messages import EngineRecord, Version
from rl_async.rollout_server.answers import ReadVersion
from rl_async.rollout_server.pool import EnginePool
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.rollout_server.vllm.client import VllmEngine

EngineClient = VllmEngine | SglangEngine

CLIENTS: Mapping[EngineKind, Callable[[str, float | None, ReadVersion, int, int | None], EngineClient]] = {
    "embedded": VllmEngine,
    "vllm": VllmEngine,
    "sglang": lambda url, timeout_s, read_version, _, lineage: SglangEngine(url, timeout_s, read_version, lineage),
}


def connect(
    kind: str,
    url: str,
    timeout_s: float | None = 600.0,
    read_version: ReadVersion = Version.parse,
    max_coalesced: int = 1,
    lineage: int | None = None,
) -> EngineClient:
    """Return a client of the engine at ``url``; nothing is sent yet. Raises ProtocolError for an unknown kind.

    Up to ``max_coalesced`` requests for one prompt are sent as one, where the dialect has such requests. ``lineage``:
    of the trainer that updates the engine's weights.
    """
    for known, client in CLIENTS.items():
        if known == kind:
            return client(url, timeout_s, read_version, max_coalesced, lineage)
    raise ProtocolError(f"the engine at {url} is of kind {kind!r}; known: {', '.join(CLIENTS)}")


def engine_pool(config: RolloutConfig) -> EnginePool:
    """Return a pool without engines; its ``watch`` finds them."""

    def client(record: EngineRecord) -> EngineClient:
        # No timeout of its own: the pool keeps the deadline, in which the time that engines sleep does not count.
        return connect(record.kind, record.url, timeout_s=None, max_coalesced=config.max_batch_size)

    return EnginePool(client, config.request_timeout_s, config.max_batch_size)

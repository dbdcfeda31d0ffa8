"""The client of an engine, by its kind, and the pool of all of a run's engines."""

from collections.abc import Callable, Mapping
from typing import TypedDict

from rl_async.configs.engines import EngineKind
from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.errors import ProtocolError
from rl_async.messages import EngineRecord, Version
from rl_async.rollout_server.answers import ReadVersion
from rl_async.rollout_server.pool import EnginePool
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.rollout_server.vllm.client import VllmEngine

EngineClient = VllmEngine | SglangEngine


class _Settings(TypedDict):
    timeout_s: float | None
    read_version: ReadVersion
    lineage: int | None
    token: str


def _vllm(url: str, max_coalesced: int, settings: _Settings) -> VllmEngine:
    return VllmEngine(url, max_coalesced=max_coalesced, **settings)


def _sglang(url: str, _: int, settings: _Settings) -> SglangEngine:
    return SglangEngine(url, **settings)


CLIENTS: Mapping[EngineKind, Callable[[str, int, _Settings], EngineClient]] = {
    "embedded": _vllm,
    "vllm": _vllm,
    "sglang": _sglang,
}


def connect(
    kind: str,
    url: str,
    timeout_s: float | None = 600.0,
    read_version: ReadVersion = Version.parse,
    max_coalesced: int = 1,
    lineage: int | None = None,
    *,
    token: str = "",
) -> EngineClient:
    """Return a client of the engine at ``url``; nothing is sent yet. Raises ProtocolError for an unknown kind.

    Up to ``max_coalesced`` requests for one prompt are sent as one, where the dialect has such requests. ``lineage``:
    of the trainer that updates the engine's weights. ``token``: of the run that the engine serves.
    """
    settings = _Settings(timeout_s=timeout_s, read_version=read_version, lineage=lineage, token=token)
    for known, client in CLIENTS.items():
        if known == kind:
            return client(url, max_coalesced, settings)
    raise ProtocolError(f"the engine at {url} is of kind {kind!r}; known: {', '.join(CLIENTS)}")


def engine_pool(config: RolloutConfig, token: str) -> EnginePool:
    """Return a pool without engines; its ``watch`` finds them. ``token``: the run's, for its engines."""

    def client(record: EngineRecord) -> EngineClient:
        # No timeout of its own: the pool keeps the deadline, in which the time that engines sleep does not count.
        return connect(record.kind, record.url, timeout_s=None, max_coalesced=config.max_batch_size, token=token)

    return EnginePool(client, config.request_timeout_s, config.max_batch_size)

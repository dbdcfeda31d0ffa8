"""Routing, the version gate, and what happens to requests when engines are lost. Engines are handwritten fakes."""

import asyncio
from collections.abc import Callable

import pytest

from rl_async.errors import EngineLost, EngineRejected
from rl_async.messages import EngineList, EngineRecord, Sampling, Version, VersionRun
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.rollout_server.pool import STICKY_SLACK, EnginePool

Behaviour = Callable[[GenerateRequest], GenerateResult]


class FakeEngine:
    """Answers as its behaviour says, after ``hold`` is set."""

    def __init__(self, name: str, behaviour: Behaviour) -> None:
        self.name, self.behaviour = name, behaviour
        self.seen: list[GenerateRequest] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.closed = False
        self.asleep = False

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        self.seen.append(request)
        await self.hold.wait()
        return self.behaviour(request)

    async def health(self) -> bool:
        return True

    async def is_sleeping(self) -> bool:
        return self.asleep

    async def close(self) -> None:
        self.closed = True


def result(tokens: int, version: Version, reason: str = "stop", first: int = 0) -> GenerateResult:
    return GenerateResult(
        token_ids=list(range(first, first + tokens)),
        logprobs=[-0.5] * tokens,
        versions=[VersionRun(version, 0, tokens)],
        finish_reason=reason,  # type: ignore[arg-type]
    )


V1 = Version(0, 1)


def request(version: Version = V1, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        token_ids=[1, 2],
        sampling=Sampling(),
        max_tokens=max_tokens,
        stop_token_ids=[],
        min_version=version,
    )


def registry(revision: int = 1, **versions: Version | None) -> EngineList:
    records = [EngineRecord(engine_id=n, url=n, kind="embedded", version=v) for n, v in versions.items()]
    return EngineList(revision=revision, engines=records, published=Version())


def make_pool(timeout_s: float = 5.0, **behaviours: Behaviour) -> tuple[EnginePool, dict[str, FakeEngine]]:
    engines: dict[str, FakeEngine] = {}

    def connect(record: EngineRecord) -> FakeEngine:
        engines[record.engine_id] = FakeEngine(record.engine_id, behaviours[record.engine_id])
        return engines[record.engine_id]

    return EnginePool(connect, timeout_s), engines


def lose(_: GenerateRequest) -> GenerateResult:
    raise EngineLost("connection reset")


async def test_engines_without_the_version_get_no_traffic() -> None:
    pool, engines = make_pool(old=lose, new=lambda r: result(3, Version(0, 1)), none=lose)
    pool.update(registry(old=Version(0, 0), new=Version(0, 1), none=None))
    for _ in range(4):
        assert len((await pool.generate(request(), session="s")).token_ids) == 3
    assert not engines["old"].seen
    assert not engines["none"].seen


async def test_a_lost_request_is_replayed_elsewhere() -> None:
    pool, engines = make_pool(a=lose, b=lambda r: result(2, Version(0, 1)))
    pool.update(registry(a=Version(0, 1), b=Version(0, 1)))
    for _ in range(3):
        assert (await pool.generate(request(), session="s")).finish_reason == "stop"
    assert len(engines["a"].seen) <= 1, "an engine that failed is set aside"


async def test_it_waits_for_an_engine_that_comes_back() -> None:
    pool, _ = make_pool(a=lose, b=lambda r: result(2, Version(0, 1)))
    pool.update(registry(a=Version(0, 1)))
    task = asyncio.create_task(pool.generate(request(), session="s"))
    await asyncio.sleep(0.05)
    pool.update(registry(b=Version(0, 1)))
    assert (await task).finish_reason == "stop"


async def test_the_deadline_names_what_is_known() -> None:
    pool, _ = make_pool(timeout_s=0.2, a=lose)
    pool.update(registry(a=Version(0, 0)))
    with pytest.raises(EngineLost, match=r"no engine serves version 0\.1.*a at 0\.0"):
        await pool.generate(request(), session="s")


async def test_time_in_which_the_engine_sleeps_does_not_count() -> None:
    pool, engines = make_pool(timeout_s=0.1, a=lambda r: result(3, V1))
    pool.update(registry(a=V1))
    engine = engines["a"]
    engine.hold.clear()
    engine.asleep = True
    waiting = asyncio.create_task(pool.generate(request(), session="s"))
    await asyncio.sleep(0.35)
    assert not waiting.done()
    engine.asleep = False
    engine.hold.set()
    assert len((await waiting).token_ids) == 3
    assert len(engine.seen) == 1, "it was asked once"


async def test_an_engine_that_hangs_awake_is_given_up() -> None:
    pool, engines = make_pool(timeout_s=0.1, a=lambda r: result(3, V1))
    pool.update(registry(a=V1))
    engine = engines["a"]
    engine.hold.clear()
    async with asyncio.timeout(5):
        with pytest.raises(EngineLost, match=r"no engine answered within 0 s: no answer in 0\.1 s"):
            await pool.generate(request(), session="s")


async def test_a_rejected_request_is_not_replayed() -> None:
    def refuse(_: GenerateRequest) -> GenerateResult:
        raise EngineRejected("prompt too long")

    pool, engines = make_pool(a=refuse, b=refuse)
    pool.update(registry(a=Version(0, 1), b=Version(0, 1)))
    with pytest.raises(EngineRejected):
        await pool.generate(request(), session="s")
    assert len(engines["a"].seen) + len(engines["b"].seen) == 1


async def test_what_was_sampled_before_an_abort_is_kept() -> None:
    answers = [result(3, Version(0, 1), "abort"), result(2, Version(0, 2), "stop", first=3)]
    pool, engines = make_pool(a=lambda r: answers.pop(0))
    pool.update(registry(a=Version(0, 1)))
    got = await pool.generate(request(), session="s")
    assert got.token_ids == [0, 1, 2, 3, 4]
    assert len(got.logprobs) == 5
    assert got.versions == [VersionRun(Version(0, 1), 0, 3), VersionRun(Version(0, 2), 3, 5)]
    assert engines["a"].seen[1].token_ids == [1, 2, 0, 1, 2]
    assert engines["a"].seen[1].max_tokens == 5


async def test_conversations_stick_until_their_engine_is_overloaded() -> None:
    pool, engines = make_pool(a=lambda r: result(1, Version(0, 1)), b=lambda r: result(1, Version(0, 1)))
    pool.update(registry(a=Version(0, 1), b=Version(0, 1)))
    for _ in range(5):
        await pool.generate(request(), session="s")
    home = max(engines.values(), key=lambda e: len(e.seen))
    other = next(e for e in engines.values() if e is not home)
    assert (len(home.seen), len(other.seen)) == (5, 0)
    home.hold.clear()
    held = [asyncio.create_task(pool.generate(request(), session="s")) for _ in range(STICKY_SLACK + 1)]
    await asyncio.sleep(0)
    await asyncio.wait_for(pool.generate(request(), session="s"), 1)
    assert other.seen
    home.hold.set()
    await asyncio.gather(*held)


async def test_a_removed_engine_is_closed() -> None:
    pool, engines = make_pool(a=lose)
    pool.update(registry(a=Version()))
    pool.update(registry(2))
    await pool.close()
    assert engines["a"].closed

"""Which engine gets a request, and the client of an engine by its kind."""

import pytest

from rl_async.errors import ProtocolError
from rl_async.messages import EngineRecord, Sampling, Version
from rl_async.rollout_server import pool
from rl_async.rollout_server.api import EngineLoad, GenerateRequest
from rl_async.rollout_server.pool import CANDIDATES, OpenMembers, PoolMember, Router, connect
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.rollout_server.vllm.client import VllmEngine

V1 = Version(0, 1)


def member(name: str, version: Version | None = V1, max_batch: int = 8) -> PoolMember[None]:
    return PoolMember(EngineRecord(engine_id=name, url=name, kind="embedded", version=version), None, max_batch)


def request(prompt: int = 10, max_tokens: int = 20) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        token_ids=[1] * prompt,
        sampling=Sampling(),
        max_tokens=max_tokens,
        stop_token_ids=[],
        min_version=V1,
    )


def load(requests: int = 0, usage: float = 0.0, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(running=requests, waiting=0, cache_usage=usage, preemptions=preemptions)


def chosen(router: Router[None], members: list[PoolMember[None]], session: str, prompt: int = 10) -> str | None:
    best = router.choose(members, request(prompt), session, 0.0)
    return None if best is None else best.engine_id


def test_an_engine_that_returns_starts_with_no_missed_probes() -> None:
    engine = member("a")
    engine.missed_probes = 2
    engine.adopt(member("a", None).record)
    assert engine.gone.is_set()
    engine.adopt(member("a").record)
    assert not engine.gone.is_set() and engine.missed_probes == 0, "else it would not be gone at the second miss"


def test_a_conversation_stays_while_its_prefix_is_worth_the_wait() -> None:
    a, b, router = member("a"), member("b"), Router[None]()
    with b.in_flight(request()):
        assert chosen(router, [a, b], "s") == "a"
    with a.in_flight(request(max_tokens=20)):  # 30 tokens in line
        assert chosen(router, [a, b], "s", prompt=31) == "a"
        assert chosen(router, [a, b], "s", prompt=29) == "b"
        assert chosen(router, [a, b], "s", prompt=10) == "b", "it lives there now"
    assert a.tokens == a.requests == 0


def test_other_clients_requests_are_estimated_by_their_number() -> None:
    a, b, router = member("a"), member("b"), Router[None]()
    with a.in_flight(request()), b.in_flight(request(max_tokens=40)):
        assert chosen(router, [a, b], "s") == "a"
        a.observe(load(requests=4))  # three of another client
        assert chosen(router, [a, b], "t") == "b"


def test_an_engine_used_only_by_other_clients_is_not_free() -> None:
    a, b, router = member("a"), member("b"), Router[None]()
    a.observe(load(requests=3))
    with b.in_flight(request()):
        assert chosen(router, [a, b], "s") == "b"


def test_a_full_cache_makes_an_engine_expensive() -> None:
    a, b, router = member("a"), member("b"), Router[None]()
    with a.in_flight(request()), b.in_flight(request(max_tokens=40)):
        a.observe(load(requests=1, usage=0.9))
        assert chosen(router, [a, b], "s") == "b"


def test_old_full_and_lost_engines_get_nothing() -> None:
    router = Router[None]()
    old, none, aside, gone, full = (member(name) for name in ("old", "none", "aside", "gone", "full"))
    old.record = EngineRecord(engine_id="old", url="", kind="embedded", version=Version(0, 0))
    none.record = EngineRecord(engine_id="none", url="", kind="embedded", version=None)
    aside.backoff_until = 1.0
    gone.gone.set()
    full.requests = int(full.limit)
    assert chosen(router, [old, none, aside, gone, full], "s") is None
    full.requests -= 1
    assert chosen(router, [old, none, aside, gone, full], "s") == "full"


def test_the_limit_shrinks_when_the_cache_is_full_and_grows_when_it_is_reached() -> None:
    a = member("a", max_batch=80)
    assert a.limit == 100
    a.observe(load(usage=1.0, preemptions=5))
    assert a.limit == 100, "preemptions before the first probe do not count"
    a.observe(load(usage=1.0, preemptions=6))
    assert a.limit == 100, "a weight update preempts too, once"
    a.observe(load(usage=1.0, preemptions=7))
    assert a.limit == 75
    a.observe(load(usage=0.3, preemptions=9))
    a.observe(load(usage=1.0, preemptions=9))
    assert a.limit == 75
    a.requests = 75
    a.observe(load(usage=0.3, preemptions=9))
    assert a.limit == pytest.approx(78.75)
    a.requests = 1000
    for _ in range(20):
        a.observe(load(preemptions=9))
    assert a.limit == 100
    for preemptions in range(10, 40):
        a.observe(load(usage=0.95, preemptions=preemptions))
    assert a.limit == pool.MIN_LIMIT


def test_the_limit_also_follows_the_requests_that_wait_after_a_preemption() -> None:
    a = member("a", max_batch=80)
    for preempted in (0, 1, 2, 2):
        a.observe(EngineLoad(running=1, waiting=2, cache_usage=1.0, preempted=preempted))
    assert a.limit == 75


def test_old_conversations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SESSIONS_REMEMBERED", 2)
    a, b, router = member("a"), member("b"), Router[None]()
    with b.in_flight(request()):
        for session in ("s", "t", "s", "u"):
            assert chosen(router, [a, b], session) == "a"
    with a.in_flight(request(max_tokens=5)):
        assert chosen(router, [a, b], "s", prompt=20) == "a"
        assert chosen(router, [a, b], "t", prompt=20) == "b", "its last engine is forgotten"


def test_of_many_engines_some_are_looked_at_and_the_one_with_the_prefix() -> None:
    router, asked = Router[None](), list[str]()

    class Counted(PoolMember[None]):
        def backlog(self, request: GenerateRequest) -> float:
            asked.append(self.engine_id)
            return super().backlog(request)

    members: list[PoolMember[None]] = [
        Counted(EngineRecord(engine_id=str(n), url="", kind="embedded", version=V1), None, 8) for n in range(1000)
    ]
    first = chosen(router, members, "s")
    assert len(asked) == CANDIDATES
    assert {chosen(router, members, "s") for _ in range(20)} == {first}, "its prefix is cached there"
    assert len({chosen(router, members, str(n)) for n in range(50)}) > 10, "pools do not all choose the same one"


def test_the_one_engine_of_many_that_serves_a_version_is_found() -> None:
    members = [member(str(n), version=None) for n in range(1000)] + [member("new")]
    assert chosen(Router[None](), members, "s") == "new"


def test_engines_are_open_while_they_have_room() -> None:
    engines, among = [member(str(n), max_batch=1) for n in range(3)], OpenMembers[None]()
    for engine in engines:
        among.refresh(engine)
        among.refresh(engine)
    assert among.members == engines
    full = engines[0]
    full.requests = int(full.limit)
    for _ in range(2):
        among.refresh(full)
        assert set(among.members) == {engines[1], engines[2]}
    full.requests -= 1
    among.refresh(full)
    among.remove(engines[2])
    assert set(among.members) == {engines[0], engines[1]}


@pytest.mark.parametrize(("kind", "client"), [("embedded", VllmEngine), ("vllm", VllmEngine), ("sglang", SglangEngine)])
def test_each_kind_has_its_client(kind: str, client: type) -> None:
    assert type(connect(kind, "http://127.0.0.1:1/")) is client
    assert connect(kind, "http://127.0.0.1:1/").url == "http://127.0.0.1:1"


def test_an_unknown_kind_names_those_that_are_known() -> None:
    with pytest.raises(ProtocolError, match=r"tgi.*embedded.*vllm.*sglang"):
        connect("tgi", "http://127.0.0.1:1")

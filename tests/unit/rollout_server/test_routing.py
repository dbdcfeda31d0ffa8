"""Requests to engines: which engine gets them, which pass its fence, and which schemas and kept tokens are taken."""

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from rl_async.agent_loop.episode import kept_alternatives, policy_sampling
from rl_async.configs.load import load_config
from rl_async.errors import ConfigError, EngineRejected, ProtocolError
from rl_async.messages import EngineRecord, Sampling, Version
from rl_async.rollout_server import json_schemas, pool
from rl_async.rollout_server.api import (
    DROPPED,
    LINEAGE_HEADER,
    MOST_ALTERNATIVES,
    REPLACED,
    TIES,
    EngineLoad,
    GenerateRequest,
    IncomingAnswer,
    LineageFence,
)
from rl_async.rollout_server.json_schemas import beyond_bounds, problem, without_unknown_formats
from rl_async.rollout_server.pool import CANDIDATES, OpenMembers, PoolMember, Router, connect
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.rollout_server.vllm.client import VllmEngine

# Which engine gets a request, and the client of an engine by its kind.


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


# Which requests pass the fence around an engine's routes.


async def status_of(fence: LineageFence, lineage: str | None, path: str = "/pause") -> int:
    """The status of the answer to a request that names this lineage."""
    header = [] if lineage is None else [(LINEAGE_HEADER.lower().encode(), lineage.encode())]
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await fence({"type": "http", "path": path, "headers": header}, None, send)
    return int(sent[0]["status"])


async def engine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def test_an_older_lineage_is_refused_from_the_first_request_of_a_newer_one_on() -> None:
    fence = LineageFence(engine)
    named = ["0", "0", "2", "1", "0", "2", None, "3", "2"]
    assert [await status_of(fence, lineage) for lineage in named] == [
        *(200, 200, 200, REPLACED, REPLACED, 200, 200, 200, REPLACED)
    ]


async def test_a_health_probe_needs_no_token_and_so_fences_nobody_off() -> None:
    fence = LineageFence(engine)
    assert await status_of(fence, "7", "/health") == 200
    assert await status_of(fence, "0") == 200


@pytest.mark.parametrize("lineage", ["", "-1", "x", "9" * 5000, "9" * 19])
async def test_a_lineage_is_a_number(lineage: str) -> None:
    assert await status_of(LineageFence(engine), lineage) == 400


# A truncating sampler's answers: only those that name every kept token are taken.


def answer(sampling: Sampling, alternatives: int) -> IncomingAnswer:
    request = GenerateRequest(
        request_id="r", token_ids=[1], sampling=sampling, max_tokens=4, stop_token_ids=[], alternatives=alternatives
    )
    return IncomingAnswer("http://engine", request, Version.parse)


HALVES = [(3, math.log(0.5)), (4, math.log(0.5)), (5, DROPPED)]


def test_dropped_tokens_are_not_kept() -> None:
    incoming = answer(Sampling(top_k=2), MOST_ALTERNATIVES)
    incoming.add([3], [math.log(0.5)], [HALVES])
    part = incoming.part([SimpleNamespace(version="0.0", start=0, end=1)], "stop")
    assert part.alternatives == [HALVES[:2]]


def test_the_config_allows_as_many_as_engines_name() -> None:
    most = MOST_ALTERNATIVES - TIES
    config = load_config("calculator", [f"rollout.truncation={{top_k: {most}}}"])
    assert kept_alternatives(policy_sampling(config, "train"), "train") == MOST_ALTERNATIVES
    assert kept_alternatives(policy_sampling(config, "eval"), "eval") == 0
    with pytest.raises(ConfigError, match=r"rollout\.truncation\.top_k"):
        load_config("calculator", [f"rollout.truncation={{top_k: {most + 1}}}"])


def test_greedy_answers_name_as_many_as_were_asked_for() -> None:
    """As in a chat with a run whose sampler truncates."""
    answer(Sampling(0.0, top_k=5), 2).add([3], [-0.7], [[(3, -0.7), (4, -0.9)]])


@pytest.mark.parametrize("named", [[], [HALVES[:1]], [[(3, -0.7), (4, -0.9), (5, -3.0)]]])
def test_an_answer_that_does_not_name_all_kept_tokens_is_refused(named: list[list[tuple[int, float]]]) -> None:
    """As of an engine that names none, too few, or the likeliest before the truncation."""
    with pytest.raises(EngineRejected, match=r"rollout\.truncation"):
        answer(Sampling(top_k=2), MOST_ALTERNATIVES).add([3], [math.log(0.5)], named)
    answer(Sampling(), 2).add([3], [math.log(0.5)], named)


# How large a client's schema may be. What crashes a grammar library runs in a process of its own.


PYDANTIC_LIKE = {
    "$defs": {
        f"M{i}": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": f"#/$defs/M{(i + 1) % 60}"}, {"type": "null"}]}},
            "required": ["next"],
        }
        for i in range(60)
    },
    "$ref": "#/$defs/M0",
}


def nested(levels: int, inner: Any) -> Any:
    for _ in range(levels):
        inner = {"items": inner}
    return inner


def chain(definitions: int, levels: int = 0) -> dict[str, Any]:
    steps = {f"d{i}": nested(levels, {"$ref": f"#/$defs/d{i + 1}"}) for i in range(definitions)}
    return {"$defs": {**steps, f"d{definitions}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def through_properties(steps: int) -> dict[str, Any]:
    """A chain without definitions."""
    steps_ = {f"p{i}": nested(20, {"$ref": f"#/properties/p{i + 1}"}) for i in range(steps)}
    return {"properties": steps_, "$ref": "#/properties/p0"}


TOO_LARGE = {
    "chain of definitions": (chain(3000), "bytes"),
    "long chain of definitions": (chain(20_000), "bytes"),
    "many definitions": (chain(400), "#/$defs"),
    "short chain of deep definitions": (chain(100, 20), "levels"),
    "chain without definitions": (through_properties(100), "levels"),
    "names that are no paths": ({"items": nested(15, {}), "allOf": [{"$ref": f"#{i}"} for i in range(100)]}, "levels"),
    "groups": ({"type": "string", "pattern": "(" * 400 + "a" + ")" * 400}, "#/pattern"),
    "many groups": ({"type": "string", "pattern": "(" * 30_000 + "a" + ")" * 30_000}, "#/pattern"),
    "pattern": ({"properties": {"a": {"pattern": "a" * 1001}}}, "#/properties/a/pattern"),
    "pattern of names": ({"patternProperties": {"|".join("ab" * 400): {}}}, "#/patternProperties"),
    "nesting": (nested(60, {}), "#/items/items"),
    "enum": ({"properties": {"a": {"enum": list(range(1001))}}}, "#/properties/a/enum"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_is_named(name: str) -> None:
    schema, place = TOO_LARGE[name]
    said = beyond_bounds(json.dumps(schema))
    assert place in said and "at most" in said and len(said) < 400


def test_what_programs_ask_for_is_within_the_bounds() -> None:
    fine = [
        PYDANTIC_LIKE,
        {"enum": [f"v{i}" for i in range(1000)]},
        {"type": "string", "pattern": r"^(([(]|\)){1,3}[a-z]{1,200}\()*$"},
        {"properties": {"pattern": {"type": "string"}, "enum": {"type": "string"}, "$ref": {"type": "string"}}},
        nested(49, {}),
        chain(200),
    ]
    assert [beyond_bounds(json.dumps(schema)) for schema in fine] == [""] * len(fine)
    assert beyond_bounds("{") and beyond_bounds('{"a": ' * 5000 + "1" + "}" * 5000)


def test_a_name_of_a_part_counts_that_part_only() -> None:
    parts = {f"a/{i}": nested(2, {}) for i in range(100)}
    named = [{"$ref": f"#/properties/a~1{i}"} for i in range(100)]
    assert beyond_bounds(json.dumps({"properties": parts, "not": nested(30, {}), "anyOf": named})) == ""


def test_annotations_are_dropped_and_data_is_kept() -> None:
    schema = {
        "format": "password",
        "properties": {"format": {"type": "string", "format": "date"}, "const": {"format": "binary"}},
        "anyOf": [{"format": "path"}, {"const": {"format": "path"}}, {"enum": [{"format": "path"}]}],
        "default": {"format": "path"},
    }
    assert without_unknown_formats(schema) == {
        "properties": {"format": {"type": "string", "format": "date"}, "const": {}},
        "anyOf": [{}, {"const": {"format": "path"}}, {"enum": [{"format": "path"}]}],
        "default": {"format": "path"},
    }


@pytest.mark.skipif(find_spec("llguidance") is None, reason=f"install llguidance: {json_schemas.INSTALL}")
@pytest.mark.parametrize("name", [*TOO_LARGE, "fine"])
def test_no_schema_ends_the_process(name: str) -> None:
    schema = PYDANTIC_LIKE if name == "fine" else TOO_LARGE[name][0]
    program = "import sys; from rl_async.rollout_server.json_schemas import problem; print(problem(sys.stdin.read()))"
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps(schema), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert bool(done.stdout.strip()) == (name != "fine")


@pytest.mark.skipif(find_spec("llguidance") is None, reason=f"install llguidance: {json_schemas.INSTALL}")
def test_llguidance_knows_the_formats_that_are_kept_and_its_messages_are_short() -> None:
    kept = sorted(json_schemas._FORMATS)
    assert [problem(json.dumps({"type": "string", "format": name})) for name in kept] == [""] * len(kept)
    assert "password" in problem('{"type": "string", "format": "password"}')
    assert 0 < len(problem(json.dumps({"type": "wat" * 1000}))) <= json_schemas.SHOWN
    before = problem.cache_info().hits
    assert problem('{"type": "wat"}') == problem('{"type": "wat"}') and problem.cache_info().hits == before + 1

"""Requests for one prompt are sent as one, and each caller gets its own answer."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from rl_async.errors import EngineLost, EngineRejected, SchemaRejected
from rl_async.messages import Sampling, Version
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.rollout_server.vllm.client import Coalescer, PendingRequest

REQUEST = GenerateRequest(request_id="", token_ids=[1, 2], sampling=Sampling(), max_tokens=4, stop_token_ids=[9])


def request(name: str, **changes: object) -> GenerateRequest:
    return msgspec.structs.replace(REQUEST, request_id=name, **changes)


def tokens(*ids: int) -> GenerateResult:
    return GenerateResult(token_ids=list(ids), logprobs=[0.0] * len(ids), versions=[], finish_reason="abort")


async def answer(coalescer: Coalescer, one: GenerateRequest) -> list[list[int]]:
    return [part.token_ids async for part in coalescer.stream(one)]


class Engine:
    """Answers the i-th request of a group with token i, in two parts. ``calls`` holds the ids of each group."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[list[str]] = []
        self._error = error

    async def sample(self, group: Sequence[PendingRequest]) -> None:
        self.calls.append([asked.request.request_id for asked in group])
        for i, asked in enumerate(group):
            asked.add(tokens(i))
        await asyncio.sleep(0)
        for i, asked in enumerate(group):
            if self._error is None or i == 0:
                asked.add(tokens(i, i))
                asked.end()
        if self._error is not None:
            raise self._error


async def test_one_prompt_is_sent_once_and_each_caller_gets_its_own_answer() -> None:
    engine = Engine()
    coalescer = Coalescer(engine.sample, max_size=8)
    answers = await asyncio.gather(*(answer(coalescer, request(name)) for name in "abc"))
    assert engine.calls == [["a", "b", "c"]]
    assert answers == [[[0], [0, 0]], [[1], [1, 1]], [[2], [2, 2]]]
    await answer(coalescer, request("d"))
    assert engine.calls[1:] == [["d"]], "a later request is sent by itself"


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1]},
        {"sampling": Sampling(temperature=0.5)},
        {"sampling": Sampling(temperature=0.0)},
        {"max_tokens": 5},
        {"stop_token_ids": []},
        {"min_version": Version(0, 1)},
    ],
    ids=str,
)
async def test_requests_that_differ_in_more_than_their_ids_are_sent_separately(change: dict[str, object]) -> None:
    engine = Engine()
    coalescer = Coalescer(engine.sample, max_size=8)
    await asyncio.gather(answer(coalescer, request("a")), answer(coalescer, request("b", **change)))
    assert engine.calls == [["a"], ["b"]]


@pytest.mark.parametrize("change", [{"seed": 1}, {"sampling": Sampling(temperature=0.0)}], ids=str)
async def test_seeded_and_greedy_requests_are_sent_separately(change: dict[str, object]) -> None:
    engine = Engine()
    coalescer = Coalescer(engine.sample, max_size=8)
    await asyncio.gather(*(answer(coalescer, request(name, **change)) for name in "ab"))
    assert engine.calls == [["a"], ["b"]]


async def test_a_refused_group_is_sent_one_by_one() -> None:
    calls = []

    async def sample(group: Sequence[PendingRequest]) -> None:
        calls.append([asked.request.request_id for asked in group])
        if len(group) > 1:
            raise EngineRejected("n must be at most 1")
        if calls[-1] == ["b"]:
            raise EngineRejected("b is refused by itself too")
        group[0].add(tokens(len(calls)))
        group[0].end()

    coalescer = Coalescer(sample, max_size=8)
    first, second = await asyncio.gather(*(answer(coalescer, request(name)) for name in "ab"), return_exceptions=True)
    assert calls == [["a", "b"], ["a"], ["b"]]
    assert first == [[2]] and str(second) == "b is refused by itself too"


async def test_a_schema_is_refused_to_all_of_a_group_at_once() -> None:
    calls = []

    async def sample(group: Sequence[PendingRequest]) -> None:
        calls.append(len(group))
        raise SchemaRejected("no grammar")

    coalescer = Coalescer(sample, max_size=8)
    answers = await asyncio.gather(*(answer(coalescer, request(name)) for name in "ab"), return_exceptions=True)
    assert calls == [2] and [type(error) for error in answers] == [SchemaRejected] * 2


async def test_an_answer_is_read_to_its_end_when_all_callers_have_theirs() -> None:
    read = asyncio.Event()

    async def sample(group: Sequence[PendingRequest]) -> None:
        group[0].add(tokens(5))
        group[0].end()
        await asyncio.sleep(0.01)
        read.set()

    assert await answer(Coalescer(sample, max_size=8), request("a")) == [[5]]
    async with asyncio.timeout(30):
        await read.wait()


async def test_groups_are_no_larger_than_max_size() -> None:
    engine = Engine()
    coalescer = Coalescer(engine.sample, max_size=2)
    await asyncio.gather(*(answer(coalescer, request(name)) for name in "abcde"))
    assert engine.calls == [["a", "b"], ["c", "d"], ["e"]]


async def test_a_failure_reaches_the_callers_that_still_wait() -> None:
    coalescer = Coalescer(Engine(EngineRejected("too long")).sample, max_size=8)
    first, *others = await asyncio.gather(*(answer(coalescer, request(name)) for name in "abc"), return_exceptions=True)
    assert first == [[0], [0, 0]]
    assert [str(error) for error in others] == ["too long", "too long"]


async def test_an_answer_without_an_end_is_lost() -> None:
    async def sample(group: Sequence[PendingRequest]) -> None:
        group[0].add(tokens(5))

    given = []
    with pytest.raises(EngineLost, match="broke off"):
        async for part in Coalescer(sample, max_size=8).stream(request("a")):
            given.append(part.token_ids)
    assert given == [[5]]


async def test_the_engine_stops_when_all_callers_have_left_and_not_before() -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def sample(group: Sequence[PendingRequest]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    coalescer = Coalescer(sample, max_size=8)
    first, second = (asyncio.create_task(answer(coalescer, request(name))) for name in "ab")
    async with asyncio.timeout(30):
        await begun.wait()
        first.cancel()
        await asyncio.wait((first,))
        assert not stopped.is_set() and not second.done()
        second.cancel()
        await stopped.wait()

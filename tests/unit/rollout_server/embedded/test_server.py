"""How the samples of a request go out: the head with the first part, and parts as there are more tokens."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import msgspec

from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.core import Sequence
from rl_async.rollout_server.embedded.server import SequenceEvents, SequenceStream

DEADLINE_S = 60.0
Message = MutableMapping[str, Any]


class Client:
    """A client that stays connected until ``hang_up`` is set, and what it was sent."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.hang_up = asyncio.Event()
        self.events: SequenceEvents = asyncio.Queue()
        self.aborted: list[Sequence] = []
        one = Sequence("r", [1, 2], Sampling(), 3, frozenset(), seed=None, deliver=lambda _: None)
        self.sequence, self.stream = one, SequenceStream([one], self.events, self.aborted.append)

    async def receive(self) -> Message:
        await self.hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.put_nowait(message)

    def sample(self, *tokens: int) -> None:
        """Append tokens as the engine does, and say so."""
        for token in tokens:
            self.sequence.append(token, -0.5, "0.0", max_length=100)
        self.events.put_nowait(self.sequence)

    def sent(self) -> list[Message]:
        """Return what was sent since the last call."""
        return [self.messages.get_nowait() for _ in range(self.messages.qsize())]


def events(*bodies: Message) -> list[Any]:
    """Return the events in these bodies of an answer, without the mark of its end."""
    lines = b"".join(body["body"] for body in bodies).split(b"\n\n")
    return [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]


async def test_a_short_answer_goes_out_whole_with_its_length() -> None:
    client = Client()
    client.sample(5, 6, 7)
    async with asyncio.timeout(DEADLINE_S):
        await client.stream({}, client.receive, client.send)
    head, body = client.sent()
    assert head["status"] == 200 and dict(head["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert not body["more_body"] and body["body"].endswith(b"data: [DONE]\n\n")
    (event,) = events(body)
    assert event["choices"][0]["token_ids"] == [5, 6, 7] and event["choices"][0]["finish_reason"] == "length"


async def test_the_head_waits_for_the_first_part_and_has_no_length_if_more_will_follow() -> None:
    client = Client()
    answering = asyncio.ensure_future(client.stream({}, client.receive, client.send))
    async with asyncio.timeout(DEADLINE_S):
        client.events.put_nowait(client.sequence)  # nothing was sampled yet
        for _ in range(5):
            await asyncio.sleep(0)
        assert client.events.empty() and client.sent() == []
        client.sample(5)
        head, part = await client.messages.get(), await client.messages.get()
        assert b"content-length" not in dict(head["headers"]) and part["more_body"]
        client.sample(6, 7)
        await answering
    (last,) = client.sent()
    assert not last["more_body"] and last["body"].endswith(b"data: [DONE]\n\n")
    assert [event["choices"][0]["token_ids"] for event in events(part, last)] == [[5], [6, 7]]
    assert client.aborted == []


async def test_what_cannot_go_on_is_an_error_with_status_200_as_in_vllm() -> None:
    client = Client()
    client.sequence.stuck = "no token is allowed"
    client.sample(0)
    async with asyncio.timeout(DEADLINE_S):
        await client.stream({}, client.receive, client.send)
    head, body = client.sent()
    assert head["status"] == 200 and not body["more_body"]
    assert events(body)[0]["error"]["code"] == 400


async def test_a_client_that_hangs_up_before_the_first_part_stops_its_sequences() -> None:
    client = Client()
    client.hang_up.set()
    async with asyncio.timeout(DEADLINE_S):
        await client.stream({}, client.receive, client.send)
    assert client.aborted == [client.sequence] and client.sent() == []

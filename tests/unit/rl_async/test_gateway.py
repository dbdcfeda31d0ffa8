"""The agent programs' client, against a gateway that dies in the middle of its answers; and its heartbeats."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rl_async.gateway import FINISHED, Gateway, GatewayError, Heartbeats, RemoteEpisode

BEGUN = {
    "episode_id": "e",
    "base_url": "http://none/e/v1",
    "deadline_s": 9,
    "idle_timeout_s": 99,
    "task": {"prompt": []},
}
TASK = json.dumps(BEGUN).encode()


def answer(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """A server that answers its connections with these bytes, one after another, and closes each."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def play(answers: tuple[bytes, ...]) -> None:
        for data in answers:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(data)
        listener.close()

    def begin(*answers: bytes) -> str:
        threads.append(threading.Thread(target=play, args=(answers,)))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield begin
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "the client did not ask again"


@pytest.mark.parametrize("cut", [0, 10, -len(TASK), -1], ids=["nothing", "status line", "headers only", "last byte"])
def test_an_answer_that_is_cut_off_is_asked_for_again(serve: Callable[..., str], cut: int) -> None:
    url = serve(answer(TASK)[:cut], answer(TASK))
    assert next(Gateway(url).episodes()).id == "e"


def test_an_error_that_is_cut_off_is_asked_for_again(serve: Callable[..., str]) -> None:
    over = answer(json.dumps(FINISHED).encode(), "503 Service Unavailable")
    assert list(Gateway(serve(over[:-1], over)).episodes()) == []


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_gateway_that_is_stopped_in_the_middle_of_a_request_has_ended(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server may answer the request with a bare text before it stops; the last connection is cut."""
    monkeypatch.setattr("rl_async.gateway.time", Clock())
    stopped = answer(b"Internal Server Error", "500 Internal Server Error")
    gateway = Gateway(serve(answer(b"{}"), stopped, stopped[:-1]), gone_s=0.1)
    assert gateway.get("/healthz") == (200, {})
    assert gateway.get("/healthz") == (503, FINISHED)


@pytest.mark.parametrize("text", [b"Internal Server Error", b"<html>\xe9"], ids=["text", "latin-1"])
@pytest.mark.parametrize("answers", [[], [answer(TASK)]], ids=["never a gateway", "once a gateway"])
def test_what_answers_without_json_is_no_end_of_a_run(
    serve: Callable[..., str], answers: list[bytes], text: bytes
) -> None:
    url = serve(*answers, answer(text, "500 Internal Server Error"))
    with pytest.raises(GatewayError) as refused:
        list(Gateway(url, start_s=0.0, gone_s=0.0).episodes())
    assert str(refused.value).startswith("500: ")


def test_a_gateway_that_stays_away_in_the_middle_of_an_answer_has_ended(serve: Callable[..., str]) -> None:
    episodes = Gateway(serve(answer(TASK), answer(TASK)[:-1]), gone_s=0.0).episodes()
    assert next(episodes).id == "e"
    assert list(episodes) == []


def test_an_episode_whose_gateway_has_lost_the_queue_is_over(serve: Callable[..., str]) -> None:
    lost = answer(json.dumps({"error": {"code": "QueueLost"}}).encode(), "503 Service Unavailable")
    episode = next(Gateway(serve(answer(TASK), lost)).episodes())
    assert episode.score()["accepted"] is False


@pytest.mark.parametrize("value", [None, "1", [1.0]])
def test_a_reward_that_is_no_number_is_refused_and_ends_no_episode(value: Any) -> None:
    episode = RemoteEpisode("7", "http://127.0.0.1:9/e/v1", {}, Gateway("http://127.0.0.1:9", start_s=0.0))
    with pytest.raises(TypeError, match="episode 7"):
        episode.reward(value)


def test_both_dialects_have_a_base_url(serve: Callable[..., str]) -> None:
    episode = next(Gateway(serve(answer(TASK))).episodes())
    assert (episode.base_url, episode.anthropic_base_url) == ("http://none/e/v1", "http://none/e")


class Beaten:
    """A gateway that counts heartbeats, and says that an episode has ended after three."""

    def __init__(self) -> None:
        self.beats: list[str] = []
        self.beaten = threading.Event()

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.beats.append(path)
        self.beaten.set()
        return (200 if len(self.beats) < 3 else 404), {}


def held(gateway: Any, heartbeats: Heartbeats) -> RemoteEpisode:
    episode = RemoteEpisode("e", "", {}, gateway)
    heartbeats.start(episode, 0.01)
    return episode


def wait_for_end(heartbeats: Heartbeats) -> None:
    thread = heartbeats._thread
    if thread is not None:
        thread.join(30)
    assert heartbeats._thread is None


def test_heartbeats_are_sent_until_the_episode_has_ended() -> None:
    gateway, heartbeats = Beaten(), Heartbeats()
    episode = held(gateway, heartbeats)
    wait_for_end(heartbeats)
    assert gateway.beats == ["/episodes/e/heartbeat"] * 3 and episode.id == "e"


def test_no_heartbeat_is_sent_for_an_episode_that_the_program_has_forgotten() -> None:
    gateway, heartbeats = Beaten(), Heartbeats()
    held(gateway, heartbeats)
    wait_for_end(heartbeats)
    assert gateway.beats == []


def test_no_heartbeat_is_sent_for_an_episode_that_was_ended() -> None:
    gateway, heartbeats = Beaten(), Heartbeats()
    episode = held(gateway, heartbeats)
    heartbeats.stop(episode)
    wait_for_end(heartbeats)
    assert gateway.beats == []

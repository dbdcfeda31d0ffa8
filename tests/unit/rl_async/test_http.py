"""HTTP servers of a run, and the agent programs' client of the gateway."""

import json
import socket
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from rl_async.errors import EXIT_USER, UserError
from rl_async.gateway import FINISHED, Gateway, GatewayError, Heartbeats, RemoteEpisode
from rl_async.process.http_auth import (
    AUDIENCES,
    HOSTS,
    TOKEN_FILE,
    Access,
    RequireToken,
    answer,
    bearer,
    check_token,
    make_tokens,
    run_token,
    token_file,
)
from rl_async.process.http_server import exposed, gauge
from rl_async.process.run_files import Target, write_targets

# Which requests an HTTP server of a run takes.


TOKEN = "t" * 43
HERE = "10.0.0.5"
ACCESS = Access(TOKEN, ("engine-0.example.org",))
HOST, AUTHORIZATION = (b"host", b"127.0.0.1:8000"), (b"authorization", f"Bearer {TOKEN}".encode())


def status(*headers: tuple[bytes, bytes], method: str = "POST", path: str = "/pause") -> int:
    """200, or the status of the refusal."""
    refused = ACCESS.refusal(method, path, HERE, headers)
    return 200 if refused is None else refused[0]


@pytest.mark.parametrize(
    "credential",
    [AUTHORIZATION, (b"authorization", f"bearer  {TOKEN}".encode()), (b"x-api-key", TOKEN.encode())],
)
def test_the_token_opens_every_route(credential: tuple[bytes, bytes]) -> None:
    assert status(HOST, credential) == 200


@pytest.mark.parametrize(
    "credential",
    [
        (b"authorization", TOKEN.encode()),
        (b"authorization", f"Basic {TOKEN}".encode()),
        (b"authorization", f"Bearer {TOKEN}x".encode()),
        (b"authorization", b"Bearer "),
        (b"authorization", "Bearer ütüt".encode("latin-1")),
        (b"x-api-key", b""),
        (b"cookie", TOKEN.encode()),
    ],
)
def test_anything_else_is_no_token(credential: tuple[bytes, bytes]) -> None:
    assert status(HOST, credential) == 401


@pytest.mark.parametrize(
    "host",
    [b"localhost", b"LOCALHOST:65535", b"[::1]:8000", b"127.0.0.1", b"10.0.0.5:8000", b"Engine-0.example.org:8000"],
)
def test_names_and_addresses_of_the_server_are_known(host: bytes) -> None:
    assert status((b"host", host), AUTHORIZATION) == 200


@pytest.mark.parametrize(
    "host",
    [
        *(b"evil.example.org", b"10.0.0.6", b"", b"localhost.evil.org", b"engine-0.example.org.evil.org", b"[::2]"),
        *(
            b"localhost:65536",
            b"localhost:99999",
            b"[::1].evil.org",
            b"[::1]evil.org:80",
            b"[::1]:80.evil.org",
            b"[::1",
            b"[[::1]]",
            b"::1",
        ),
        *(
            b"localhost:80.evil.org",
            b"localhost:evil.org",
            b"localhost:80:80",
            b"localhost:80@evil.org",
            b"127.0.0.1:x",
        ),
        *(b"localhost:800000", b"localhost/evil.org", b"evil.org@localhost"),
        *(b"localhost\xa0", b"localhost\x0b", b"localhost:80\x85", b"[localhost]", b"[127.0.0.1]:80", b"[::1]\xa0:80"),
    ],
)
def test_a_foreign_host_is_refused_with_the_token_too(host: bytes) -> None:
    assert status((b"host", host), AUTHORIZATION) == 403
    assert status((b"host", host), path="/health", method="GET") == 403


def test_without_a_host_or_with_two_a_request_is_refused() -> None:
    assert status(AUTHORIZATION) == 403
    assert status(HOST, (b"host", b"evil.example.org"), AUTHORIZATION) == 403


@pytest.mark.parametrize("origin", [b"https://example.org", b"null", b"http://127.0.0.1:8000", b""])
def test_a_web_page_is_refused_with_the_token_too(origin: bytes) -> None:
    assert status(HOST, AUTHORIZATION, (b"origin", origin)) == 403
    assert status(HOST, (b"origin", origin), path="/health", method="GET") == 403


def test_only_health_probes_need_no_token() -> None:
    assert status(HOST, path="/health", method="GET") == status(HOST, path="/health", method="HEAD") == 200
    assert status(HOST, path="/health", method="POST") == status(HOST, path="/health/", method="GET") == 401
    assert status(HOST, path="/", method="OPTIONS") == 401


METRICS_TOKEN = (b"authorization", b"Bearer " + b"m" * 43)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [("GET", "/metrics", 200), ("POST", "/metrics", 401), ("GET", "/metrics/", 401), ("POST", "/pause", 401)],
)
def test_the_token_for_metrics_opens_nothing_else(method: str, path: str, expected: int) -> None:
    access = Access(TOKEN, metrics="m" * 43)
    refused = access.refusal(method, path, HERE, (HOST, METRICS_TOKEN))
    assert (200 if refused is None else refused[0]) == expected
    assert access.refusal(method, path, HERE, (HOST, AUTHORIZATION)) is None, "the server's own token opens everything"


def test_without_a_token_for_metrics_they_need_the_servers_own() -> None:
    assert status(HOST, METRICS_TOKEN, method="GET", path="/metrics") == 401
    assert status(HOST, (b"authorization", b"Bearer "), method="GET", path="/metrics") == 401


def test_a_server_outside_the_run_finds_the_token_for_metrics_beside_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokens(tmp_path / "keys")
    monkeypatch.setenv(TOKEN_FILE, str(token_file(tmp_path, "engines")))
    token = (b"authorization", f"Bearer {run_token(tmp_path, 'metrics')}".encode())
    for access in (Access.from_environment(), Access.of_run(tmp_path, "engines", ())):
        assert access.refusal("GET", "/metrics", HERE, (HOST, token)) is None


def test_a_server_without_a_token_for_metrics_keeps_them_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokens(tmp_path / "keys")
    token_file(tmp_path, "metrics").unlink()
    monkeypatch.setenv(TOKEN_FILE, str(token_file(tmp_path, "engines")))
    made: list[str] = []

    class Noted(Access):
        def __init__(self, token: str, names: Iterable[str] = (), *, metrics: str = "") -> None:
            made.append(metrics)
            super().__init__(token, names, metrics=metrics)

    Noted.from_environment()
    assert made == [""]


@pytest.mark.parametrize(
    ("code", "kind", "asks"), [(401, "authentication_error", True), (418, "invalid_request_error", False)]
)
def test_a_refusal_says_its_kind_and_asks_for_a_token_only_if_one_lacks(code: int, kind: str, asks: bool) -> None:
    body, headers = answer(code, "why")
    assert json.loads(body)["error"] == {"type": kind, "message": "why", "code": code}
    assert ((b"www-authenticate", b"Bearer") in headers) == asks


async def test_the_middleware_says_with_which_method_a_request_came() -> None:
    app = RequireToken(inner := Application(), Access(TOKEN, metrics="m" * 43))
    for method in ("GET", "POST"):
        scope = {"type": "http", "path": "/metrics", "method": method, "server": None, "headers": [HOST, METRICS_TOKEN]}
        await app(scope, no_body, ignored)
    assert inner.scopes == ["http"], "GET alone"


async def no_body() -> MutableMapping[str, Any]:
    raise AssertionError("a refused request's body is not read")


async def ignored(message: MutableMapping[str, Any]) -> None:
    """Discard a message of the middleware's answer."""


def test_an_empty_token_is_none() -> None:
    with pytest.raises(ValueError, match="empty"):
        Access("")
    assert bearer("") == {}


class Application:
    """Keeps the kinds of what reaches it."""

    def __init__(self) -> None:
        self.scopes: list[str] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        self.scopes.append(scope["type"])


async def sent(app: RequireToken, kind: str, *headers: tuple[bytes, bytes]) -> list[MutableMapping[str, Any]]:
    """What the middleware itself answers."""
    messages: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        messages.append(message)

    scope = {"type": kind, "path": "/x", "server": (HERE, 80), "headers": list(headers)}
    await app(scope | ({"method": "GET"} if kind == "http" else {}), no_body, send)
    return messages


async def test_the_middleware_refuses_requests_and_web_sockets() -> None:
    inner = Application()
    app = RequireToken(inner, ACCESS)
    start, body = await sent(app, "http", HOST)
    assert [start["type"], body["type"]] == ["http.response.start", "http.response.body"]
    assert start["status"] == 401 and (b"www-authenticate", b"Bearer") in start["headers"]
    error = json.loads(body["body"])
    assert error["type"] == "error" and error["error"]["type"] == "authentication_error"
    assert [m["type"] for m in await sent(app, "websocket", HOST)] == ["websocket.close"]
    assert inner.scopes == []
    for kind, headers in (("http", [HOST, AUTHORIZATION]), ("websocket", [HOST, AUTHORIZATION]), ("lifespan", [])):
        assert await sent(app, kind, *headers) == []
    assert await sent(app, "http", (b"host", HERE.encode()), AUTHORIZATION) == [], "the address where it arrived"
    assert inner.scopes == ["http", "websocket", "lifespan", "http"]


def test_tokens_are_secret_files_that_are_kept(tmp_path: Path) -> None:
    made = make_tokens(tmp_path / "keys")
    assert made == [token_file(tmp_path, audience) for audience in AUDIENCES]
    tokens = {run_token(tmp_path, audience) for audience in AUDIENCES}
    assert len(tokens) == len(AUDIENCES) and min(map(len, tokens)) >= 43
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert make_tokens(tmp_path / "keys") == []
    assert {run_token(tmp_path, audience) for audience in AUDIENCES} == tokens


@pytest.mark.parametrize("content", ["", "short", "two words that are together long enough for a token", "ü" * 40])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").mkdir()
    file = token_file(tmp_path, "engines")
    with pytest.raises(UserError, match=str(file)):
        run_token(tmp_path, "engines")
    file.write_text(content)
    with pytest.raises(UserError, match=str(file)):
        run_token(tmp_path, "engines")


def test_an_engine_of_another_project_does_not_start_without_a_token_and_says_which_variable_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    with pytest.raises(SystemExit) as ended:
        check_token()
    assert ended.value.code == EXIT_USER and TOKEN_FILE in capsys.readouterr().err
    make_tokens(tmp_path / "keys")
    monkeypatch.setenv(TOKEN_FILE, str(token_file(tmp_path, "engines")))
    check_token()


def test_a_server_takes_token_and_names_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    with pytest.raises(UserError, match=TOKEN_FILE):
        RequireToken(Application())
    make_tokens(tmp_path / "keys")
    monkeypatch.setenv(TOKEN_FILE, str(token_file(tmp_path, "engines")))
    monkeypatch.setenv(HOSTS, "a.example.org,b.example.org")
    access = Access.from_environment()
    token = (b"authorization", f"Bearer {run_token(tmp_path, 'engines')}".encode())
    assert access.refusal("GET", "/", None, [(b"host", b"b.example.org:1"), token]) is None
    assert access.refusal("GET", "/", None, [(b"host", b"c.example.org:1"), token]) is not None


# What a process answers to Prometheus, and how Prometheus finds it.


class Apples:
    """Counts how often it was read."""

    def __init__(self) -> None:
        self.reads = 0

    def collect(self) -> Iterator[Metric]:
        self.reads += 1
        yield gauge("apples", "Apples.", self.reads)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_tokens(tmp_path / "keys")
    return tmp_path


def scrape(address: str, token: str) -> dict[str, float]:
    request = urllib.request.Request(f"http://{address}/metrics", headers=bearer(token))
    with urllib.request.urlopen(request, timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def test_a_process_is_found_through_its_file_and_answers_with_numbers_of_that_moment(run: Path) -> None:
    apples = Apples()
    with exposed(True, run, "worker", "worker-0", apples):
        (target,) = json.loads((run / "prometheus" / "worker-0.json").read_text())
        assert target["labels"] == {"run": run.name, "role": "worker", "name": "worker-0"}
        (address,) = target["targets"]
        assert address.startswith("127.0.0.1:") and apples.reads == 0
        token = run_token(run, "metrics")
        assert [scrape(address, token)["apples"] for _ in range(2)] == [1, 2]
        assert scrape(address, token)["process_resident_memory_bytes"] > 1e6
        with pytest.raises(urllib.error.HTTPError) as refused:
            scrape(address, "0" * 43)
        refused.value.close()
        assert refused.value.code == 401
    assert list((run / "prometheus").iterdir()) == []


def test_unwanted_nothing_listens_and_nothing_is_written(run: Path) -> None:
    with exposed(False, run, "worker", "worker-0", Apples()):
        assert not (run / "prometheus").exists()


def test_engines_are_listed_in_one_file_that_goes_with_the_last(run: Path) -> None:
    targets = [Target.at(f"http://10.0.0.{n}:80{n}0", "engine", f"engine-{n}") for n in (1, 2)]
    write_targets(run, "engines", targets)
    listed = json.loads((run / "prometheus" / "engines.json").read_text())
    assert [entry["targets"] for entry in listed] == [["10.0.0.1:8010"], ["10.0.0.2:8020"]]
    write_targets(run, "engines", [])
    write_targets(run, "engines", [])
    assert list((run / "prometheus").iterdir()) == []


# The agent programs' client, against a gateway that dies in the middle of its answers; and its heartbeats.


BEGUN = {
    "episode_id": "e",
    "base_url": "http://none/e/v1",
    "deadline_s": 9,
    "idle_timeout_s": 99,
    "task": {"prompt": []},
}
TASK = json.dumps(BEGUN).encode()


def gateway_answer(body: bytes, status: str = "200 OK") -> bytes:
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
    url = serve(gateway_answer(TASK)[:cut], gateway_answer(TASK))
    assert next(Gateway(url).episodes()).id == "e"


def test_an_error_that_is_cut_off_is_asked_for_again(serve: Callable[..., str]) -> None:
    over = gateway_answer(json.dumps(FINISHED).encode(), "503 Service Unavailable")
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
    stopped = gateway_answer(b"Internal Server Error", "500 Internal Server Error")
    gateway = Gateway(serve(gateway_answer(b"{}"), stopped, stopped[:-1]), gone_s=0.1)
    assert gateway.get("/healthz") == (200, {})
    assert gateway.get("/healthz") == (503, FINISHED)


@pytest.mark.parametrize("text", [b"Internal Server Error", b"<html>\xe9"], ids=["text", "latin-1"])
@pytest.mark.parametrize("answers", [[], [gateway_answer(TASK)]], ids=["never a gateway", "once a gateway"])
def test_what_answers_without_json_is_no_end_of_a_run(
    serve: Callable[..., str], answers: list[bytes], text: bytes
) -> None:
    url = serve(*answers, gateway_answer(text, "500 Internal Server Error"))
    with pytest.raises(GatewayError) as refused:
        list(Gateway(url, start_s=0.0, gone_s=0.0).episodes())
    assert str(refused.value).startswith("500: ")


def test_a_gateway_that_stays_away_in_the_middle_of_an_answer_has_ended(serve: Callable[..., str]) -> None:
    episodes = Gateway(serve(gateway_answer(TASK), gateway_answer(TASK)[:-1]), gone_s=0.0).episodes()
    assert next(episodes).id == "e"
    assert list(episodes) == []


def test_an_episode_whose_gateway_has_lost_the_queue_is_over(serve: Callable[..., str]) -> None:
    lost = gateway_answer(json.dumps({"error": {"code": "QueueLost"}}).encode(), "503 Service Unavailable")
    episode = next(Gateway(serve(gateway_answer(TASK), lost)).episodes())
    assert episode.score()["accepted"] is False


@pytest.mark.parametrize("value", [None, "1", [1.0]])
def test_a_reward_that_is_no_number_is_refused_and_ends_no_episode(value: Any) -> None:
    episode = RemoteEpisode("7", "http://127.0.0.1:9/e/v1", {}, Gateway("http://127.0.0.1:9", start_s=0.0))
    with pytest.raises(TypeError, match="episode 7"):
        episode.reward(value)


def test_both_dialects_have_a_base_url(serve: Callable[..., str]) -> None:
    episode = next(Gateway(serve(gateway_answer(TASK))).episodes())
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

"""What the server of a vLLM before 0.32 gets from us, as far as it runs without vLLM."""

from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from rl_async.rollout_server.vllm import old_servers
from rl_async.rollout_server.vllm.old_servers import Samples, Tokens, WeightVersions


class Workers:
    """vLLM's client of its engine, with a worker on each of two copies."""

    async def collective_rpc(self, method: str) -> list[dict[str, str]]:
        assert method == "weight_checksums"
        return [{"worker0:w": "a"}, {"worker1:w": "b"}]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A server whose route refuses the version 0.9, as vLLM does an update that was not started."""
    monkeypatch.setattr(old_servers, "HELD", [(0.0, "default")])

    async def finish(request: Request) -> JSONResponse:
        wanted = (await request.json())["weight_version"]
        return JSONResponse({}, 500 if wanted == "0.9" else 200)

    app = Starlette(routes=[Route("/finish_weight_update", finish, methods=["POST"])])
    app.add_middleware(WeightVersions)
    app.state.engine_client = Workers()
    with TestClient(app) as started:
        yield started


def test_a_version_counts_once_its_update_has_finished(client: TestClient) -> None:
    def version() -> str:
        return str(client.get("/weight_info").json()["weight_version"])

    assert version() == "default"
    for body, status, held in (
        ({"weight_version": "0.1"}, 200, "0.1"),
        ({"weight_version": "0.9"}, 500, "0.1"),
        ({"version": "0.2"}, 400, "0.1"),
        ({"weight_version": "0.2"}, 200, "0.2"),
    ):
        assert client.post("/finish_weight_update", json=body).status_code == status
        assert version() == held
    times = [time for time, _ in old_servers.HELD]
    assert len(times) == 3 and times == sorted(times)


def test_checksums_are_those_of_all_workers(client: TestClient) -> None:
    found = client.post("/weight_checker", json={"action": "checksum"}).json()
    assert found == {"checksums": {"worker0:w": "a", "worker1:w": "b"}}


def test_a_part_that_waits_takes_the_tokens_versions_and_end_of_the_next() -> None:
    first, second = {"version": "0.0", "start": 0, "end": 2}, {"version": "0.1", "start": 2, "end": 3}
    part = Tokens([5, 6], [first], last=False)
    part.extend(Tokens([7], [first, second], last=False))
    assert part == [5, 6, 7] and part.versions == [first, second]
    empty = Tokens([], [first], last=False)
    assert not empty, "vLLM would send a part without tokens"
    empty.extend(Tokens([], [first], last=True))
    assert empty and list(empty) == [], "the finish reason would be lost"


def test_the_outputs_of_a_part_count_as_all_samples() -> None:
    outputs = Samples(["third"], 4)
    assert len(outputs) == 4 and list(outputs) == ["third"]

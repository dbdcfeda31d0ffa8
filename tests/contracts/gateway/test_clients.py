"""The requests of agent programs as they are shipped, by the shape in which they were recorded.

`recorded_clients.json` has what each program sent, with all texts and schemas replaced, what the policy said, how many
rows that makes, and which fields were ignored: those of JSON formats only where engines cannot follow them.
"""

import json
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.configs.derived import follows_json_schemas
from rl_async.gateway import Gateway
from tests.contracts.gateway.peers import RunningGateway
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import leased, run_config

RECORDED = json.loads((Path(__file__).parent / "recorded_clients.json").read_text())


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(train_tokenizer(demos("calculator", 300), 200))


def post(url: str, body: dict[str, Any], agent: str) -> str:
    headers = {"Content-Type": "application/json", "User-Agent": agent}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("recorded", RECORDED, ids=[client["client"] for client in RECORDED])
def test_what_a_client_sends_is_accepted_and_recorded(renderer: ChatRenderer, recorded: dict[str, Any]) -> None:
    config = run_config({"max_tokens": 100, "max_model_len": 4000}, max_tokens=3000)
    gateway = RunningGateway(config, leased(), renderer, recorded["says"])
    try:
        play(gateway, recorded)
    finally:
        gateway.stop()
    (rows,) = gateway.queue.rows
    trained = [renderer.decode(row.token_ids[row.loss_mask].tolist()) for row in rows]
    assert "".join(trained) == "".join(f"{said}<|im_end|>" for said in recorded["says"])
    assert len(rows) == recorded["rows"]
    formats = [] if follows_json_schemas(config) else recorded.get("formats", [])
    assert gateway.dropped().keys() == {(recorded["user_agent"], field) for field in recorded["ignored"] + formats}


def play(gateway: RunningGateway, recorded: dict[str, Any]) -> None:
    """Send the requests in one episode, and check that the answers are whole."""
    episode = next(Gateway(gateway.url).episodes())
    for body in recorded["requests"]:
        text = post(f"{gateway.url}/episodes/{episode.id}/v1/{recorded['path']}", body, recorded["user_agent"])
        end = "message_stop" if recorded["path"] == "messages" else "[DONE]"
        assert end in text if body.get("stream") else msgspec.json.decode(text)
    assert episode.reward(1.0)["accepted"]

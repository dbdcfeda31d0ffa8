"""Schemas that crash grammar libraries, sent to a gateway in a process of its own, whatever the engines are."""

import json
import urllib.error
import urllib.request
from importlib.util import find_spec
from typing import Any, get_args

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.configs.engines import ENGINES, EngineKind
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.gateway import Gateway
from tests.contracts.gateway.peers import RunningGateway
from tests.support.forked import fork
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import leased, run_config
from tests.unit.rollout_server.test_routing import TOO_LARGE

QUESTION = [{"role": "user", "content": "which colour?"}]
FOLLOWING = [kind for kind in get_args(EngineKind) if ENGINES[kind].json_schemas]


def bodies(schema: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Requests for answers to a schema: by the schema's place, the path and the body."""
    named = {"type": "json_schema", "name": "x", "schema": schema}
    return {
        "response_format.json_schema.schema": (
            "chat/completions",
            {"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": named}},
        ),
        "text.format.schema": ("responses", {"input": "which?", "text": {"format": named}}),
        "output_config.format.schema": (
            "messages",
            {"messages": QUESTION, "max_tokens": 9, "output_config": {"format": named}},
        ),
    }


def send_all(kind: EngineKind) -> None:
    """Send each schema in each dialect; every answer must be a 400 that names the place."""
    config = run_config(
        {"engine": kind, "max_tokens": 50, "max_model_len": 2000}, gateway=GatewayConfig(unsupported="ignore")
    )
    gateway = RunningGateway(config, leased(), ChatRenderer(train_tokenizer(demos("calculator", 300), 200)), ["5"])
    try:
        episode = next(Gateway(gateway.url).episodes())
        for schema, _ in TOO_LARGE.values():
            for place, (path, body) in bodies(schema).items():
                url = f"{gateway.url}/episodes/{episode.id}/v1/{path}"
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60)
                told = json.load(refused.value)["error"]
                assert refused.value.code == 400 and told["message"].startswith(f"{place}: "), told
        assert gateway.dropped() == {}
        assert gateway.engine.scripted.requests == []
    finally:
        gateway.stop()


@pytest.mark.parametrize("kind", FOLLOWING)
def test_schemas_that_are_too_large_are_refused_by_their_place(kind: EngineKind) -> None:
    package = ENGINES[kind].json_package
    if package and find_spec(package) is None:
        pytest.skip("no masks of tokens here; install them: pip install 'rl-async[json]'")
    sending = fork(send_all, kind)
    sending.join(180)
    assert sending.exitcode == 0

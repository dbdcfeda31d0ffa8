import pytest

from rl_async.errors import ProtocolError
from rl_async.rollout_server.pool import connect
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.rollout_server.vllm.client import VllmEngine


@pytest.mark.parametrize(("kind", "client"), [("embedded", VllmEngine), ("vllm", VllmEngine), ("sglang", SglangEngine)])
def test_each_kind_has_its_client(kind: str, client: type) -> None:
    assert type(connect(kind, "http://127.0.0.1:1/")) is client
    assert connect(kind, "http://127.0.0.1:1/").url == "http://127.0.0.1:1"


def test_an_unknown_kind_names_those_that_are_known() -> None:
    with pytest.raises(ProtocolError, match=r"tgi.*embedded.*vllm.*sglang"):
        connect("tgi", "http://127.0.0.1:1")

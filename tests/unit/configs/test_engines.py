"""The traits of the kinds of engines are complete, and consistent with the registries of their code."""

from importlib.util import find_spec
from typing import get_args

import pytest

from rl_async.configs.derived import Transport
from rl_async.configs.engines import ENGINES, EngineKind, EngineTraits
from rl_async.rollout_server.pool import connect
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.rollout_server.vllm.client import VllmEngine


def test_every_kind_has_traits_and_a_client() -> None:
    assert set(get_args(EngineKind)) == set(ENGINES)
    for kind in get_args(EngineKind):
        client = SglangEngine if kind == "sglang" else VllmEngine
        assert type(connect(kind, "http://127.0.0.1:1")) is client


@pytest.mark.parametrize("traits", ENGINES.values(), ids=list(ENGINES))
def test_every_kind_can_be_started_and_installed(traits: EngineTraits) -> None:
    assert find_spec(f"rl_async.{traits.module}.__main__")
    assert bool(traits.package) == bool(traits.versions) == bool(traits.install)


def test_the_flags_that_we_set_are_refused() -> None:
    for traits in ENGINES.values():
        for flag in (*traits.flags, *traits.fixed_flags, *traits.refused_flags, "--host"):
            assert traits.refusal(flag) and traits.refusal(f"{flag}=1")
        assert not traits.refusal("--block-size=32")


def test_transports_are_those_of_the_configs() -> None:
    for traits in ENGINES.values():
        assert set(traits.transports) <= set(get_args(Transport))

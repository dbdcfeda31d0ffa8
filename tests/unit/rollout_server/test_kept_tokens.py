"""A truncating sampler's answers: only those that name every kept token are taken."""

import math
from types import SimpleNamespace

import pytest

from rl_async.agent_loop.episode import kept_alternatives, policy_sampling
from rl_async.configs.load import load_config
from rl_async.errors import ConfigError, EngineRejected
from rl_async.messages import Sampling, Version
from rl_async.rollout_server.api import DROPPED, MOST_ALTERNATIVES, TIES, GenerateRequest, IncomingAnswer


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

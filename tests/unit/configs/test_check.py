"""Combinations that cannot work are refused, naming the keys."""

import pytest

from rl_async.configs.load import load_config
from rl_async.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rollout.engine=vllm"], ["rollout.engine=vllm", "not available yet"]),
        (["rollout.engine=sglang"], ["rollout.engine=sglang", "not available yet"]),
        (["trainer.backend=megatron"], ["trainer.backend=megatron", "not available yet"]),
        (["queue.journal=sqlite"], ["queue.journal=sqlite", "not available yet"]),
        (["queue.journal=redis"], ["queue.journal=redis", "not available yet"]),
        (["weight_sync.transport=nccl"], ["weight_sync.transport=nccl", "not available yet"]),
        (["weight_sync.transport=disk"], ["weight_sync.transport=disk", "not available yet"]),
        (["trainer.tensor_parallel=2"], ["trainer.tensor_parallel=2", "trainer.backend"]),
        (["rollout.top_p=0.9"], ["rollout.top_p"]),
        (["rollout.top_k=20"], ["rollout.top_k"]),
        (["queue.max_staleness=1", "weight_sync.every=3"], ["weight_sync.every=3", "queue.max_staleness"]),
        (["rollout.group_size=1"], ["rollout.group_size", "algorithm.advantage"]),
        (["data.train_batch_groups=1", "rollout.group_size=2", "trainer.ranks=2"], ["trainer.ranks=2"]),
        (["agent.max_tokens=100000"], ["agent.max_tokens", "rollout.max_model_len"]),
        (["mode=colocated", "weight_sync.transport=gloo"], ["weight_sync.transport", "colocated"]),
        (["data.path=[{path: a.parquet}]"], ["data.make", "data.path"]),
        (["reward.functions=[{name: reward_model}]"], ["reward.functions", "reward.model.path"]),
        (["reward.functions=[{name: judge}]"], ["reward.functions", "reward.judge.url"]),
        (["reward.model.path=rm", "reward.model.url=localhost:8000"], ["reward.model.url", "http://"]),
        (["reward.judge={url: 'https://me:secret@x/v1', model: m}"], ["reward.judge.url", "password"]),
        (["reward.judge={url: 'https://x/v1?key=secret', model: m}"], ["reward.judge.url", "query"]),
        (["reward.judge={url: 'http://x', model: m, api_key_env: sk-secret}"], ["reward.judge.api_key_env", "NAME"]),
        (["reward.judge={url: 'http://x', model: m, api_key_env: secret0}"], ["reward.judge.api_key_env", "NAME"]),
        (["reward.judge={url: 'http://x', model: m, template: hello}"], ["reward.judge.template", "{response}"]),
        (["reward.judge={url: 'http://x', model: m, lowest: 10}"], ["reward.judge.highest", "reward.judge.lowest"]),
    ],
)
def test_impossible_combinations_name_their_keys(overrides: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("calculator", overrides)
    for part in named:
        assert part in str(caught.value)
    assert "secret" not in str(caught.value)


def test_publishing_as_rarely_as_the_slots_allow_is_accepted() -> None:
    assert load_config("calculator", ["queue.max_staleness=3", "weight_sync.every=4"]).weight_sync.every == 4


def test_all_broken_rules_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("calculator", ["rollout.engine=vllm", "queue.journal=redis"])
    assert "rollout.engine" in str(caught.value) and "queue.journal" in str(caught.value)

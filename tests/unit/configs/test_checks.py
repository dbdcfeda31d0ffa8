"""Configs that are refused, with the keys and the way out, and configs that are not."""

import math
from importlib.util import find_spec
from typing import Any, get_args

import pytest

from rl_async.configs.checks import gateway_problem, mcp, plays_itself, problems, unrewarded, without_effect
from rl_async.configs.derived import Transport, compute_type, is_baseline, samples_per_group
from rl_async.configs.engines import ENGINES, EngineKind, EngineTraits
from rl_async.configs.load import load_config
from rl_async.configs.schema.algorithm import ADVANTAGES, AlgorithmConfig, band, limits
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.rollout_server.pool import connect
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.transfer_queue.admission import QueueSettings

EASY = "{path: e.jsonl, schedule: [[5, 1], [0, 2]]}"
MEGATRON = ("trainer.backend=megatron",)
SERVED = "{url: http://127.0.0.1:1/v1, model: m}"


GAME = "agent.environment=x.py:Game"
F32 = "model.dtype=float32"
USER = ["agent.environment=simulated_user", "agent.user={system: hi}"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rollout.engine=sglang", "rollout.truncation={top_k: 5}"], ["rollout.truncation", "rollout.engine=sglang"]),
        (["rollout.truncation={top_k: 5}", "trainer.backend=megatron"], ["rollout.truncation", "trainer.backend"]),
        (["rollout.truncation={top_k: 5}", "algorithm.teacher={path: m}"], ["rollout.truncation", "algorithm.teacher"]),
        (
            ["rollout.truncation={top_k: 5}", "algorithm.kl={coef: 0.1, estimator: full}"],
            ["rollout.truncation", "algorithm.kl.estimator=full"],
        ),
        (
            ["rollout.truncation={top_k: 5}", "algorithm.advantage=prime", "critic={}"],
            ["rollout.truncation", "algorithm.advantage=prime"],
        ),
        (["rollout.engine=[embedded, vllm]"], ["rollout.engine", "rollout.engines=1"]),
        (["rollout.engine_args=[--block-size, '32']"], ["rollout.engine_args: --block-size", "--decode=eager"]),
        (
            ["rollout.engine=vllm", "rollout.engine_args=['--logprobs-mode=raw_logprobs']"],
            ["rollout.engine_args: --logprobs-mode=raw_logprobs"],
        ),
        (
            ["rollout.engine=vllm", "rollout.engine_args=[--max_model_len, '9']"],
            ["rollout.max_model_len"],
        ),
        (
            ["rollout.engine=sglang", "weight_sync.way=ipc"],
            ["rollout.engine=sglang", "weight_sync.way=ipc"],
        ),
        (["rollout.engine=sglang", "weight_sync.way=delta"], ["rollout.engine=sglang", "weight_sync.way=delta"]),
        (
            ["rollout.engine=sglang", "trainer.lora={}", "weight_sync.adapters=add"],
            ["rollout.engine=sglang", "weight_sync.adapters"],
        ),
        (["weight_sync.adapters=load"], ["weight_sync.adapters", "trainer.lora"]),
        (["trainer.vision_learning_rate=1e-6", "trainer.lora={}"], ["trainer.vision_learning_rate", "trainer.lora"]),
        (
            ["weight_sync.adapters=add", "weight_sync.way=delta", "trainer.lora={}"],
            ["weight_sync.way=delta", "weight_sync.adapters"],
        ),
        (
            ["rollout.engine=sglang", "rollout.engine_args=[--context_length, '9']"],
            ["rollout.max_model_len"],
        ),
        (
            ["rollout.engine=vllm", "rollout.engine_args=[-dp, '2']"],
            ["rollout.engine_args: -dp", "--data-parallel-size"],
        ),
        (
            ["rollout.engine=vllm", "rollout.engine_args=['--nnodes=2']"],
            ["rollout.engine_args: --nnodes", "rollout.engines"],
        ),
        (["rollout.engine=vllm", "rollout.engine_args=[--data-parallel-size]"], ["--data-parallel-size", "number"]),
        (
            ["rollout.engine=vllm", "rollout.engine_args=['--data-parallel-size=2']", "rollout.expert_parallel=3"],
            ["rollout.expert_parallel", "use 1 or 2"],
        ),
        (
            ["rollout.engine=[vllm, embedded]", "rollout.engines=2", "rollout.engine_args=['--data_parallel_size=2']"],
            ["--data-parallel-size", "one kind"],
        ),
        (["rollout.engine=sglang", "rollout.engine_args=['--tp=2']"], ["rollout.engine_args", "--tp=2"]),
        (
            ["rollout.engine=vllm", "rollout.engine_args=[--enable_expert_parallel]"],
            ["rollout.engine_args", "rollout.expert_parallel"],
        ),
        (["rollout.tensor_parallel=2"], ["rollout.tensor_parallel=2", "rollout.engine=vllm or sglang"]),
        (
            ["rollout.engine=vllm", "rollout.quantization=int8", F32],
            ["rollout.quantization=int8", "model.dtype=bfloat16"],
        ),
        (["rollout.engine=sglang", "rollout.quantization=fp8"], ["rollout.quantization", "embedded or vllm"]),
        (
            ["rollout.engine=vllm", "rollout.quantization=fp8", F32],
            ["rollout.quantization=fp8", "model.dtype=bfloat16"],
        ),
        (
            ["rollout.engine=vllm", "rollout.engine_args=['--quantization=mxfp4']"],
            ["rollout.engine_args", "use rollout.quantization"],
        ),
        (
            ["rollout.engine=vllm", "rollout.engine_args=['--quantization-config={}']"],
            ["rollout.engine_args", "use rollout.quantization"],
        ),
        (["trainer.lend_devices=true", "mode=colocated"], ["trainer.lend_devices", "--mode colocated"]),
        (["trainer.lend_devices=true", "weight_sync.way=nccl"], ["trainer.lend_devices", "weight_sync.way=nccl"]),
        (
            ["trainer.lend_devices=true", "rollout.engine=vllm", "rollout.tensor_parallel=2"],
            ["trainer.lend_devices", "trainer.ranks=1", "2 ranks"],
        ),
        (
            ["rollout.tensor_parallel=2", "rollout.engines=2", "rollout.engine=[vllm, embedded]"],
            ["rollout.tensor_parallel=2", "rollout.engine=embedded"],
        ),
        (
            ["rollout.engine=sglang", "rollout.pipeline_parallel=2"],
            ["rollout.pipeline_parallel=2", "rollout.engine=vllm"],
        ),
        (
            ["rollout.engine=vllm", "rollout.tensor_parallel=4", "rollout.expert_parallel=2"],
            ["rollout.expert_parallel=2", "rollout.tensor_parallel=4"],
        ),
        (
            ["rollout.engine=sglang", "rollout.tensor_parallel=4", "rollout.expert_parallel=3"],
            ["rollout.expert_parallel=3", "rollout.tensor_parallel=4"],
        ),
        (
            ["rollout.engines=2", "rollout.engine=[vllm, sglang]", "rollout.engine_args=['--foo']"],
            ["rollout.engine_args", "vLLM", "SGLang"],
        ),
        (["queue.sampling=freshest", "queue.max_staleness=1"], ["queue.sampling=freshest", "queue.max_staleness=1"]),
        (["queue.sampling=quota", "queue.max_staleness=2"], ["queue.sampling=quota", "data.path"]),
        (
            ["queue.sampling=priority", "queue.max_staleness=2", "weight_sync.every=3"],
            ["weight_sync.every=3", "2 steps", "queue.max_staleness=2"],
        ),
        (["queue.window=1", "data.train_batch_groups=8"], ["queue.window=1", "data.train_batch_groups=8"]),
        (
            ["queue.window=16", "data.train_batch_groups=8", "queue.max_staleness=1"],
            ["queue.window=16", "data.train_batch_groups=8"],
        ),
        ([f"data.path=[{EASY}, {{path: h.jsonl}}]"], ["data.path", "0-e", "[5, 0]"]),
        (["data.path=[{path: e.jsonl, schedule: [[0, 1]]}]"], ["data.path", "schedule of e"]),
        (
            ["data.path=[{path: e.jsonl, weight: 2, schedule: [[0, 1]]}, {path: h.jsonl}]"],
            ["data.path", "0-e", "weight=2"],
        ),
        (
            ["data.path=[{path: e.jsonl, schedule: [[0, 1], [9, 0]]}, {path: h.jsonl, schedule: [[9, 0], [12, 1]]}]"],
            ["data.path", "step 9"],
        ),
        (["queue.replicas=2"], ["queue.replicas=2", "queue.shards=0"]),
        (["queue.shards=1", "queue.replicas=2"], ["queue.replicas=2", "queue.shards=1"]),
        (["queue.shards=1", "queue.host=0.0.0.0"], ["queue.shards", "queue.host"]),
        (["queue.redis.url=localhost"], ["queue.redis.url", "redis://"]),
        (["queue.redis.url=redis://:secret@host:1/0"], ["queue.redis.url", "RL_ASYNC_REDIS_PASSWORD"]),
        (["queue.redis.url=redis://host:1/0?password=secret"], ["queue.redis.url", "RL_ASYNC_REDIS_PASSWORD"]),
        (["model.device=cpu", "weight_sync.way=nccl"], ["weight_sync.way=nccl", "model.device=cpu"]),
        (["mode=colocated", "weight_sync.way=nccl"], ["weight_sync.way=nccl", "colocated"]),
        (["weight_sync.folder=/shared"], ["weight_sync.folder", "weight_sync.way=disk"]),
        (["mode=colocated", "weight_sync.way=staged"], ["weight_sync.way=staged", "colocated"]),
        (["mode=colocated", "rollout.engines=2", "weight_sync.way=waves"], ["weight_sync.way=waves", "colocated"]),
        (["weight_sync.way=waves"], ["weight_sync.way=waves", "rollout.engines=1"]),
        (["weight_sync.way=[gloo,disk]"], ["weight_sync.way", "gloo", "disk"]),
        (["weight_sync.way=[auto,gloo]"], ["weight_sync.way", "auto", "gloo"]),
        (["weight_sync.way=[]"], ["weight_sync.way", "list"]),
        (["weight_sync.way=[auto]"], ["weight_sync.way", "list"]),
        (["weight_sync.way=[gloo,gloo]"], ["weight_sync.way", "list"]),
        (["trainer.tensor_parallel=2"], ["trainer.tensor_parallel=2", "trainer.backend=megatron"]),
        (["trainer.expert_parallel=2"], ["trainer.expert_parallel=2", "trainer.backend=megatron"]),
        ([*MEGATRON, "trainer.tensor_parallel=2"], ["trainer.ranks=1", "trainer.tensor_parallel=2"]),
        (
            [*MEGATRON, "trainer.ranks=6", "trainer.tensor_parallel=2", "trainer.pipeline_parallel=2"],
            ["trainer.ranks=6", "multiple of 4"],
        ),
        (
            [*MEGATRON, "trainer.ranks=4", "trainer.pipeline_parallel=2", "trainer.expert_parallel=4"],
            ["trainer.expert_parallel=4", "trainer.ranks=4"],
        ),
        (
            [*MEGATRON, "trainer.ranks=2", "trainer.pipeline_parallel=2", "trainer.virtual_pipeline=2"],
            ["trainer.virtual_pipeline=2", "trainer.pipeline_parallel"],
        ),
        (["trainer.ranks=3", "trainer.replicas=2"], ["trainer.replicas=2", "trainer.ranks=3"]),
        ([*MEGATRON, "trainer.ranks=2", "trainer.replicas=2"], ["trainer.replicas", "trainer.backend=fsdp2"]),
        ([*MEGATRON, "trainer.activation_checkpointing=true"], ["trainer.activation_checkpointing", "megatron"]),
        ([*MEGATRON, "trainer.optimizer=muon"], ["trainer.optimizer", "trainer.backend=fsdp2"]),
        (["trainer.optimizer=muon", "trainer.lora={}"], ["trainer.optimizer=muon", "trainer.lora"]),
        (
            ["trainer.optimizer=muon", "trainer.cpu_offload=true", "model.device=gpu"],
            ["trainer.optimizer=muon", "trainer.cpu_offload"],
        ),
        (
            ["trainer.optimizer=adamw_8bit", "trainer.cpu_offload=true", "model.device=gpu"],
            ["trainer.optimizer=adamw_8bit", "trainer.cpu_offload"],
        ),
        (["trainer.cpu_offload=true"], ["trainer.cpu_offload", "model.device=auto"]),
        (["trainer.cpu_offload=true", "model.device=cpu"], ["trainer.cpu_offload", "device=cpu"]),
        (["trainer.ranks=3", "trainer.sequence_parallel=2"], ["trainer.sequence_parallel=2", "trainer.ranks=3"]),
        (["trainer.sequence_parallel=2"], ["trainer.sequence_parallel=2", "trainer.ranks=1"]),
        (
            [*MEGATRON, "trainer.ranks=2", "trainer.tensor_parallel=2", "trainer.sequence_parallel=2"],
            ["trainer.sequence_parallel=2", "trainer.tensor_parallel=2", "trainer.ranks=2"],
        ),
        (["trainer.kernels=liger", "model.device=cpu"], ["trainer.kernels=liger", "model.device=cpu"]),
        (
            ["model.override={attention: flash_attn}", "model.device=cpu"],
            ["model.override.attention=flash_attn", "model.device=cpu"],
        ),
        ([*MEGATRON, "trainer.kernels=liger"], ["trainer.kernels", "trainer.backend=fsdp2"]),
        (
            [*MEGATRON, "algorithm.kl.coef=0.1", "algorithm.kl.estimator=full"],
            ["algorithm.kl.estimator=full", "trainer.backend=megatron"],
        ),
        (
            [*MEGATRON, "algorithm.teacher={path: m, divergence: jsd}"],
            ["algorithm.teacher.divergence=jsd", "trainer.backend=megatron"],
        ),
        (["algorithm.teacher={}"], ["algorithm.teacher.path", "algorithm.teacher.endpoint"]),
        (
            [f"algorithm.teacher={{path: m, endpoint: {SERVED}}}"],
            ["algorithm.teacher.path", "algorithm.teacher.endpoint"],
        ),
        (["algorithm.teacher={path: m, beta: 0.3}"], ["algorithm.teacher.beta", "jsd"]),
        (["algorithm.teacher={by_source: {math: {}}}"], ["algorithm.teacher.by_source.math.path"]),
        (
            [f"algorithm.teacher={{by_source: {{math: {{path: m, endpoint: {SERVED}}}}}}}"],
            ["algorithm.teacher.by_source.math.path", "algorithm.teacher.by_source.math.endpoint"],
        ),
        (
            [f"algorithm.teacher={{by_source: {{math: {{endpoint: {SERVED}}}}}}}", "rollout.temperature=0.5"],
            ["algorithm.teacher.by_source.math.endpoint", "rollout.temperature=0.5"],
        ),
        (
            [
                "reward.functions=[{name: judge}]",
                "reward.judge={url: u, model: m, compare: true, template: '{response}'}",
            ],
            ["reward.judge.template", "{other}"],
        ),
        (
            [
                "reward.functions=[{name: judge, extract: [boxed]}]",
                "reward.judge={url: 'http://h', model: m, compare: true}",
            ],
            ["reward.functions", "judge"],
        ),
        (["algorithm.teacher={path: m, top_k: 8}"], ["algorithm.teacher.top_k", "sampled"]),
        (["algorithm.teacher={hint: think}"], ["algorithm.teacher.hint", "{ground_truth}"]),
        (
            [f"algorithm.teacher={{endpoint: {SERVED}, divergence: reverse}}"],
            ["algorithm.teacher.divergence=reverse", "algorithm.teacher.top_k"],
        ),
        (
            [f"algorithm.teacher={{endpoint: {SERVED}}}", "rollout.temperature=0.5"],
            ["algorithm.teacher.endpoint", "rollout.temperature=0.5"],
        ),
        (
            [f"algorithm.teacher={{endpoint: {SERVED}}}", "trainer.ranks=2", "trainer.sequence_parallel=2"],
            ["algorithm.teacher.endpoint", "trainer.sequence_parallel"],
        ),
        (
            ["algorithm.teacher={path: m}", "algorithm.advantage=gae", "critic={}"],
            ["algorithm.teacher.rewards=false", "critic"],
        ),
        (
            ["algorithm.teacher={path: m}", "algorithm.shaping.dynamic_sampling=true"],
            ["algorithm.shaping.dynamic_sampling", "algorithm.teacher.rewards"],
        ),
        (["algorithm.teacher={path: m, rewards: true}", "rollout.group_size=1"], ["rollout.group_size"]),
        (["queue.max_staleness=1", "weight_sync.every=3"], ["weight_sync.every=3", "queue.max_staleness"]),
        (["rollout.group_size=1"], ["rollout.group_size", "algorithm.advantage"]),
        (["algorithm.advantage=rloo", "rollout.group_size=1"], ["rollout.group_size", "algorithm.advantage=rloo"]),
        (
            ["algorithm.advantage=gdpo", "algorithm.kl.coef=0.1", "algorithm.kl.place=reward"],
            ["algorithm.advantage=gdpo", "algorithm.kl.place"],
        ),
        (
            ["algorithm.advantage=optimal_token_baseline", "algorithm.correction=bypass_ppo_clip"],
            ["algorithm.advantage=optimal_token_baseline", "algorithm.correction=bypass_ppo_clip", "decoupled"],
        ),
        (["data.curriculum={}"], ["data.curriculum.easy"]),
        (["data.curriculum={again: 0.5, by_length: true}"], ["data.curriculum.easy"]),
        (["data.curriculum={easy: 0.5, hard: 0.5}"], ["data.curriculum.hard=0.5", "data.curriculum.easy=0.5"]),
        (["algorithm.advantage=prime"], ["algorithm.advantage=prime", "critic"]),
        (["algorithm.advantage=prime", "critic.clip=0.1"], ["critic.clip", "algorithm.advantage=prime"]),
        (["algorithm.advantage=prime", "critic={}", "trainer.backend=megatron"], ["trainer.backend=fsdp2"]),
        (["algorithm.advantage=gae"], ["algorithm.advantage=gae", "critic"]),
        (["critic={}"], ["algorithm.advantage=grpo", "algorithm.advantage=gae", "critic=null"]),
        (["algorithm.advantage=gae", "critic={shared: true, path: m}"], ["critic.path", "critic.shared"]),
        (["algorithm.advantage=gae", "critic={shared: true, warmup_steps: 1}"], ["critic.warmup_steps"]),
        (["algorithm.advantage=gae", "critic.warmup_steps=50"], ["critic.warmup_steps=50", "trainer.steps=50"]),
        (["rollout.group_size=1", "algorithm.shaping.dynamic_sampling=true"], ["shaping.dynamic_sampling"]),
        (
            ["algorithm.shaping.overlong.max_tokens=32", "algorithm.shaping.overlong.cache_tokens=33"],
            ["shaping.overlong.cache_tokens=33", "shaping.overlong.max_tokens=32"],
        ),
        (
            ["algorithm.correction=my.py:weigh", "algorithm.correction_options.cap=2.0"],
            ["algorithm.correction_options", "my.py:weigh"],
        ),
        (["data.train_batch_groups=1", "rollout.group_size=2", "trainer.ranks=2"], ["trainer.ranks=2"]),
        (["agent.max_tokens=100000"], ["agent.max_tokens", "rollout.max_model_len"]),
        (["mode=colocated", "weight_sync.way=nearest"], ["weight_sync.way", "colocated"]),
        (["data.path=[{path: a.parquet}]"], ["data.make", "data.path"]),
        (["reward.functions=[{name: reward_model}]"], ["reward.functions", "reward.model.path"]),
        (["agent.opponents={a: {}}"], ["agent.opponents", "agent.environment"]),
        ([GAME, "agent.opponents={a: {url: http://x/v1}}"], ["agent.opponents.a.url", "agent.opponents.a.model"]),
        ([GAME, "agent.opponents={a: {url: ftp://x, model: m}}"], ["agent.opponents.a.url", "http://"]),
        ([GAME, "agent.opponents={a: {api_key_env: sk-secret}}"], ["agent.opponents.a.api_key_env"]),
        (["agent.environment=simulated_user"], ["agent.user"]),
        (["agent.user={system: hi}"], ["agent.environment=simulated_user"]),
        ([*USER, "agent.user.url=http://x/v1"], ["agent.user.url", "agent.user.model"]),
        ([*USER, "agent.user.url=ftp://x", "agent.user.model=m"], ["agent.user.url", "http://"]),
        ([*USER, "agent.user.api_key_env=sk-secret"], ["agent.user.api_key_env"]),
        ([*USER, "agent.user.lowest=10"], ["agent.user.highest", "agent.user.lowest"]),
        (["reward.functions=[{name: environment}]"], ["reward.functions", "agent.environment"]),
        (["sandbox.kind=container"], ["sandbox.image", "sandbox.kind=container"]),
        (["sandbox.image=x"], ["sandbox.image", "sandbox.kind=container"]),
        (
            ["agent.environment=harbor:x", "sandbox.kind=container", "sandbox.image=x"],
            ["agent.environment=harbor:x", "sandbox.kind=container"],
        ),
        (["agent.environment_hosts={}"], ["agent.environment_hosts", "agent.environment"]),
        ([*USER, "agent.environment_hosts={}"], ["agent.environment_hosts", "agent.environment=simulated_user"]),
        (["reward.functions=[{name: judge}]"], ["reward.functions", "reward.judge.url"]),
        (["reward.model.path=rm", "reward.model.url=localhost:8000"], ["reward.model.url", "http://"]),
        (["reward.judge={url: 'https://me:secret@x/v1', model: m}"], ["reward.judge.url"]),
        (["reward.judge={url: 'https://x/v1?key=secret', model: m}"], ["reward.judge.url"]),
        (["reward.judge={url: 'http://x', model: m, api_key_env: sk-secret}"], ["reward.judge.api_key_env"]),
        (["reward.judge={url: 'http://x', model: m, api_key_env: secret0}"], ["reward.judge.api_key_env"]),
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


GATEWAY = "agent.gateway={}"


def test_a_pattern_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"agent\.gateway\.untrained"):
        load_config("calculator", ["agent.gateway.untrained=['(']"])


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algorithm.advantage=remax"], "algorithm.advantage=remax"),
        (["algorithm.advantage=grpo_passk"], "algorithm.advantage=grpo_passk"),
        (["algorithm.advantage=tir_optimal_token_baseline"], "algorithm.advantage=tir_optimal_token_baseline"),
        (["algorithm.shaping.reward_scale=batch_std"], "algorithm.shaping.reward_scale"),
        (["algorithm.shaping.resample=pow"], "algorithm.shaping.resample"),
        (["algorithm.shaping.overlong_filter=true"], "algorithm.shaping.overlong_filter"),
    ],
)
def test_what_takes_a_row_for_an_episode_does_not_go_with_several(overrides: list[str], named: str) -> None:
    for several in (GATEWAY, "agent.past_reasoning=strip", "agent.past_reasoning=split"):
        with pytest.raises(ConfigError, match=named):
            load_config("calculator", [*overrides, several])
    without = load_config("calculator", overrides)
    assert without.agent.gateway is None and named in str(gateway_problem(without))
    assert gateway_problem(load_config("calculator", [GATEWAY])) is None


def test_what_only_agent_workers_do_is_not_ignored_in_silence() -> None:
    for mistake in ("agent.environment=shop", "agent.loop=mine.py:loop"):
        with pytest.raises(ConfigError, match=mistake.partition("=")[0]):
            load_config("calculator", [GATEWAY, mistake])
        assert without_effect(load_config("calculator", [mistake])) == []
    config = load_config(
        "calculator",
        [GATEWAY, "agent.loop=single_turn", "agent.max_turns=4", "agent.workers=3", "agent.environment_hosts={}"],
    )
    assert without_effect(config) == ["agent.environment_hosts", "agent.workers"]


def test_an_environment_in_a_python_of_its_own_plays_through_a_gateway() -> None:
    own, verifiers = "agent.environment_hosts={python: there/python}", "agent.environment=verifiers:sums"
    config = load_config("calculator", [GATEWAY, own, verifiers, "agent.concurrency=8", "agent.workers=3"])
    assert plays_itself(config) and without_effect(config) == ["agent.loop", "agent.max_turns", "agent.workers"]
    assert not plays_itself(load_config("calculator", [GATEWAY]))
    for given in ([own, verifiers], [GATEWAY, own, "agent.environment=shop"], [GATEWAY, own]):
        with pytest.raises(ConfigError, match=r"agent\.environment_hosts\.python"):
            load_config("calculator", given)


def test_ranks_that_share_rows_get_as_many_rows_as_one() -> None:
    few = ["data.train_batch_groups=1", "rollout.group_size=2", "trainer.ranks=2"]
    assert load_config("calculator", [*few, "trainer.sequence_parallel=2"]).trainer.sequence_parallel == 2


def test_users_own_functions_are_looked_for_only_where_torch_is() -> None:
    own = [f"algorithm.{key}=my.py:mine" for key in ("advantage", "loss", "correction")]
    assert load_config("calculator", own).algorithm.loss == "my.py:mine"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["queue.host=localhost"], "queue.host=localhost"),
        (["queue.port=5555"], "queue.port"),
    ],
)
def test_access_that_cannot_be_restricted_as_configured_is_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config("calculator", overrides)


def test_publishing_as_rarely_as_the_slots_allow_is_accepted() -> None:
    assert load_config("calculator", ["queue.max_staleness=3", "weight_sync.every=4"]).weight_sync.every == 4


@pytest.mark.parametrize("numbers", ["int8", "fp8"])
def test_engines_of_several_ranks_can_hold_weights_in_8_bits(numbers: str) -> None:
    ranks = ["rollout.engine=vllm", "rollout.tensor_parallel=2", "rollout.pipeline_parallel=2"]
    load_config("calculator", [*ranks, f"rollout.quantization={numbers}", "model.dtype=bfloat16"])


def test_a_critic_needs_no_group_to_compare_with() -> None:
    config = load_config("calculator", ["algorithm.advantage=gae", "critic={}", "rollout.group_size=1"])
    assert config.critic is not None and not config.critic.shared


def test_a_server_teaches_by_its_likeliest_tokens_and_the_policy_itself_by_a_hint() -> None:
    load_config("calculator", [f"algorithm.teacher={{endpoint: {SERVED}, divergence: forward, top_k: 20}}"])
    config = load_config("calculator", ["algorithm.teacher.hint='{ground_truth}'"])
    assert config.algorithm.teacher is not None and list(config.algorithm.teacher.models) == [""]


def test_a_teacher_alone_takes_a_group_of_one() -> None:
    config = load_config("calculator", ["algorithm.teacher.path=m", "rollout.group_size=1"])
    assert not config.algorithm.uses_rewards


@pytest.mark.parametrize("name", ["remax", "reinforce_plus_plus"])
def test_estimators_without_groups_take_a_group_of_one(name: str) -> None:
    assert load_config("calculator", [f"algorithm.advantage={name}", "rollout.group_size=1"]).rollout.group_size == 1


@pytest.mark.parametrize(
    "source",
    [
        *(GAME, GATEWAY, "rollout.replay=runs/before", "data.trust_code=true"),
        *("algorithm.kl.coef=0.1", "algorithm.shaping.overlong.max_tokens=64", "algorithm.teacher.path=m"),
        *("agent.loop=x.py:loop", "agent.tools=[x.py:tool]", "algorithm.advantage=x.py:own", "algorithm.loss=x.py:own"),
    ],
)
def test_what_may_give_rewards_needs_no_reward_functions(source: str) -> None:
    assert unrewarded(load_config("calculator", ["reward.functions=[]"])) is not None
    assert unrewarded(load_config("calculator", ["reward.functions=[]", source])) is None


def test_all_broken_rules_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("calculator", ["rollout.engine=[vllm, sglang]", "queue.redis.url=x"])
    assert "rollout.engine" in str(caught.value) and "queue.redis.url" in str(caught.value)


BASE: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}}


def config(*servers: dict[str, Any], **agent: Any) -> RunConfig:
    return load_config({**BASE, "agent": {"mcp": list(servers), **agent}})


def test_commands_and_urls_are_accepted() -> None:
    made = config(
        {"command": ["npx", "-y", "server"], "env": {"A": "b"}, "env_from": ["KEY"]},
        {"command": "uvx 'a b'", "allow": ["x"], "scope": "worker"},
        {"url": "https://example.com/mcp", "headers_from": {"Authorization": "TOKEN"}},
    )
    assert mcp(made) is None


@pytest.mark.parametrize(
    "server",
    [
        {},
        {"command": "x", "url": "http://h"},
        {"command": "x 'y"},
        {"command": [""]},
        {"command": "  "},
        {"url": "ftp://h"},
        {"url": "127.0.0.1:80"},
        {"url": "http://user:secret@h/mcp"},
        {"url": "http://h", "env": {"A": "b"}},
        {"command": "x", "headers_from": {"A": "B"}},
        {"command": "x", "env_from": ["sk-123"]},
        {"url": "http://h", "headers_from": {"Authorization": "Bearer abc"}},
        {"command": "x", "name": "a b"},
    ],
)
def test_what_cannot_work_is_refused_with_its_key(server: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"agent\.mcp\[0\]"):
        config(server)


def test_names_tell_servers_apart() -> None:
    with pytest.raises(ConfigError, match=r"agent\.mcp"):
        config({"command": "x", "name": "a"}, {"command": "y", "name": "a"})


def test_programs_behind_a_gateway_have_servers_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"agent\.mcp"):
        config({"command": "x"}, gateway={})


OPTIONS = "algorithm.correction_options"
REFUSED = [
    (["algorithm.loss=decoupled_ppo"], ["algorithm.loss=decoupled_ppo", "algorithm.correction=decoupled_token_is"]),
    (["algorithm.loss=m2po", "algorithm.correction=bypass_ppo_clip"], ["algorithm.loss=m2po", "bypass_ppo_clip"]),
    (
        ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=full", "algorithm.kl.place=reward"],
        ["algorithm.kl.estimator=full", "algorithm.kl.place=loss"],
    ),
    (["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k3+", "algorithm.kl.place=reward"], ["estimator=k3+", "reward"]),
    (["algorithm.loss=decoupled_ppo", "algorithm.correction=bypass_ppo_clip"], ["algorithm.loss=decoupled_ppo", "mu"]),
    (
        ["algorithm.advantage=gdpo", "algorithm.kl.coef=0.1", "algorithm.kl.place=reward"],
        ["algorithm.advantage=gdpo", "algorithm.kl.place=reward"],
    ),
    (
        ["algorithm.kl.coef=0.1", "algorithm.kl.adaptive.horizon=76"],
        ["algorithm.kl.adaptive.horizon=76", "384", "77"],
    ),
    (
        ["algorithm.advantage=gdpo", "algorithm.shaping.reward_clip=1"],
        ["algorithm.advantage=gdpo", "algorithm.shaping.reward_clip"],
    ),
    (
        ["algorithm.advantage=gdpo", "algorithm.shaping.reward_scale=batch_std"],
        ["algorithm.advantage=gdpo", "algorithm.shaping.reward_scale"],
    ),
    (
        ["algorithm.advantage=gdpo", "algorithm.shaping.overlong.max_tokens=9"],
        ["algorithm.advantage=gdpo", "algorithm.shaping.overlong"],
    ),
    (
        ["algorithm.advantage=gdpo", "algorithm.advantage_options.gdpo_weights={typo: 2}"],
        ["algorithm.advantage_options.gdpo_weights", "typo"],
    ),
    (
        ["algorithm.advantage=optimal_token_baseline", "algorithm.shaping.overlong_filter=true"],
        ["algorithm.advantage=optimal_token_baseline", "algorithm.shaping.overlong_filter"],
    ),
    (["algorithm.kl.adaptive={}"], ["algorithm.kl.adaptive", "algorithm.kl.coef=0"]),
    (["algorithm.kl.reference_path=x"], ["algorithm.kl.reference_path", "algorithm.kl.coef"]),
    (["algorithm.correction_options.max_age=1"], ["algorithm.correction_options.max_age=1", "queue.max_staleness=1"]),
    (
        ["algorithm.loss=clip_cov", "algorithm.loss_options.clip_cov_low=5"],
        ["clip_cov_low=5", "clip_cov_high=5"],
    ),
    (
        ["algorithm.loss=sapo", "algorithm.loss_options.clip_dual=3"],
        ["algorithm.loss_options.clip_dual", "algorithm.loss=sapo", "sapo_tau_positive"],
    ),
    (["algorithm.advantage_options.lam=0.9"], ["algorithm.advantage_options.lam", "algorithm.advantage=grpo"]),
    (["algorithm.correction_options.age_weights=[0, 1]"], ["algorithm.correction_options.age_weights"]),
    (
        ["algorithm.correction=decoupled_token_icepop", "algorithm.correction_options.band=2_3"],
        ["algorithm.correction_options.band=2_3"],
    ),
    (
        ["algorithm.correction_options.reject={seq_mean_k1: 1.5_3}"],
        ["algorithm.correction_options.reject", "seq_mean_k1: 1.5_3"],
    ),
    (
        ["algorithm.shaping.dynamic_sampling=true", "algorithm.advantage=reinforce_plus_plus"],
        ["dynamic_sampling", "algorithm.advantage=reinforce_plus_plus"],
    ),
    (
        ["algorithm.loss=vespo", "algorithm.correction=decoupled_seq_is"],
        ["algorithm.loss=vespo", "decoupled_seq_is", "decoupled_token_is"],
    ),
    (
        ["algorithm.advantage=gae", "critic={}", "algorithm.advantage_options={lam: 0.9, lam_alpha: 0.05}"],
        ["algorithm.advantage_options.lam_alpha", "lam=0.9"],
    ),
    (["algorithm.advantage=dpo", "algorithm.kl.estimator=full"], ["algorithm.advantage=dpo", "estimator=full"]),
    (["algorithm.norm_length=64"], ["algorithm.norm_length", "seq-mean-token-sum-norm"]),
    (["algorithm.kl.unbiased=true"], ["algorithm.kl.unbiased", "algorithm.kl.coef=0"]),
    (
        ["algorithm.kl.coef=0.1", "algorithm.kl.unbiased=true", "algorithm.kl.estimator=k2"],
        ["algorithm.kl.unbiased", "k2"],
    ),
    (["algorithm.loss=clip_kov"], ["clip_kov", "clip_cov"]),
    (["algorithm.correction=decoupled_token"], ["algorithm.correction", "decoupled_token_i"]),
    ([f"{OPTIONS}.band=2_1"], [f"{OPTIONS}.band", "'2_1'"]),
    ([f"{OPTIONS}.band=0.5_2.0", f"{OPTIONS}.cap=2"], [OPTIONS, "cap and band"]),
    (["algorithm.correction=disabled", f"{OPTIONS}.cap=2"], [f"{OPTIONS}.cap", f"{OPTIONS}.weight"]),
    (["algorithm.correction=decoupled_geo_rs", f"{OPTIONS}.normalise=true"], [f"{OPTIONS}.normalise"]),
    ([f"{OPTIONS}.reject={{seq_min_k1: 0.9_1.1}}"], ["reject.seq_min_k1", "seq_mean_k1"]),
    ([f"{OPTIONS}.reject={{token_k1: 0.5}}"], ["reject.token_k1", "c > 1"]),
    ([f"{OPTIONS}.reject={{token_k3: 0.1_0.2}}"], ["reject.token_k3", "> 0"]),
    ([f"{OPTIONS}.age_weights=[1, -1]"], ["age_weights"]),
    (
        ["algorithm.correction=bypass_pg_is", f"{OPTIONS}.normalise=true"],
        [f"{OPTIONS}.normalise", "algorithm.correction=bypass_pg_is", "whole batch"],
    ),
    (
        ["algorithm.correction=bypass_ppo_clip", f"{OPTIONS}.weight=token"],
        [f"{OPTIONS}.weight", "algorithm.loss=ppo", "twice"],
    ),
]
ACCEPTED = [
    ["algorithm.advantage=remax", "rollout.group_size=1", "algorithm.shaping.dynamic_sampling=true"],
    ["algorithm.advantage=mine.py:advantage", "critic={}"],
    ["algorithm.correction_options.reject={token_k1: 2}"],
    ["algorithm.correction_options.max_age=0"],
    ["algorithm.loss=decoupled_ppo", "algorithm.correction=disabled"],
    ["algorithm.loss=m2po"],
    ["algorithm.advantage=dpo", "algorithm.loss=reinforce", "algorithm.kl.reference_path=x"],
    ["algorithm.loss=vespo", "algorithm.correction=bypass_ppo_clip"],
    ["algorithm.loss=gspo", "algorithm.aggregation=seq-mean-token-mean"],
    ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=full"],
    ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k3", "algorithm.kl.place=reward"],
    ["algorithm.kl.coef=0.1", "algorithm.kl.adaptive.horizon=77"],
]


@pytest.mark.parametrize(("overrides", "named"), REFUSED)
def test_losses_that_cannot_work_name_their_keys(overrides: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("calculator", overrides)
    for part in named:
        assert part in str(caught.value)


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_the_ways_out_are_accepted(overrides: list[str]) -> None:
    load_config("calculator", overrides)


# The traits of the kinds of engines are complete, and consistent with the registries of their code.


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
        assert bool(traits.refusal("--block-size=32")) == bool(traits.words)


def test_transports_are_those_of_the_configs() -> None:
    for traits in ENGINES.values():
        assert set(traits.transports) <= set(get_args(Transport))


# Values that follow from several keys.


def test_a_role_refuses_a_type_that_is_not_settled() -> None:
    assert compute_type(ModelConfig(path="m", dtype="bfloat16")) == "bfloat16"
    with pytest.raises(ConfigError, match=r"model\.dtype=auto"):
        compute_type(ModelConfig(path="m"))


def derived_config(advantage: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d"),
        rollout=RolloutConfig(group_size=5),
        algorithm=AlgorithmConfig(advantage=advantage),
    )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_remax_alone_asks_the_queue_for_one_more(name: str) -> None:
    expected = 6 if name == "remax" else 5
    assert samples_per_group(derived_config(name)) == QueueSettings.of(derived_config(name)).group_size == expected


def test_the_last_sample_of_a_training_group_is_the_greedy_one() -> None:
    remax = derived_config("remax")
    assert [is_baseline(remax, "train", sample) for sample in range(6)] == [False] * 5 + [True]
    assert not is_baseline(remax, "eval", 5)


# What can be asked of a correction: wrong values and combinations are refused, naming the key.


def test_a_loss_of_the_users_own_is_not_silently_replaced() -> None:
    assert load_config("calculator", ["algorithm.correction=bypass_pg_is", "algorithm.loss=reinforce"])
    assert load_config("calculator", ["algorithm.correction=bypass_pg_is"])
    config = RunConfig(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d"),
        algorithm=AlgorithmConfig(correction="bypass_pg_is", loss="gspo"),
    )
    assert any("algorithm.loss=gspo asks for another" in problem for problem in problems(config))


def test_yaml_does_not_take_bands_for_numbers() -> None:
    config = load_config("calculator", [f"{OPTIONS}.reject={{token_k1: 0_5, seq_sum_k1: 0.5_3}}"])
    assert config.algorithm.correction_options.reject == {"token_k1": "0_5", "seq_sum_k1": "0.5_3"}
    assert load_config("calculator", [f"{OPTIONS}.band=0.5_5"]).algorithm.correction_options.band == "0.5_5"


def test_bands_and_limits() -> None:
    assert band("0.6_1.4") == (0.6, 1.4) and band("0_5") == (0.0, 5.0)
    assert limits("seq_mean_k1", 2) == (0.5, 2.0) and limits("seq_mean_k3", "0.01") == (-math.inf, 0.01)
    for text in ("1", "0.5-2", "-1_2", "a_b", "nan_1", "1_nan", "0_inf"):
        with pytest.raises(ConfigError, match="low_high"):
            band(text)

"""Which processes inherit which secrets of the launcher's environment."""

from pathlib import Path

from rl_async.launcher.plan.planning import plan
from rl_async.process.http_auth import TOKEN_FILE
from rl_async.tracing import VARIABLES
from tests.support.configs import float32_config

JUDGED = [
    *("reward.functions=[{name: judge}, {name: reward_model}]", "reward.model={path: rm}", "queue.shards=1"),
    "reward.judge={url: 'http://127.0.0.1:1/v1', model: m, api_key_env: JUDGE_KEY}",
]


def test_a_secret_is_hidden_from_the_roles_that_do_not_use_it() -> None:
    planned = plan(float32_config("calculator", JUDGED), Path("runs/mine"))
    assert planned.prepare is not None
    users: dict[str, set[str]] = {name: set() for name in ("JUDGE_KEY", "RL_ASYNC_REDIS_PASSWORD", "WANDB_API_KEY")}
    for spec in (planned.prepare, *planned.processes):
        for name, roles in users.items():
            assert spec.environment({}).get(name, "hidden") in ("", "hidden")
            if name not in spec.env:
                roles.add(spec.role)
    assert users == {"JUDGE_KEY": {"worker"}, "RL_ASYNC_REDIS_PASSWORD": {"queue"}, "WANDB_API_KEY": {"trainer"}}


def test_a_server_without_the_run_folder_finds_its_token_by_a_path() -> None:
    config = float32_config("calculator", [*JUDGED, "rollout.engine=vllm", "rollout.python=python"])
    planned = plan(config, Path("runs/mine"))
    with_path = {spec.name for spec in planned.processes if spec.env.get(TOKEN_FILE) == "runs/mine/keys/engines.token"}
    assert with_path == {"engine-0", "reward-model"}


def test_a_server_without_the_run_folder_is_told_where_its_spans_go() -> None:
    engine = [*JUDGED, "rollout.engine=vllm", "rollout.python=python"]
    for more, told in (([], set()), (["tracking.otlp_endpoint=http://c:4318"], {"engine-0", "reward-model"})):
        planned = plan(float32_config("calculator", [*engine, *more]), Path("runs/mine"))
        found = {spec.name: spec.env[VARIABLES[0]] for spec in planned.processes if VARIABLES[0] in spec.env}
        assert found == dict.fromkeys(told, "http://c:4318")

"""Which processes inherit which secrets of the launcher's environment."""

from pathlib import Path

from rl_async.launcher.plan.planning import plan
from rl_async.process.http_auth import AUDIENCES, HOSTS, TOKEN_FILE, make_tokens, run_token, token_file
from rl_async.tracing import VARIABLES
from tests.support.configs import float32_config

JUDGED = [
    *("reward.functions=[{name: judge}, {name: reward_model}]", "reward.model={path: rm}", "queue.shards=1"),
    "reward.judge={url: 'http://127.0.0.1:1/v1', model: m, api_key_env: JUDGE_KEY}",
]


def test_a_secret_is_hidden_from_the_roles_that_do_not_use_it() -> None:
    mcp = (
        "agent.mcp=[{command: [serve], env_from: [TOOL_KEY]}, "
        "{url: 'https://tools.example', headers_from: {Authorization: HEADER_KEY}}]"
    )
    planned = plan(float32_config("calculator", [*JUDGED, mcp]), Path("runs/mine"))
    assert planned.prepare is not None
    used_by = {
        **{name: {"worker"} for name in ("JUDGE_KEY", "TOOL_KEY", "HEADER_KEY")},
        "RL_ASYNC_REDIS_PASSWORD": {"queue"},
        **{name: {"trainer"} for name in ("WANDB_API_KEY", "SWANLAB_API_KEY")},
    }
    users: dict[str, set[str]] = {name: set() for name in used_by}
    for spec in (planned.prepare, *planned.processes):
        for name, roles in users.items():
            assert spec.environment({}).get(name, "hidden") in ("", "hidden")
            if name not in spec.env:
                roles.add(spec.role)
    assert users == used_by


def test_a_server_without_the_run_folder_finds_its_token_by_a_path() -> None:
    config = float32_config("calculator", [*JUDGED, "rollout.engine=vllm", "rollout.python=python"])
    planned = plan(config, Path("runs/mine"))
    with_path = {spec.name for spec in planned.processes if spec.env.get(TOKEN_FILE) == "runs/mine/keys/engines.token"}
    assert with_path == {"engine-0", "reward-model"}


def test_a_server_without_the_run_folder_is_told_its_other_names() -> None:
    engine = [*JUDGED, "rollout.engine=vllm", "rollout.python=python", "launcher.http_hosts=[gpu-1, gpu-1.lan]"]
    planned = plan(float32_config("calculator", engine), Path("runs/mine"))
    found = {spec.name: spec.env[HOSTS] for spec in planned.processes if HOSTS in spec.env}
    assert found == dict.fromkeys(("engine-0", "reward-model"), "gpu-1,gpu-1.lan")


def test_no_token_is_in_a_plan_which_dry_runs_print_and_processes_json_records(tmp_path: Path) -> None:
    make_tokens(tmp_path / "keys")
    planned = repr(plan(float32_config("calculator", [*JUDGED, "rollout.engine=vllm", "rollout.python=py"]), tmp_path))
    assert str(token_file(tmp_path, "engines")) in planned
    assert not any(run_token(tmp_path, audience) in planned for audience in AUDIENCES)


def test_a_server_without_the_run_folder_is_told_where_its_spans_go() -> None:
    engine = [*JUDGED, "rollout.engine=vllm", "rollout.python=python"]
    for more, told in (([], set()), (["tracking.otlp_endpoint=http://c:4318"], {"engine-0", "reward-model"})):
        planned = plan(float32_config("calculator", [*engine, *more]), Path("runs/mine"))
        found = {spec.name: spec.env[VARIABLES[0]] for spec in planned.processes if VARIABLES[0] in spec.env}
        assert found == dict.fromkeys(told, "http://c:4318")

"""The plan: processes, devices, ports, and which process gets which secret."""

import json
import os
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.configs.engines import SGLANG, VLLM
from rl_async.configs.load import load_config, preset_names
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError, UserError
from rl_async.launcher.plan import artifacts
from rl_async.launcher.plan.artifacts import SFT_FILE, needs_data, needs_model, needs_preparation, origin_of
from rl_async.launcher.plan.memory import ModelSize, model_size
from rl_async.launcher.plan.planning import HOST, Devices, PortWish, assign_devices, assign_ports, endpoints, fill, plan
from rl_async.launcher.plan.trials import write_tool_schemas
from rl_async.launcher.ray_keeper import groups
from rl_async.process.http_auth import AUDIENCES, HOSTS, TOKEN_FILE, make_tokens, run_token, token_file
from rl_async.process.private_folder import private_folder
from rl_async.process.run_files import Endpoints
from rl_async.tracing import VARIABLES
from rl_async.transfer_queue.chat_messages import read_schemas
from tests.support.configs import float32_config

PORTS = {"queue": 1001, "engine-0": 1002, "engine-1": 1003, "rendezvous": 1004}
RUN = Path("runs/x")
QUEUE = f"ipc://{private_folder(RUN)}/queue"


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
def test_every_preset_has_a_plan_and_it_is_pure(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = float32_config(name, mode=mode)
    assert plan(config, RUN) == plan(config, RUN)
    assert list(tmp_path.iterdir()) == []


def test_one_process_per_engine_worker_and_rank() -> None:
    config = float32_config("calculator", ["rollout.engines=2", "agent.workers=3", "trainer.ranks=2"])
    names = [spec.name for spec in plan(config, RUN).processes]
    assert names == [
        "queue", "engine-0", "engine-1", "worker-0", "worker-1", "worker-2", "trainer-0", "trainer-1"
    ]  # fmt: skip


@pytest.mark.parametrize("played", [[], ["agent.gateway={}"]])
def test_a_replay_starts_nothing_that_samples_or_scores(played: list[str]) -> None:
    reward = "reward={functions: [{name: reward_model}], model: {path: models/judge}}"
    config = float32_config(
        "calculator", ["rollout.replay=runs/before", "rollout.engines=2", "agent.workers=3", reward, *played]
    )
    planned = plan(config, RUN)
    assert [spec.name for spec in planned.processes] == ["queue", "worker-0", "trainer-0"]
    assert [wish.name for wish in planned.ports] == ["rendezvous"]
    assert endpoints(config, RUN, PORTS) == Endpoints(queue=QUEUE)


def test_a_replay_needs_devices_for_its_ranks_alone() -> None:
    config = float32_config("calculator", ["rollout.replay=runs/before", "rollout.engines=2"], mode="disaggregated")
    assert assign_devices(config, 4) == Devices(trainers=(0,), unused=1)


def test_waiting_threads_sleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    config = float32_config("calculator", ["launcher.threads=3"])
    assert {spec.env["OMP_WAIT_POLICY"] for spec in plan(config, RUN).processes} == {"passive"}
    assert {spec.env["OMP_NUM_THREADS"] for spec in plan(config, RUN).processes} == {"3"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert {spec.env["OMP_WAIT_POLICY"] for spec in plan(config, RUN).processes} == {"active"}


def test_the_command_lines_of_the_roles() -> None:
    planned = plan(float32_config("calculator"), RUN)
    commands = {spec.role: " ".join(spec.command(PORTS)[1:]) for spec in planned.processes}
    assert commands["queue"] == f"-P -m rl_async.transfer_queue --run runs/x --address {QUEUE} --relaunched"
    assert "--relaunched" not in planned.queue.command(PORTS, restarted=True), "then the others live on"
    assert commands["engine"] == (
        "-P -m rl_async.rollout_server --run runs/x --index 0 --host 127.0.0.1 --port 1002 --cache-bytes 1073741824"
    )
    assert commands["worker"] == f"-P -m rl_async.agent_loop --run runs/x --index 0 --queue {QUEUE}"
    assert commands["trainer"] == f"-P -m rl_async.trainer --run runs/x --queue {QUEUE} --host 127.0.0.1"


@pytest.mark.parametrize(("host", "found"), [("0.0.0.0", "127.0.0.1"), ("10.1.2.3", "10.1.2.3")])
def test_a_queue_that_listens_elsewhere_is_found_there_and_no_command_line_holds_a_key(host: str, found: str) -> None:
    config = float32_config("calculator", [f"queue.host={host}"])
    planned = plan(config, RUN)
    commands = {spec.role: " ".join(spec.command(PORTS)[1:]) for spec in planned.processes}
    assert f"--address tcp://{host}:1001" in commands["queue"]
    assert all(f"--queue tcp://{found}:1001" in commands[role] for role in ("worker", "trainer"))
    assert fill(planned.queue_address, PORTS) == endpoints(config, RUN, PORTS).queue == f"tcp://{found}:1001"
    assert not [command for command in commands.values() if "key" in command]


def test_a_gateway_takes_the_place_of_the_workers() -> None:
    config = float32_config("calculator", ["agent.gateway.port=8123", "agent.workers=3"])
    planned, ports = plan(config, RUN), PORTS | {"gateway": 8123}
    (gateway,) = planned.workers
    assert (gateway.name, gateway.role) == ("gateway", "worker")
    assert " ".join(gateway.command(ports)[1:]) == (
        f"-P -m rl_async.agent_loop.gateway --run runs/x --port 8123 --queue {QUEUE}"
    )
    assert PortWish("gateway", 8123, "agent.gateway.port") in planned.ports
    own = ["agent.environment=verifiers:sums", "agent.environment_hosts={python: there/python, processes: 2}"]
    _, *players = plan(float32_config("calculator", ["agent.gateway={}", *own]), RUN).workers
    assert [player.name for player in players] == ["environment-0", "environment-1"]
    assert players[1].command(ports)[-4:] == ["--gateway", "http://127.0.0.1:8123", "--index", "1"]
    assert endpoints(config, RUN, ports) == Endpoints(queue=QUEUE, gateway="http://127.0.0.1:8123")


def test_who_joins_a_run_is_told_of_its_reward_model() -> None:
    places = endpoints(float32_config("calculator"), RUN, PORTS | {"reward-model": 1005})
    assert places == Endpoints(queue=QUEUE, reward_model="http://127.0.0.1:1005")


def test_trainer_ranks_meet_at_one_port() -> None:
    trainers = plan(float32_config("calculator", ["trainer.ranks=2"]), RUN).trainers
    environments = [spec.environment(PORTS) for spec in trainers]
    assert [env["RANK"] for env in environments] == ["0", "1"]
    assert {(env["WORLD_SIZE"], env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments} == {
        ("2", "127.0.0.1", "1004")
    }


def test_on_several_hosts_the_command_lines_name_the_hosts() -> None:
    planned = plan(float32_config("calculator", [*REWARD_MODEL, "queue.host=10.0.0.1", "queue.shards=1"]), RUN)
    ports = PORTS | {"reward-model": 1005, "shard-0": 1006}
    hosts = {"engine-0": "10.0.0.2", "trainer-0": "10.0.0.3", "reward-model": "10.0.0.4", "shard-0": "10.0.0.5"}
    commands = {spec.role: " ".join(spec.command(ports, hosts)) for spec in planned.processes}
    assert "--host 10.0.0.2 --port 1002" in commands["engine"]
    assert commands["trainer"].endswith("--queue tcp://10.0.0.1:1001 --host 10.0.0.3")
    assert planned.trainers[0].environment(ports, hosts)["MASTER_ADDR"] == "10.0.0.3"
    assert commands["worker"].endswith("--reward-model http://10.0.0.4:1005")
    assert "--address tcp://10.0.0.5:1006" in commands["shard"]
    assert planned.workers[0].mentions("reward-model") and not planned.engines[0].mentions("reward-model")


def test_only_a_trainer_that_starts_again_resumes() -> None:
    planned = plan(float32_config("calculator"), RUN)
    assert "--resume" not in planned.trainers[0].command(PORTS)
    assert planned.trainers[0].command(PORTS, restarted=True).count("--resume") == 1
    resumed = plan(float32_config("calculator"), RUN, resume=True).trainers[0]
    assert resumed.command(PORTS).count("--resume") == resumed.command(PORTS, restarted=True).count("--resume") == 1


@pytest.mark.parametrize(("journal", "restarts"), [("memory", 0), ("sqlite", 7), ("redis", 7)])
def test_processes_are_restarted_as_often_as_configured_and_a_queue_that_forgets_never(
    journal: str, restarts: int
) -> None:
    planned = plan(float32_config("calculator", ["launcher.max_restarts=7", f"queue.journal={journal}"]), RUN)
    assert {spec.role: spec.max_restarts for spec in planned.processes} == {
        "queue": restarts,
        "engine": 7,
        "worker": 7,
        "trainer": 7,
    }


def test_the_mode_decides_the_transport() -> None:
    assert plan(float32_config("calculator", mode="colocated"), RUN).transport == "ipc"
    assert plan(float32_config("calculator", mode="disaggregated"), RUN).transport == "nearest"


@pytest.mark.parametrize(
    ("mode", "gpus", "expected"),
    [
        ("disaggregated", 0, Devices()),
        ("disaggregated", 4, Devices(engines=((2,), (3,)), trainers=(0, 1), unused=0)),
        ("disaggregated", 1, Devices(engines=((0,), (0,)), trainers=(0, 0), unused=0)),
        ("colocated", 4, Devices(engines=((0,), (1,)), trainers=(0, 1), unused=2)),
    ],
)
def test_devices(mode: str, gpus: int, expected: Devices) -> None:
    config = float32_config("calculator", ["rollout.engines=2", "trainer.ranks=2"], mode=mode)
    assert assign_devices(config, gpus) == expected


def test_an_engine_sees_only_its_own_gpu_and_a_rank_those_of_all_ranks() -> None:
    config = float32_config("calculator", ["rollout.engines=2", "trainer.ranks=2"])
    planned = plan(config, RUN, gpus=4)
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in planned.engines] == ["2", "3"]
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in planned.trainers] == ["0,1", "0,1"]
    assert [spec.device for spec in planned.trainers] == ["gpu:0", "gpu:1"]


def test_engines_see_the_gpus_whose_memory_they_take_weights_from_behind_their_own() -> None:
    def visible(*overrides: str) -> list[str]:
        config = float32_config("calculator", ["trainer.ranks=2", "rollout.engines=2", *overrides], mode="colocated")
        planned = plan(config, RUN, gpus=2)
        assert [spec.gpus for spec in planned.engines] == [(0,), (1,)]
        return [spec.env["CUDA_VISIBLE_DEVICES"] for spec in planned.engines]

    assert visible() == ["0,1", "1,0"]
    assert visible("weight_sync.way=disk") == ["0", "1"]


SEVERAL = ["rollout.engine=vllm", "rollout.tensor_parallel=2", "rollout.pipeline_parallel=2"]


@pytest.mark.parametrize(
    ("mode", "gpus", "engines"),
    [
        ("disaggregated", 16, ((2, 3, 4, 5), (6, 7, 8, 9))),
        ("disaggregated", 4, ((2, 3, 0, 1), (2, 3, 0, 1))),
        ("colocated", 8, ((0, 1, 2, 3), (4, 5, 6, 7))),
    ],
)
def test_every_rank_of_an_engine_has_a_gpu_of_its_own(
    mode: str, gpus: int, engines: tuple[tuple[int, ...], ...]
) -> None:
    config = float32_config("calculator", [*SEVERAL, "rollout.engines=2", "trainer.ranks=2"], mode=mode)
    planned = plan(config, RUN, gpus=gpus)
    assert tuple(spec.gpus for spec in planned.engines) == engines
    first = planned.engines[0]
    assert first.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, engines[0]))
    assert (first.device, first.ranks) == (f"gpu:{','.join(map(str, engines[0]))}", 4)
    argv = first.command(PORTS)
    assert [argv[argv.index(f"--{kind}-parallel-size") + 1] for kind in ("tensor", "pipeline")] == ["2", "2"]


def test_experts_are_dealt_to_ranks_by_each_kinds_own_flag() -> None:
    experts = ["rollout.tensor_parallel=2", "rollout.expert_parallel=2"]
    vllm, sglang = (
        plan(float32_config("calculator", [f"rollout.engine={kind}", *experts]), RUN).engines[0].argv
        for kind in ("vllm", "sglang")
    )
    assert "--enable-expert-parallel" in vllm and sglang[sglang.index("--ep-size") + 1] == "2"
    assert "--enable-expert-parallel" not in plan(float32_config("calculator", SEVERAL), RUN).engines[0].argv


def test_vllm_is_told_to_quantise_by_a_flag() -> None:
    def argv(*more: str) -> tuple[str, ...]:
        wanted = ["rollout.engine=vllm", "model.dtype=bfloat16", *more]
        return plan(float32_config("calculator", wanted), RUN).engines[0].argv

    fp8, int8 = argv("rollout.quantization=fp8"), argv("rollout.quantization=int8")
    assert fp8[fp8.index("--quantization") + 1] == "fp8_per_channel" and "--quantization-config" not in fp8
    assert json.loads(int8[int8.index("--quantization-config") + 1])["linear"] == "int8_per_channel_static"
    assert not {"--quantization", "--quantization-config"} & {*argv()}


def test_a_config_for_the_cpu_uses_no_gpu() -> None:
    planned = plan(float32_config("calculator", ["model.device=cpu"]), RUN, gpus=4)
    assert {spec.device for spec in planned.processes} == {"cpu"}


def test_engines_take_configured_ports_in_turn() -> None:
    planned = plan(
        float32_config(
            "calculator", ["rollout.engines=2", "rollout.port=4000", "queue.curve=always", "queue.port=5000"]
        ),
        RUN,
    )
    assert {wish.name: wish.port for wish in planned.ports} == {
        "queue": 5000,
        "engine-0": 4000,
        "engine-1": 4001,
        "rendezvous": 0,
    }


def test_a_shard_of_the_trainer_is_smaller() -> None:
    size = ModelSize(parameters=1_000_000_000, kv_per_token=1000)
    one = plan(float32_config("calculator"), RUN, size=size).trainers[0].memory_bytes
    two = plan(float32_config("calculator", ["trainer.ranks=2"]), RUN, size=size).trainers[0].memory_bytes
    assert one is not None and two is not None
    assert one - two == 8_000_000_000 + 4_000_000_000  # what one rank keeps of its layers' gradients


def test_nothing_to_make_means_no_preparation(tmp_path: Path) -> None:
    assert plan(float32_config("calculator"), RUN).prepare is not None
    assert plan(float32_config("calculator", ["warm_start=null", "data.make=null"]), RUN).prepare is None


def test_only_known_names_in_braces_are_ports() -> None:
    assert fill("tcp://h:{queue}/{other}/{", PORTS) == "tcp://h:1001/{other}/{"


REWARD_MODEL = ["reward.functions=[{name: reward_model}]", "reward.model.path=rm"]


def test_a_reward_model_without_url_is_a_process_that_workers_are_told_of() -> None:
    planned = plan(float32_config("calculator", [*REWARD_MODEL, "reward.model.batch_size=8"]), RUN)
    ports = PORTS | {"reward-model": 1005}
    assert planned.reward_model is not None and planned.reward_model in planned.processes
    assert " ".join(planned.reward_model.command(ports)[1:]) == (
        "-P -m rl_async.reward_loop.server --model rm --host 127.0.0.1 --port 1005 --dtype float32 --device auto "
        "--batch-size 8 --threads 1"
    )
    assert planned.workers[0].command(ports)[-2:] == ["--reward-model", "http://127.0.0.1:1005"]
    assert planned.reward_model.max_restarts == 3
    assert "reward-model" in {wish.name for wish in planned.ports}


@pytest.mark.parametrize(
    "overrides", [["reward.model.path=rm"], [*REWARD_MODEL, "reward.model.url=http://elsewhere:8000"]]
)
def test_a_reward_model_that_nobody_asks_or_that_runs_elsewhere_is_no_process(overrides: list[str]) -> None:
    planned = plan(float32_config("calculator", overrides), RUN)
    assert planned.reward_model is None
    assert "reward-model" not in {wish.name for wish in planned.ports}
    assert "--reward-model" not in planned.workers[0].argv


@pytest.mark.parametrize(
    ("mode", "gpus", "device"),
    [
        ("disaggregated", 0, "cpu"),
        ("disaggregated", 8, "gpu:4"),
        ("disaggregated", 4, "gpu:0"),
        ("colocated", 8, "gpu:2"),
    ],
)
def test_a_reward_model_takes_the_gpu_behind_the_others(mode: str, gpus: int, device: str) -> None:
    overrides = [*REWARD_MODEL, "rollout.engines=2", "trainer.ranks=2"]
    spec = plan(float32_config("calculator", overrides, mode=mode), RUN, gpus=gpus).reward_model
    assert spec is not None and spec.device == device
    on_cpu = plan(float32_config("calculator", [*overrides, "reward.model.device=cpu"], mode=mode), RUN, gpus=gpus)
    assert on_cpu.reward_model is not None and on_cpu.reward_model.device == "cpu"


def test_the_embedded_engine_is_told_how_to_decode_and_vllms_flags_are_not_for_it() -> None:
    config = float32_config("calculator", ["rollout.engine_args=['--decode=static']"])
    assert plan(config, RUN).engines[0].argv[-1] == "--decode=static"
    both = ["rollout.engine=[embedded, vllm]", "rollout.engines=2", "rollout.engine_args=[--block-size, '32']"]
    embedded, vllm = plan(float32_config("calculator", both), RUN).engines
    assert "--block-size" in vllm.argv and "--block-size" not in embedded.argv


def test_vllm_is_started_by_its_own_python_with_our_shell_around_it() -> None:
    overrides = ["rollout.engine=[embedded, vllm]", "rollout.engines=2", "rollout.python=/venv/bin/python"]
    embedded, vllm = plan(
        float32_config("calculator", [*overrides, "rollout.engine_args=[--block-size, '32']"]), RUN
    ).engines
    assert (embedded.engine_kind, vllm.engine_kind) == ("embedded", "vllm")
    assert vllm.command(PORTS) == [
        *("/venv/bin/python", "-P", "-m", "rl_async.rollout_server.vllm", "--host", "127.0.0.1"),
        *("--model", "artifacts/calculator/model", "--dtype", "float32", "--max-model-len", "160"),
        *("--max-num-seqs", "384", "--tensor-parallel-size", "1", "--pipeline-parallel-size", "1"),
        *("--seed", "10001", "--port", "1003", "--kv-cache-memory-bytes", "1073741824", "--block-size", "32"),
    ]
    assert vllm.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in embedded.env


def test_vllm_on_a_gpu_that_the_trainer_uses_too_can_sleep() -> None:
    config = float32_config("calculator", ["rollout.engine=vllm"], mode="colocated")
    assert "--enable-sleep-mode" in plan(config, RUN, gpus=1).engines[0].argv
    assert "--enable-sleep-mode" not in plan(config, RUN).engines[0].argv


@pytest.mark.parametrize(
    ("kind", "given", "argv"),
    [
        ("vllm", [], ["--hf-overrides", '{"head_dtype": "float32"}']),
        ("vllm", ["--hf-overrides", '{"a": 1}'], ["--hf-overrides", '{"head_dtype": "float32", "a": 1}']),
        ("vllm", ['--hf_overrides={"a": 1}', "--x"], ["--hf-overrides", '{"head_dtype": "float32", "a": 1}', "--x"]),
        ("vllm", ["--hf-overrides", '{"head_dtype": "model"}'], ["--hf-overrides", '{"head_dtype": "model"}']),
        ("vllm", ["--hf-overrides.a_b=1"], ["--hf-overrides.a_b=1", "--hf-overrides.head_dtype", "float32"]),
        ("vllm", ["--hf-overrides.head_dtype", "model"], ["--hf-overrides.head_dtype", "model"]),
        ("sglang", ["--page-size", "16"], ["--page-size", "16", "--enable-fp32-lm-head"]),
        ("sglang", ["--enable_fp32_lm_head"], ["--enable_fp32_lm_head"]),
    ],
)
def test_engines_on_gpus_sum_logits_in_float32_beside_a_users_own_overrides(
    kind: str, given: list[str], argv: list[str]
) -> None:
    overrides = [f"rollout.engine={kind}", f"rollout.engine_args={json.dumps(given)}"]
    of_bfloat16 = float32_config("calculator", [*overrides, "model.dtype=bfloat16"])
    [engine] = plan(of_bfloat16, RUN, gpus=2).engines
    assert list(engine.argv[-len(argv) :]) == argv
    assert sum("head" in word for word in engine.argv) == 1
    [in_float32] = plan(float32_config("calculator", overrides), RUN, gpus=2).engines
    assert list(in_float32.argv[len(in_float32.argv) - len(given) :]) == given
    if kind == "vllm":
        [on_cpu] = plan(of_bfloat16, RUN).engines
        assert list(on_cpu.argv[len(on_cpu.argv) - len(given) :]) == given, "a copy of the head in each step"


@pytest.mark.parametrize("given", [["--hf-overrides"], ["--hf-overrides", "[1]"], ["--hf-overrides={"]])
def test_overrides_that_are_no_object_are_refused(given: list[str]) -> None:
    overrides = ["rollout.engine=vllm", f"rollout.engine_args={json.dumps(given)}", "model.dtype=bfloat16"]
    with pytest.raises(ConfigError, match=r"rollout\.engine_args: --hf-overrides"):
        plan(float32_config("calculator", overrides), RUN, gpus=2)


def test_sglang_is_started_by_its_own_python_with_our_shell_around_it() -> None:
    overrides = ["rollout.engine=sglang", "rollout.python=/venv/bin/python"]
    [engine] = plan(
        float32_config("calculator", [*overrides, "rollout.engine_args=[--page-size, '16']"]), RUN, gpus=2
    ).engines
    assert (engine.engine_kind, engine.device) == ("sglang", "gpu:1")
    assert engine.command(PORTS) == [
        *("/venv/bin/python", "-P", "-m", "rl_async.rollout_server.sglang", "--host", "127.0.0.1"),
        *("--model-path", "artifacts/calculator/model", "--dtype", "float32", "--context-length", "160"),
        *("--max-running-requests", "384", "--tp-size", "1", "--ep-size", "1"),
        *("--random-seed", "10000", "--port", "1002", "--page-size", "16"),
    ]
    assert engine.env["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("ranks", "parallel", "gpus", "devices"),
    [
        (2, 1, 3, ["gpu:0", "gpu:1"]),
        (4, 2, 6, ["gpu:0,1", "gpu:2,3"]),
        (3, 2, 5, ["gpu:0,1"]),
        (2, 1, 0, ["cpu", "cpu"]),
    ],
)
def test_lent_engines_are_on_the_trainers_devices(ranks: int, parallel: int, gpus: int, devices: list[str]) -> None:
    overrides = ["trainer.lend_devices=true", "rollout.engine=vllm", f"rollout.tensor_parallel={parallel}"]
    found = plan(float32_config("calculator", [*overrides, f"trainer.ranks={ranks}"]), RUN, gpus=gpus)
    own, *lent = found.engines
    assert own.name == "engine-0" and [spec.name for spec in lent] == [f"lent-{i}" for i in range(len(devices))]
    assert [spec.device for spec in lent] == devices
    assert [wish.name for wish in found.ports] == ["engine-0", *(spec.name for spec in lent), "rendezvous"]
    seeds = {spec.argv[spec.argv.index("--seed") + 1] for spec in found.engines}
    assert len(seeds) == len(found.engines)
    assert ["--enable-sleep-mode" in spec.argv for spec in found.engines] == [False, *([bool(gpus)] * len(lent))]


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def test_free_ports_are_different_and_can_be_bound() -> None:
    ports = assign_ports([PortWish(f"p{i}") for i in range(20)])
    assert len(set(ports.values())) == 20
    for port in ports.values():
        with socket.socket() as listener:
            listener.bind((HOST, port))


def test_a_taken_port_names_its_key(taken_port: int) -> None:
    with pytest.raises(ConfigError, match=rf"queue\.port: port {taken_port} "):
        assign_ports([PortWish("other"), PortWish("queue", taken_port, "queue.port")])


def test_a_port_wished_for_twice_is_refused() -> None:
    free = assign_ports([PortWish("p")])["p"]
    with pytest.raises(ConfigError, match=r"rollout\.port"):
        assign_ports([PortWish("queue", free, "queue.port"), PortWish("engine-0", free, "rollout.port")])


def test_a_number_that_is_no_port_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"queue\.port: port 70000"):
        assign_ports([PortWish("queue", 70000, "queue.port")])


def test_a_configured_port_is_kept() -> None:
    free = assign_ports([PortWish("p")])["p"]
    assert assign_ports([PortWish("p", free, "k")]) == {"p": free}


JUDGED = [
    *("reward.functions=[{name: judge}, {name: reward_model}]", "reward.model={path: rm}", "queue.shards=1"),
    "reward.judge={url: 'http://127.0.0.1:1/v1', model: m, api_key_env: JUDGE_KEY}",
]


def test_a_secret_is_hidden_from_the_roles_that_do_not_use_it() -> None:
    mcp = (
        "agent.mcp=[{command: [serve], env_from: [TOOL_KEY]}, "
        "{url: 'https://tools.example', headers_from: {Authorization: HEADER_KEY}}]"
    )
    teacher = "algorithm.teacher.endpoint={url: 'http://127.0.0.1:1/v1', model: m, api_key_env: %s}"
    planned = plan(float32_config("calculator", [*JUDGED, mcp, teacher % "TEACHER_KEY"]), Path("runs/mine"))
    assert planned.prepare is not None
    used_by = {
        **{name: {"worker"} for name in ("JUDGE_KEY", "TOOL_KEY", "HEADER_KEY")},
        "TEACHER_KEY": {"trainer"},
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
    shared = plan(float32_config("calculator", [*JUDGED, teacher % "JUDGE_KEY"]), Path("runs/mine"))
    assert {spec.role for spec in shared.processes if "JUDGE_KEY" not in spec.env} == {"trainer", "worker"}


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


# The schemas by which the queue counts prompts: of the built-in tools and of the config's, also a user's.


def test_a_users_tool_is_loaded_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'print("loading")\n\n\ndef look(query: str) -> str:\n    """Look it up."""\n    return query\n'
    )
    name = f"{tmp_path}/mine.py:look"
    config = load_config("calculator", [f"agent.tools=[calculator, '{name}']"])
    write_tool_schemas(config, tmp_path)
    schemas = read_schemas(tmp_path)
    assert {"calculator", "python", "bash", name} == schemas.keys()
    assert schemas[name]["function"]["name"] == "look"
    agent = msgspec.structs.replace(config.agent, tools=(f"{tmp_path}/mine.py:none",))
    with pytest.raises(ConfigError, match=r"agent\.tools"):
        write_tool_schemas(msgspec.structs.replace(config, agent=agent), tmp_path)


def test_without_the_launcher_no_schema_is_known(tmp_path: Path) -> None:
    assert read_schemas(tmp_path) == {}


# What is missing on disk is found before any process starts, and said with the key that names it.


def config(root: Path, *overrides: str) -> RunConfig:
    paths = [
        f"model.path={root}/model",
        f"data.path={root}/train.parquet",
        f"data.eval_path={root}/test.parquet",
        f"warm_start.demos_path={root}/demos.parquet",
        f"warm_start.out={root}/model",
    ]
    return float32_config("calculator", [*paths, *overrides])


def write_data(root: Path) -> None:
    for name in ("train", "test", "demos"):
        (root / f"{name}.parquet").touch()


NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


def write_model(root: Path, *left_out: str) -> Path:
    folder = root / "model"
    folder.mkdir()
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - set(left_out):
        (folder / name).write_bytes(NO_TENSORS if name.endswith(".safetensors") else b"{}")
    return folder


def test_generated_data_and_warm_start_are_to_be_made(tmp_path: Path) -> None:
    assert needs_preparation(config(tmp_path))
    write_data(tmp_path)
    assert not needs_data(config(tmp_path))
    assert needs_model(config(tmp_path))
    write_model(tmp_path)
    assert not needs_preparation(config(tmp_path))


def test_demonstrations_are_needed_only_for_a_warm_start(tmp_path: Path) -> None:
    write_data(tmp_path)
    (tmp_path / "demos.parquet").unlink()
    assert needs_data(config(tmp_path))
    write_model(tmp_path)
    assert not needs_data(config(tmp_path))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.eval_path=nowhere.parquet", "data.eval_path: no file nowhere.parquet.*data.eval_path=null"),
        ("warm_start.demos_path=nowhere.parquet", "warm_start.demos_path: no file nowhere.parquet.*warm_start=null"),
        ("data.make=null", "data.path: no file"),
    ],
)
def test_a_file_that_nothing_makes_is_named(tmp_path: Path, override: str, named: str) -> None:
    with pytest.raises(DataError, match=named):
        needs_preparation(config(tmp_path, override))


def test_generated_sources_are_not_files(tmp_path: Path) -> None:
    assert not needs_data(
        config(tmp_path, "data.make=null", "data.path=reasoning_gym:gcd", "data.eval_path=null", "warm_start=null")
    )


def test_a_missing_model_without_warm_start_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path: no folder"):
        needs_model(config(tmp_path, "warm_start=null"))


def test_a_mistyped_model_is_named_and_no_toy_made_in_its_place(tmp_path: Path) -> None:
    write_data(tmp_path)
    typo = config(tmp_path, f"model.path={tmp_path}/modle")
    with pytest.raises(ConfigError, match=r"model\.path: .*modle.*warm_start\.out"):
        needs_preparation(typo)
    assert model_size(typo) is None
    without = config(tmp_path, "warm_start.out=''")  # as in the config of a run that is older than this key
    with pytest.raises(ConfigError, match=r"model\.path.*warm_start\.out"):
        needs_preparation(without)
    write_model(tmp_path)
    assert not needs_preparation(without)


@pytest.mark.parametrize("key", ["model.path", "algorithm.kl.reference_path"])
def test_a_missing_checkpoint_is_named_with_those_that_exist(tmp_path: Path, key: str) -> None:
    write_data(tmp_path)
    write_model(tmp_path)
    there = tmp_path / "runs" / "x" / "checkpoints" / "step-000040"
    there.mkdir(parents=True)
    (there / "state.json").touch()
    with pytest.raises(UserError, match=rf"{key}: .*step-3.*has step-000040"):
        needs_preparation(config(tmp_path, f"{key}={there.parent}/step-3/model", "algorithm.kl.coef=0.1"))


@pytest.mark.parametrize(
    ("left_out", "named"),
    [("config.json", r"no config\.json"), ("tokenizer.json", "no tokenizer"), ("model.safetensors", "no weights")],
)
def test_a_model_folder_with_a_part_missing_is_a_mistake(tmp_path: Path, left_out: str, named: str) -> None:
    write_model(tmp_path, left_out)
    with pytest.raises(UserError, match=named):
        needs_model(config(tmp_path))


def test_weights_that_are_pickles_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "model.safetensors")
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"model\.path: .*safetensors"):
        needs_model(config(tmp_path))


def test_weights_that_are_damaged_or_elsewhere_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    for content in (b"", (1 << 40).to_bytes(8, "little") + b"{}"):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=r"model\.path: .*model\.safetensors"):
            needs_model(config(tmp_path))
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    for name in ("../x.safetensors", "model-2.safetensors"):
        (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
        with pytest.raises(UserError, match=rf"model\.path: .*{name}"):
            needs_model(config(tmp_path))


def write_tokenizer(folder: Path, **changed: object) -> None:
    train_tokenizer([[{"role": "user", "content": "ab"}]], 128).save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def test_a_tokenizer_or_template_that_takes_all_memory_is_refused_in_words(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    write_tokenizer(folder)
    needs_model(config(tmp_path))
    longer = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 1000}
    write_tokenizer(folder, normalizer={"type": "Sequence", "normalizers": [longer] * 4})
    with pytest.raises(UserError, match=r"model\.path: .*tokenizer"):
        needs_model(config(tmp_path))
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ 'a' * 9999999999 }}")
    with pytest.raises(UserError, match=r"model\.path: .*template"):
        needs_model(config(tmp_path))


def test_a_fork_that_crashes_says_nothing_about_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process without the threads and the objects of this one decides."""
    folder = write_model(tmp_path)
    write_tokenizer(folder)
    monkeypatch.setattr(artifacts, "try_tokenizer", lambda path: os.kill(os.getpid(), signal.SIGSEGV))
    needs_model(config(tmp_path))
    (folder / "chat_template.jinja").write_text("{{ 'a' * 9999999999 }}")
    with pytest.raises(UserError, match=r"model\.path: .*template"):
        needs_model(config(tmp_path))


def test_a_reference_model_is_looked_at_as_well(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_model(tmp_path)
    with pytest.raises(UserError, match=r"algorithm\.kl\.reference_path"):
        needs_preparation(config(tmp_path, "algorithm.kl.coef=0.1", "algorithm.kl.reference_path=nowhere"))


def test_the_runs_own_reward_model_is_looked_at_as_well(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_model(tmp_path)
    asked = ("reward.functions=[{name: reward_model}]", f"reward.model.path={tmp_path}/rm")
    with pytest.raises(UserError, match=r"reward\.model\.path: .* is not a folder"):
        needs_preparation(config(tmp_path, *asked))
    assert not needs_preparation(config(tmp_path, *asked, "reward.model.url=http://elsewhere"))
    assert not needs_preparation(config(tmp_path, asked[1]))


def test_keys_of_the_tiny_model_do_not_go_with_a_pretrained_one(tmp_path: Path) -> None:
    pretrained = "warm_start.pretrained={path: OWNER/NAME}"
    with pytest.raises(ConfigError, match=r"warm_start\.gate .*warm_start\.pretrained"):
        config(tmp_path, pretrained)  # the preset has a gate
    write_data(tmp_path)
    assert needs_model(config(tmp_path, pretrained, "warm_start.gate=0.9"))


def test_a_warm_start_cannot_ask_the_runs_own_reward_model(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_model(tmp_path).rename(tmp_path / "rm")
    with pytest.raises(UserError, match=r"model\.path: .*`rl-async sft`"):
        needs_preparation(
            config(tmp_path, "reward.functions=[{name: reward_model}]", f"reward.model.path={tmp_path}/rm")
        )


def test_a_model_of_other_warm_start_settings_is_not_taken(tmp_path: Path) -> None:
    here = config(tmp_path)
    assert here.warm_start is not None
    record = write_model(tmp_path) / SFT_FILE
    demos = Path(here.warm_start.demos_path)
    demos.write_bytes(b"one demonstration")
    record.write_bytes(msgspec.json.encode(origin_of(here.warm_start)))
    assert not needs_model(here)
    demos.write_bytes(b"another one")
    with pytest.raises(UserError, match=r"warm_start\.demos_path"):
        needs_model(here)
    before = {"fingerprint": origin_of(here.warm_start).fingerprint, "steps": 200}
    record.write_text(json.dumps(before))
    assert not needs_model(here), "an earlier version recorded no demonstrations"
    with pytest.raises(UserError, match="warm_start"):
        needs_model(config(tmp_path, "warm_start.seed=5"))
    elsewhere = (tmp_path / "model").rename(tmp_path / "moved")
    assert not needs_model(config(tmp_path, f"model.path={elsewhere}", f"warm_start.out={elsewhere}"))
    elsewhere.rename(tmp_path / "model")
    record.write_text("torn")
    with pytest.raises(UserError, match=r"model\.path: .*sft\.json"):
        needs_model(here)


def test_a_critic_starts_from_a_model_folder_or_a_saved_critic(tmp_path: Path) -> None:
    write_data(tmp_path)
    model = write_model(tmp_path)
    saved = tmp_path / "checkpoints" / "critic"
    saved.mkdir(parents=True)
    (saved / "model").symlink_to(model)
    gae = ("algorithm.advantage=gae", "critic={}")
    for path in (model, saved):
        needs_preparation(config(tmp_path, *gae, f"critic.path={path}"))
    with pytest.raises(UserError, match=r"critic\.path: .*checkpoints has no config\.json"):
        needs_preparation(config(tmp_path, *gae, f"critic.path={saved.parent}"))


# An engine of several nodes in the plan: a command line, GPUs and an address of its own for each node.


ENGINE_NODES_PORTS = {"engine-0": 1002, "engine-0-node-1": 1005, "engine-0-nodes": 1006, "rendezvous": 1004}
ENGINE_NODES_HOSTS = {"engine-0": "10.0.0.2", "engine-0-node-1": "10.0.0.3"}
TWO = ["rollout.tensor_parallel=4", "rollout.engine_args=['--nnodes', '2']"]
MEETING = {
    "vllm": "--node-rank {} --master-addr 10.0.0.2 --master-port 1006",
    "sglang": "--node-rank {} --dist-init-addr 10.0.0.2:1006",
}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_each_node_has_a_command_line_and_all_meet_at_the_first(kind: str) -> None:
    config = float32_config("calculator", [f"rollout.engine={kind}", *TWO], mode="disaggregated")
    planned = plan(config, RUN, gpus=5)
    (head,) = planned.engines
    (follower,) = head.followers
    assert [spec.name for spec in planned.processes][:3] == ["queue", "engine-0", "engine-0-node-1"]
    assert {wish.name for wish in planned.ports} == ENGINE_NODES_PORTS.keys()
    assert (head.gpus, follower.gpus) == ((1, 2), (3, 4)) and head.ranks == follower.ranks == 2
    for rank, spec in enumerate((head, follower)):
        command, env = (
            " ".join(spec.command(ENGINE_NODES_PORTS, ENGINE_NODES_HOSTS)),
            spec.environment(ENGINE_NODES_PORTS, ENGINE_NODES_HOSTS),
        )
        assert MEETING[kind].format(rank) in command and command.endswith("--nnodes 2")
        assert (
            f"--host {ENGINE_NODES_HOSTS[spec.name]} " in command
            and f"--port {ENGINE_NODES_PORTS[spec.name]} " in command
        )
        assert env[VLLM.node_address if kind == "vllm" else SGLANG.node_address] == ENGINE_NODES_HOSTS[spec.name]
        assert ("--headless" in command) == (kind == "vllm" and rank > 0)


def test_ray_places_each_node_by_itself() -> None:
    config = float32_config("calculator", ["rollout.engine=vllm", *TWO], mode="disaggregated")
    (others,) = (group for group in groups(plan(config, RUN, gpus=5), 1, shared=True) if group.name == "others")
    held = {bundle.processes[0].name: bundle.resources.get("GPU") for bundle in others.bundles}
    assert held == {"engine-0": 2.0, "engine-0-node-1": 2.0, "worker-0": None}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rollout.engine=vllm", "rollout.engine_args=['--nnodes=2']"], "--nnodes.*rollout.engines"),
        (["rollout.engine=vllm", "rollout.engine_args=['--nnodes=two']"], "--nnodes"),
        (["rollout.engine=vllm", *TWO, "mode=colocated"], "--nnodes.*disaggregated"),
        (["rollout.engine=vllm", *TWO, "weight_sync.way=ipc"], "--nnodes.*weight_sync.way"),
        (["rollout.engine=vllm", "rollout.engine_args=['-n', '2']"], "-n .*--nnodes"),
        (["rollout.engine=vllm", "rollout.engine_args=['--node-rank', '0']"], "--node-rank.*launcher"),
        (["rollout.engine=vllm", "rollout.engine_args=['--headless']"], "--headless.*launcher"),
        (["rollout.engine=sglang", "rollout.engine_args=['--dist-init-addr=h:1']"], "--dist-init-addr.*launcher"),
        (
            ["rollout.engine=sglang", *TWO, "trainer.lora={}", "weight_sync.adapters=load"],
            "weight_sync.adapters.*--nnodes",
        ),
        (
            ["rollout.engine=vllm", "rollout.engine_args=['--nnodes=2', '--data-parallel-size=2']"],
            "--nnodes.*--data-parallel-size",
        ),
    ],
)
def test_what_does_not_go_with_several_nodes_is_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        float32_config("calculator", ["mode=disaggregated", *overrides])

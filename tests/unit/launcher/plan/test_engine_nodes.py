"""An engine of several nodes in the plan: a command line, GPUs and an address of its own for each node."""

from pathlib import Path

import pytest

from rl_async.configs.engines import SGLANG, VLLM
from rl_async.errors import ConfigError
from rl_async.launcher.plan.planning import plan
from rl_async.launcher.ray_keeper import groups
from tests.support.configs import float32_config

RUN = Path("runs/x")
PORTS = {"engine-0": 1002, "engine-0-node-1": 1005, "engine-0-nodes": 1006, "rendezvous": 1004}
HOSTS = {"engine-0": "10.0.0.2", "engine-0-node-1": "10.0.0.3"}
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
    assert {wish.name for wish in planned.ports} == PORTS.keys()
    assert (head.gpus, follower.gpus) == ((1, 2), (3, 4)) and head.ranks == follower.ranks == 2
    for rank, spec in enumerate((head, follower)):
        command, env = " ".join(spec.command(PORTS, HOSTS)), spec.environment(PORTS, HOSTS)
        assert MEETING[kind].format(rank) in command and command.endswith("--nnodes 2")
        assert f"--host {HOSTS[spec.name]} " in command and f"--port {PORTS[spec.name]} " in command
        assert env[VLLM.node_address if kind == "vllm" else SGLANG.node_address] == HOSTS[spec.name]
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
        (["rollout.engine=vllm", *TWO, "weight_sync.way=ipc"], "--nnodes.*transport"),
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

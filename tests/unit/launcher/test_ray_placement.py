"""What goes where on a cluster: bundles, processes, the launcher's node, and which interface has an address."""

import socket
import sys
from pathlib import Path

import pytest

from rl_async.errors import UserError
from rl_async.launcher.plan.planning import Plan, plan
from rl_async.launcher.ray_placement import NodeGroup, check_sharing, folders_of, groups, interface_of
from rl_async.launcher.runs import launch
from tests.support.configs import float32_config

RUN = Path("runs/x")
TWO = ["rollout.engines=2", "trainer.ranks=2", "agent.workers=2"]


def planned(*overrides: str, mode: str = "disaggregated", gpus: int = 0) -> Plan:
    return plan(float32_config("calculator", overrides, mode=mode), RUN, gpus=gpus)


def names(found: tuple[NodeGroup, ...]) -> dict[str, list[list[str]]]:
    return {
        group.name: [[resources.name for resources in bundle.processes] for bundle in group.bundles] for group in found
    }


def test_with_a_shared_run_folder_only_the_queue_stays_at_home() -> None:
    found = groups(planned(*TWO), 1, shared=True)
    assert names(found) == {
        "home": [["queue"]],
        "trainers": [["trainer-0"], ["trainer-1"]],
        "others": [["engine-0"], ["engine-1"], ["worker-0"], ["worker-1"]],
    }
    assert [group.strategy for group in found] == ["PACK", "PACK", "SPREAD"]


def test_trainers_stay_beside_a_run_folder_that_other_nodes_do_not_see() -> None:
    found = groups(planned(*TWO), 1, shared=False)
    assert names(found)["home"] == [["queue"], ["trainer-0"], ["trainer-1"]] and "trainers" not in names(found)
    assert all(bundle.home for bundle in found[0].bundles)
    assert not any(bundle.home for bundle in found[1].bundles)


def test_a_gateway_stays_where_agent_programs_look_for_it() -> None:
    assert names(groups(planned("agent.gateway.port=0"), 1, shared=True))["home"] == [["queue"], ["gateway"]]


def test_processes_on_a_cpu_take_their_threads_and_those_that_wait_take_little() -> None:
    bundles = {
        bundle.processes[0].name: bundle for group in groups(planned(), 3, shared=True) for bundle in group.bundles
    }
    assert bundles["engine-0"].resources["CPU"] == bundles["trainer-0"].resources["CPU"] == 3
    assert bundles["worker-0"].resources["CPU"] == bundles["queue"].resources["CPU"] == 0.25
    assert "GPU" not in bundles["engine-0"].resources
    assert bundles["queue"].resources["memory"] == planned().queue.memory_bytes


def test_every_gpu_is_a_bundle_and_those_who_share_it_divide_it() -> None:
    apart = groups(planned(*TWO, gpus=4), 1, shared=True)
    assert names(apart)["others"][:2] == [["engine-0"], ["engine-1"]]
    assert [bundle.resources["GPU"] for bundle in apart[1].bundles] == [1, 1]
    one = groups(planned(*TWO, gpus=1), 1, shared=True)
    (bundle,) = one[1].bundles
    assert [resources.name for resources in bundle.processes] == ["engine-0", "engine-1", "trainer-0", "trainer-1"]
    assert bundle.resources["GPU"] == 1 and {resources.gpus for resources in bundle.processes} == {0.25}


SEVERAL = ["rollout.engine=vllm", "rollout.tensor_parallel=2"]


def test_an_engine_of_several_ranks_is_one_bundle_with_all_their_gpus() -> None:
    (engine,) = groups(planned(*SEVERAL, gpus=3), 4, shared=True)[2].bundles[:1]
    assert [resources.name for resources in engine.processes] == ["engine-0"]
    assert (engine.resources["GPU"], engine.resources["CPU"], engine.processes[0].gpus) == (2, 2, 2)
    (on_cpus,) = groups(planned(*SEVERAL), 4, shared=True)[2].bundles[:1]
    assert on_cpus.resources["CPU"] == 2 * 4 and "GPU" not in on_cpus.resources


def test_ray_cannot_share_the_gpus_of_an_engine_that_has_several() -> None:
    with pytest.raises(UserError, match=r"engine-0 .*rollout\.tensor_parallel"):
        groups(planned(*SEVERAL, "trainer.ranks=2", mode="colocated", gpus=2), 1, shared=True)


def test_engines_that_take_weights_from_shared_memory_are_with_their_trainer() -> None:
    found = groups(planned(*TWO, mode="colocated", gpus=2), 1, shared=True)
    (group,) = [group for group in found if group.name == "trainers"]
    assert group.strategy == "STRICT_PACK"
    pairs = [{resources.name for resources in bundle.processes} for bundle in group.bundles]
    assert pairs == [{"engine-0", "trainer-0"}, {"engine-1", "trainer-1"}]  # they take turns on one GPU
    assert {resources.gpus for bundle in group.bundles for resources in bundle.processes} == {0.5}
    apart = groups(planned(*TWO, mode="colocated", gpus=2), 1, shared=False)
    assert all(bundle.home for bundle in apart[0].bundles) and len(apart[0].bundles) == 3


def test_weights_through_files_need_a_folder_that_all_see() -> None:
    config = float32_config("calculator", ["weight_sync.transport=disk"])
    with pytest.raises(UserError, match=r"weight_sync.transport=disk: 10.0.0.2"):
        check_sharing(config, plan(config, RUN), ["10.0.0.2"])
    check_sharing(config, plan(config, RUN), [])
    shared = float32_config("calculator", ["weight_sync.transport=disk", "weight_sync.folder=/mnt/w"])
    check_sharing(shared, plan(shared, RUN), ["10.0.0.2"])
    needed = plan(shared, RUN)
    assert ("weight_sync.folder", "/mnt/w") in folders_of(shared, needed, needed.engines[0])


def test_who_loads_the_model_needs_its_folder() -> None:
    config = float32_config("calculator")
    needed = plan(config, RUN)
    model = ("model.path", "artifacts/calculator/model")
    assert folders_of(config, needed, needed.engines[0]) == folders_of(config, needed, needed.workers[0]) == [model]
    assert folders_of(config, needed, needed.queue) == []


@pytest.mark.parametrize(
    ("address", "found"), [("10.1.2.3", "eth1"), ("127.0.0.1", "lo"), ("127.0.0.2", "lo"), ("192.168.0.1", "")]
)
def test_the_interface_of_an_address(address: str, found: str) -> None:
    interfaces = {
        "lo": [("127.0.0.1", "255.0.0.0")],
        "eth0": [("10.1.2.4", "255.255.255.0")],
        "eth1": [("10.1.2.3", "255.255.255.0")],
        "tun": [("10.9.0.1", None)],
    }
    assert interface_of(address, interfaces) == found


def test_without_ray_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'rl-async\[ray\]'"):
        launch.launch_on_ray(float32_config("calculator"), tmp_path / "runs" / "x", "")
    assert "rl_async.launcher.ray_nodes" not in sys.modules and list(tmp_path.iterdir()) == []


def test_an_address_where_nobody_listens_is_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: True)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(UserError, match=f"--address {address}: "):
        launch.launch_on_ray(float32_config("calculator"), tmp_path / "runs" / "x", address)
    assert "rl_async.launcher.ray_nodes" not in sys.modules and list(tmp_path.iterdir()) == []

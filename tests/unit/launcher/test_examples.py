"""The Slurm and Kubernetes examples, held to what can be had without a cluster: they parse, and each role's argument
parser takes the command line that they give it. (tests/e2e/clusters/test_slurm_script.py runs the former.)"""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_async.configs.load import load_config
from rl_async.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USER

EXAMPLES = Path(__file__).parents[3] / "examples"
VARIABLES = {"$(INDEX)": "0", "$(POD_IP)": "10.0.0.7"}
ROLES = {"rl_async.transfer_queue", "rl_async.rollout_server", "rl_async.agent_loop", "rl_async.trainer"}


class Parsed(Exception):
    """Ends a role at the end of its argument parser."""


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes" / "rl_async.yaml").read_text()))


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for document in documents():
        if "template" in document["spec"]:
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def commands() -> list[tuple[str, ...]]:
    """Module and arguments of every role of the manifest, with Kubernetes' variables filled in."""
    found = []
    for _, pod in pods():
        for container in pod["containers"]:
            words = [*container["command"], *container["args"]]
            if words[:2] == ["python", "-m"]:
                found.append(tuple(VARIABLES.get(word, word) for word in words[2:]))
    return found


def test_the_manifest_has_every_role() -> None:
    assert {command[0] for command in commands()} == ROLES
    assert all(isinstance(word, str) for command in commands() for word in command)


@pytest.mark.parametrize("command", commands(), ids=lambda command: command[0])
def test_each_role_takes_its_arguments(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *given: Any) -> None:
        parse(self, *given)
        with pytest.raises(SystemExit):  # what it does not know is refused
            parse(self, [*sys.argv[1:], "--nonsense"])
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", list(command))
    with pytest.raises(Parsed):
        importlib.import_module(f"{command[0]}.__main__").main()


def test_what_a_pod_names_is_there() -> None:
    names = {(document["kind"], document["metadata"]["name"]) for document in documents()}
    assert len(names) == len(documents())
    assert ("Service", "rl-queue") in names
    for name, pod in pods():
        (volume,) = pod["volumes"]
        assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            own = [{"name": "journal", "mountPath": "/journal"}] if container["name"] == "queue" else []
            assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/work"}, *own], name
            used = {v for word in container.get("args", ()) for v in VARIABLES if v in word}
            assert used <= {f"$({variable['name']})" for variable in container.get("env", ())}, name


def test_the_queues_journal_is_on_no_shared_file_system() -> None:
    (queue,) = [d for d in documents() if d["kind"] == "StatefulSet" and d["metadata"]["name"] == "rl-queue"]
    (claim,) = queue["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "journal" and claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    (script,) = [pod["containers"][0]["args"][0] for name, pod in pods() if name == "rl-prepare"]
    assert "queue.sqlite.folder=/journal" in script
    assert "queue.sqlite.folder=$local" in (EXAMPLES / "slurm" / "rl_async.sbatch").read_text()


def test_a_job_that_was_asked_to_stop_is_neither_done_nor_failed() -> None:
    (job,) = [document["spec"] for document in documents() if document["metadata"]["name"] == "rl-trainer"]
    rules = {rule["action"]: rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert rules["FailJob"]["onExitCodes"]["values"] == [EXIT_USER, EXIT_FAILED]
    assert rules["Ignore"]["onExitCodes"]["values"] == sorted(EXIT_STOPPED)
    assert (
        f"0 | {EXIT_USER} | {EXIT_FAILED} | {' | '.join(map(str, sorted(EXIT_STOPPED)))})"
        in (EXAMPLES / "slurm" / "rl_async.sbatch").read_text()
    )


def test_services_select_pods_that_there_are() -> None:
    labels = [d["spec"]["template"]["metadata"]["labels"] for d in documents() if d["kind"] == "StatefulSet"]
    services = [document for document in documents() if document["kind"] == "Service"]
    assert services
    for service in services:
        assert any(service["spec"]["selector"].items() <= of.items() for of in labels)


def test_the_network_policy_covers_every_pod_and_admits_these_alone() -> None:
    (policy,) = [document["spec"] for document in documents() if document["kind"] == "NetworkPolicy"]
    selector = policy["podSelector"]
    assert policy["policyTypes"] == ["Ingress"] and policy["ingress"] == [{"from": [{"podSelector": selector}]}]
    templates = [d["spec"]["template"] for d in documents() if "template" in d["spec"]]
    assert len(templates) == 5
    for template in templates:
        assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_overrides_of_the_examples_are_keys() -> None:
    prepare = next(pod for name, pod in pods() if name == "rl-prepare")
    (line,) = [line for line in prepare["containers"][0]["args"][0].splitlines() if line.startswith("set=(")]
    config = load_config("calculator", line.removeprefix("set=(").removesuffix(")").split(), mode="disaggregated")
    engines = next(document for document in documents() if document["metadata"]["name"] == "rl-engine")
    assert config.rollout.engines == engines["spec"]["replicas"]


def test_the_slurm_script_is_one() -> None:
    script = EXAMPLES / "slurm" / "rl_async.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n") and all(f"{role} --run" in text for role in ROLES)

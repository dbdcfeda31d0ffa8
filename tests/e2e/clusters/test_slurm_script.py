"""The Slurm script, run whole under stand-ins for ``srun`` and ``scontrol``: on one host, and on two of their own.

The two hosts are network namespaces with an address each and a cable between them; their file system is one. A
stand-in shows nothing of Slurm itself: how real steps are placed, limited and killed has not been tried.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.small_runs import APART, HARDLY_WARM, RL_ASYNC

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "slurm" / "rl_async.sbatch"
SCONTROL = '#!/bin/bash\nfor name in ${3//,/ }; do echo "$name"; done\n'
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  case $1 in --nodelist=*) node=${1#--nodelist=} ;; esac
  shift
done
"""
SMALL = [
    "trainer.steps=3",
    "data.train_batch_groups=4",
    "rollout.group_size=4",
    "eval.tasks=4",
    *HARDLY_WARM,
]


def run_script(folder: Path, nodes: list[str], step: str, *more: str, within: tuple[str, ...] = ()) -> None:
    """Run the script to its end, with ``more`` overrides; ``step`` is how the stand-in runs a command on ``$node``."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN + step)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_JOB_ID": str(secrets.randbelow(20_000)),
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "RUN": "runs/x",
        "OMP_NUM_THREADS": "1",
    }
    command = [*within, "bash", str(SCRIPT), "calculator", *SMALL, *more]
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(500)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    logs = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in (folder / "runs").glob("x/logs/*"))
    assert code == 0, (folder / "out").read_text()[-2000:] + logs


def assert_trained(folder: Path) -> None:
    run = folder / "runs" / "x"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    audit = subprocess.run([RL_ASYNC, "audit", str(run)], capture_output=True, text=True, timeout=100)
    assert audit.returncode == 0 and "ok: every admitted group" in audit.stdout, audit.stdout + audit.stderr
    assert "closed to clients without a key" in (run / "logs" / "queue.log").read_text()


def assert_ended(folder: Path) -> None:
    ours = [p for p in psutil.process_iter(["cwd", "cmdline"]) if p.info["cwd"] == str(folder)]
    _, left = psutil.wait_procs([p for p in ours if "runs/x" in (p.info["cmdline"] or [])], timeout=20)
    assert not left


@pytest.mark.nightly
def test_every_role_as_a_step(tmp_path: Path) -> None:
    run_script(tmp_path, ["a", "b"], 'exec "$@"\n')
    assert_trained(tmp_path)
    assert_ended(tmp_path)


def test_every_role_as_a_step_on_hosts_with_addresses_of_their_own(tmp_path: Path, hosts: dict[str, str]) -> None:
    """The queue, gradients, weights and the engines' answers cross from one host to the other."""
    step = 'echo "$node $*" >> steps; exec ip netns exec "$node" "$@"\n'
    first, second = hosts
    run_script(tmp_path, [first, second], step, "trainer.ranks=2", within=("ip", "netns", "exec", first))
    assert_trained(tmp_path)
    assert_ended(tmp_path)
    steps = [line.split() for line in (tmp_path / "steps").read_text().splitlines()]
    assert sorted(node for node, *command in steps if "rl_async.trainer" in command) == sorted([first, second])
    run = tmp_path / "runs" / "x"
    assert json.loads((run / "endpoints.json").read_text())["queue"].startswith("tcp://10.77.0.1:")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["correction/logprob_diff_max"] <= APART for row in metrics if row["staleness/max"] == 0)
    queue_port = int(json.loads((run / "endpoints.json").read_text())["queue"].rpartition(":")[2])
    assert f"added-{queue_port + 2}-" in (run / "logs" / "engines.log").read_text(), "the far engine took the weights"
    handed_over = re.search(r"(\d+) trajectories put, 0 samples failed", (run / "logs" / "worker-1.log").read_text())
    assert handed_over is not None and int(handed_over[1]) > 0, "the far worker reached queue and engines"

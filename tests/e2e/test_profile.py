"""Profiles of a live run: of steps that its config names, of the next step when asked, and of another process."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_async.process.role import py_spy
from rl_async.process.run_files import PHASES
from tests.chaos.agents.kinds import TASKS
from tests.chaos.agents.user_code import write_tasks
from tests.e2e.small_runs import HARDLY_WARM, call, start, succeed
from tests.support.forked import Forked
from tests.support.ports import free_port

LOOP = Path(__file__).parents[1] / "chaos" / "agents" / "user_code.py"
SMALL = [
    *("data.train_batch_groups=2", "rollout.group_size=2", "trainer.steps=500", "eval.every=0", "eval.tasks=2"),
    *("trainer.ranks=2", "trainer.profile={steps: [1]}", f"agent.loop={LOOP}:play", f"data.path={TASKS}"),
    *HARDLY_WARM,
]


@pytest.fixture
def launched(workplace: Path) -> Iterator[Forked]:
    write_tasks(workplace / TASKS)
    command = start(workplace, "launch", "--config", "calculator", "--name", "profiled", *SMALL)
    yield command
    command.kill()


def events(file: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_live_run_answers_with_profiles(workplace: Path, launched: Forked) -> None:
    run, deadline = workplace / "runs" / "profiled", time.monotonic() + 200
    configured = [run / "profiles" / f"step-000001-rank{rank}.json.gz" for rank in (0, 1)]
    while not all(file.exists() for file in configured):
        assert launched.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    for file in configured:
        names = {event["name"] for event in events(file)}
        assert names >= {*PHASES[1:5], "aten::mm"}

    asked = [Path(line) for line in succeed(workplace, "profile", str(run), "--steps", "2").splitlines()]
    assert len(asked) == 4 and {file.name[-13:-8] for file in asked} == {"rank0", "rank1"}
    assert all(any(event["name"] == "training" for event in events(workplace / file)) for file in asked)

    missing = call(workplace, "profile", str(run), "--process", "worker-9")
    assert missing.returncode == 2 and "--process" in missing.stderr
    if py_spy() is None:
        pytest.skip("`python -m pip install py-spy` installs py-spy")
    sampled = succeed(workplace, "profile", str(run), "--process", "worker-0", "--seconds", "1").strip()
    assert json.loads((workplace / sampled).read_text())["profiles"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_run_that_is_over_has_no_next_step(tmp_path: Path) -> None:
    nothing = call(tmp_path, "profile", "runs/none")
    assert nothing.returncode == 2 and "runs/none" in nothing.stderr


# A real Prometheus finds the processes of a run by its files, and answers every query of the dashboard.


EXAMPLES = Path(__file__).parents[2] / "examples" / "prometheus"
PROMETHEUS_SMALL = [
    *("data.train_batch_groups=2", "rollout.group_size=2", "trainer.steps=900", "eval.every=3", "eval.tasks=2"),
    *("trainer.ranks=2", "debug.min_train_s=0.5", "queue.shards=1", "queue.lease_s=4", "tracking.prometheus=true"),
    *(f"agent.loop={LOOP}:play", f"data.path={TASKS}", *HARDLY_WARM),
]
PROCESSES = {"queue", "shard-0", "worker-0", "engine-0", "trainer-0", "trainer-1"}


class Prometheus:
    """A Prometheus in ``folder``, with the example's configuration for a run there."""

    def __init__(self, folder: Path, run: str) -> None:
        text = (EXAMPLES / "prometheus.yml").read_text().replace("NAME", run).replace("5s", "1s")
        (folder / "prometheus.yml").write_text(text)
        self._address = f"127.0.0.1:{free_port()}"
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=tsdb"]
        self._log = (folder / "prometheus.log").open("w")
        listen = f"--web.listen-address={self._address}"
        self._process = subprocess.Popen([*command, listen], cwd=folder, stderr=self._log, stdout=self._log)

    def query(self, text: str) -> list[dict[str, Any]]:
        """The samples that a query finds now; none while Prometheus starts."""
        question = urllib.parse.urlencode({"query": text})
        try:
            with urllib.request.urlopen(f"http://{self._address}/api/v1/query?{question}", timeout=20) as answer:
                return json.load(answer)["data"]["result"]
        except ConnectionError:
            return []
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:  # it is starting
                    return []
                raise AssertionError(f"{text}: {error.read().decode()}") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, ConnectionError):
                return []
            raise

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


@pytest.fixture
def prometheus_launched(workplace: Path) -> Iterator[Forked]:
    if shutil.which("prometheus") is None:
        pytest.skip("`apt-get install prometheus` installs Prometheus")
    write_tasks(workplace / TASKS)
    command = start(workplace, "launch", "--config", "calculator", "--name", "watched", *PROMETHEUS_SMALL)
    yield command
    command.kill()


def kill(run: Path, name: str) -> bool:
    """Kill a process of the run."""
    (pid,) = [entry["pid"] for entry in json.loads((run / "processes.json").read_text()) if entry["name"] == name]
    os.kill(pid, signal.SIGKILL)
    return True


def queries(run: str) -> list[str]:
    """Those of the dashboard, with its variables filled in."""
    panels = json.loads((EXAMPLES / "grafana.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [text.replace("$run", run).replace("$__rate_interval", "20s") for text in found]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_prometheus_scrapes_every_process_and_answers_the_dashboard(
    workplace: Path, prometheus_launched: Forked
) -> None:
    prometheus, deadline = Prometheus(workplace, "watched"), time.monotonic() + 240
    try:
        up, silent, killed = set[str](), set(queries("watched")), False
        assert len(silent) > 25
        while (up != PROCESSES or silent) and time.monotonic() < deadline:
            assert prometheus_launched.poll() is None, (
                workplace / "runs" / "watched" / "logs" / "launcher.log"
            ).read_text()
            time.sleep(1)
            up = {sample["metric"]["name"] for sample in prometheus.query("up == 1")}
            silent = {text for text in silent if not prometheus.query(text)}
            if up == PROCESSES and not killed:
                killed = kill(workplace / "runs" / "watched", "worker-0")  # an event of the queue, and a restart
        assert (up, silent) == (PROCESSES, set())
        (spread,) = prometheus.query('count(count by (role) (process_start_time_seconds{run="watched"}))')
        assert spread["value"][1] == "5", "each of our processes reports itself"
    finally:
        prometheus.end()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:grafana_foundation_sdk")
def test_the_dashboard_has_only_keys_that_grafana_knows() -> None:
    encoder = pytest.importorskip(
        "grafana_foundation_sdk.cog.encoder", reason="`pip install grafana-foundation-sdk` installs Grafana's schema"
    )
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    given = json.loads((EXAMPLES / "grafana.json").read_text())
    known = json.loads(encoder.JSONEncoder(sort_keys=True, indent=1).encode(Dashboard.from_json(given)))
    assert lost(given, known) == []
    assert lost(given | {"pannels": []}, known) == ["/pannels"], "an unknown key would be found"


def lost(given: Any, known: Any, path: str = "") -> list[str]:
    """Where a JSON value is not in another one."""
    if isinstance(given, dict) and isinstance(known, dict):
        return [
            place
            for key, value in given.items()
            for place in (lost(value, known[key], f"{path}/{key}") if key in known else [f"{path}/{key}"])
        ]
    if isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        return [place for n, pair in enumerate(zip(given, known, strict=True)) for place in lost(*pair, f"{path}/{n}")]
    return [] if given == known else [path]


def test_every_panel_has_a_title_and_a_place_of_its_own() -> None:
    panels = json.loads((EXAMPLES / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) and all(panel["title"] for panel in panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    assert not [text for text in queries("r") if re.search(r"\$\w", text)], "every variable is filled in"

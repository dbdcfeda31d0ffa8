"""What a process answers to Prometheus, and how Prometheus finds it."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from rl_async.process.http_auth import bearer, make_tokens, run_token
from rl_async.process.http_server import exposed, gauge
from rl_async.process.run_files import Target, write_targets


class Apples:
    """Counts how often it was read."""

    def __init__(self) -> None:
        self.reads = 0

    def collect(self) -> Iterator[Metric]:
        self.reads += 1
        yield gauge("apples", "Apples.", self.reads)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_tokens(tmp_path / "keys")
    return tmp_path


def scrape(address: str, token: str) -> dict[str, float]:
    request = urllib.request.Request(f"http://{address}/metrics", headers=bearer(token))
    with urllib.request.urlopen(request, timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def test_a_process_is_found_through_its_file_and_answers_with_numbers_of_that_moment(run: Path) -> None:
    apples = Apples()
    with exposed(True, run, "worker", "worker-0", apples):
        (target,) = json.loads((run / "prometheus" / "worker-0.json").read_text())
        assert target["labels"] == {"run": run.name, "role": "worker", "name": "worker-0"}
        (address,) = target["targets"]
        assert address.startswith("127.0.0.1:") and apples.reads == 0
        token = run_token(run, "metrics")
        assert [scrape(address, token)["apples"] for _ in range(2)] == [1, 2]
        assert scrape(address, token)["process_resident_memory_bytes"] > 1e6
        with pytest.raises(urllib.error.HTTPError) as refused:
            scrape(address, "0" * 43)
        refused.value.close()
        assert refused.value.code == 401
    assert list((run / "prometheus").iterdir()) == []


def test_unwanted_nothing_listens_and_nothing_is_written(run: Path) -> None:
    with exposed(False, run, "worker", "worker-0", Apples()):
        assert not (run / "prometheus").exists()


def test_engines_are_listed_in_one_file_that_goes_with_the_last(run: Path) -> None:
    targets = [Target.at(f"http://10.0.0.{n}:80{n}0", "engine", f"engine-{n}") for n in (1, 2)]
    write_targets(run, "engines", targets)
    listed = json.loads((run / "prometheus" / "engines.json").read_text())
    assert [entry["targets"] for entry in listed] == [["10.0.0.1:8010"], ["10.0.0.2:8020"]]
    write_targets(run, "engines", [])
    write_targets(run, "engines", [])
    assert list((run / "prometheus").iterdir()) == []

"""What is said of a machine; what must be there, and what would only be better."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from rl_async.configs.engines import ENGINES, in_range
from rl_async.configs.load import load_config
from rl_async.launcher import machine_check as s
from rl_async.launcher.machine_check import RANGES, TRIED, untried
from tests.support.configs import float32_config

ROOT = Path(__file__).parents[3]
HERE = {"python": "3.11.9", "torch": "2.13.0+cpu", "transformers": "5.24.1", "vllm": "", "sglang": ""}


def levels(lines: list[s.Finding]) -> list[str]:
    return [line.level for line in lines]


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("5.0.0rc1", ">=5", True),
        ("0.32.7", "==0.32.*", True),
        ("0.33.0", "==0.32.*", False),
        ("0.33.1", ">=0.32,<0.34", True),
        ("0.34.0", ">=0.32,<0.34", False),
        ("0.31.0", ">=0.32,<0.34", False),
        ("0.5.23", "==0.5.23", True),
        ("0.5.2", "==0.5.23", False),
        ("0.5.23.1", "==0.5.23", False),
    ],
)
def test_versions_are_compared_as_numbers(version: str, wanted: str, fits: bool) -> None:
    assert in_range(version, wanted) is fits


def requirements() -> dict[str, str]:
    """Every range of pyproject.toml, by package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    parted = (re.fullmatch(r"([\w.-]+)(?:\[.*\])?([^;]*)(?:;.*)?", line) for line in lines)
    return {match[1]: match[2].strip() for match in parted if match} | {"python": project["requires-python"]}


def test_the_ranges_are_those_of_pyproject() -> None:
    assert requirements().items() >= RANGES.items()


def test_what_was_run_is_within_the_ranges_and_what_is_pinned_was_run() -> None:
    ranges = requirements()
    for name, trials in TRIED.items():
        assert all(in_range(trial.version, ranges[name]) for trial in trials if name in ranges), name
    files = ("constraints.txt", "scripts/install")
    pins = [pin for file in files for pin in re.findall(r"^[^#\n]*?\b([\w-]+)==([\w.]+)", words(file), re.MULTILINE)]
    builds = {build: traits.package for traits in ENGINES.values() for build in traits.builds}
    seen = set()
    for name, version in pins:
        name = builds.get(name, name)
        if name in TRIED:
            seen.add(name)
            assert version in {trial.version for trial in TRIED[name]}, f"{name}=={version}"
    # pyproject.toml pins these two to one version each.
    assert seen >= TRIED.keys() - {"python", "sglang", "megatron-core"}


def words(file: str) -> str:
    """A file's text with each word on a line of its own, without comments."""
    lines = (line.partition("#")[0] for line in (ROOT / file).read_text().splitlines())
    return "\n".join(" ".join(lines).replace('"', " ").split())


def test_a_package_is_ok_too_old_or_missing() -> None:
    assert levels(s.package_lines(s.Probe(HERE), ("torch", "transformers"), "here")) == ["ok", "ok"]
    old = s.package_lines(s.Probe(HERE | {"torch": "2.4.0"}), ("torch", "vllm"), "here")
    assert levels(old) == ["warning", "missing"]
    assert "rl-async[vllm]" in old[1].what_to_do
    (broken,) = s.package_lines(s.Probe({"error": "no libfoo"}), ("torch",), "here")
    assert broken.text == "missing  torch cannot be imported here: no libfoo; pip install -e ."
    (broken,) = s.package_lines(s.Probe({"error": "no such file"}), ("vllm",), "in /no/python")
    assert "in /no/python: no such file; give a Python" in broken.text and "rollout.python" in broken.text


def test_versions_that_were_never_run_are_warned_of_by_series() -> None:
    probe = s.Probe(HERE | {"torch": "2.99.0", "transformers": "5.0.1"})
    new = s.package_lines(probe, ("torch", "transformers"), "here")
    assert levels(new) == ["warning", "warning"] and "2.99.0" in new[0].what and "5.0.1" in new[1].what
    assert s.untried_lines(s.Probe(HERE)) == []
    others = HERE | {"python": "3.99.1", "peft": "99.0", "ray": ""}
    named = [line.what.split()[:2] for line in s.untried_lines(s.Probe(others))]
    assert named == [["python", "3.99.1"], ["peft", "99.0"]]
    assert untried("sglang", "0.5.24") and not untried("sglang", "0.5.23") and not untried("unheard-of", "1")


def test_engines_that_a_replay_does_not_start_need_nothing() -> None:
    many = ["rollout.engines=8", "agent.workers=8"]
    replay = float32_config("calculator", [*many, "rollout.replay=runs/before"])
    fewest = float32_config("calculator", ["rollout.engines=1", "agent.workers=1"])
    assert s.needed_bytes(replay) < s.needed_bytes(fewest) < s.needed_bytes(float32_config("calculator", many))
    vllm = ["rollout.engine=vllm", "rollout.replay=runs/before"]
    assert "missing" not in levels(s.engine_lines(s.Probe(HERE), load_config("calculator", vllm)))


def test_megatron_is_missing_only_for_a_trainer_that_uses_it() -> None:
    config = load_config("calculator", ["trainer.backend=megatron"])
    assert levels(s.backend_lines(config, installed=False)) == ["missing"]
    assert levels(s.backend_lines(config, installed=True)) == ["ok"]
    assert s.backend_lines(load_config("calculator"), installed=False) == s.backend_lines(None, installed=False) == []


def test_devices_are_missing_only_where_they_are_asked_for() -> None:
    cuda = load_config("calculator", ["model.device=gpu"])
    assert levels(s.device_lines(s.Probe(HERE), 0, None)) == ["ok"]
    assert levels(s.device_lines(s.Probe(HERE), 0, cuda)) == ["missing"]
    assert levels(s.device_lines(s.Probe(HERE), 2, None)) == ["warning"]
    assert levels(s.device_lines(s.Probe(HERE, ["H200"], "NCCL 2.27.5"), 1, cuda)) == ["ok", "ok"]
    several = load_config("calculator", ["rollout.engine=vllm", "rollout.tensor_parallel=2"])
    assert levels(s.device_lines(s.Probe(HERE, ["H200"], "NCCL 2.27.5"), 1, several)) == ["missing", "ok"]
    assert levels(s.device_lines(s.Probe(HERE, ["H200"] * 2, "NCCL 2.27.5"), 2, several)) == ["ok", "ok"]
    assert levels(s.device_lines(s.Probe(HERE, ["H200"] * 2), 2, several)) == ["ok", "warning"]


def test_an_engine_must_be_there_if_the_config_wants_it() -> None:
    assert levels(s.engine_lines(s.Probe(HERE), None)) == ["ok", "ok"]
    wants = load_config("calculator", ["rollout.engine=vllm"])
    assert sorted(levels(s.engine_lines(s.Probe(HERE), wants))) == ["missing", "ok"]
    assert levels(s.engine_lines(s.Probe(HERE | {"vllm": "0.32.1"}), wants)) == ["ok", "ok"]


def test_a_python_that_cannot_be_run_is_an_answer() -> None:
    assert "/no/such/python" in s.probe("/no/such/python").versions["error"]


def test_memory_and_cores_are_those_of_the_cgroup(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 9 kB\nMemAvailable: 4194304 kB\n")
    assert s.available_bytes(tmp_path, info) == 4 << 30
    (tmp_path / "memory.max").write_text(f"{3 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 30}\n")
    assert s.available_bytes(tmp_path, info) == 2 << 30
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert s.cores(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert s.cores(tmp_path) >= 1


def test_what_is_small_is_a_warning_with_a_way_out() -> None:
    for line in (s.memory_line(1 << 30, 2 << 30), s.cores_line(1), s.shm_line(64 << 20), s.files_line(256, 4096)):
        assert line.level == "warning" and line.what_to_do
    assert "ulimit -n 4096" in s.files_line(256, 4096).text
    assert s.ports_line(3).level == "missing" and s.ports_line(s.PORTS).level == "ok"


def test_redis_is_looked_for_only_if_the_journal_is_there() -> None:
    assert s.redis_lines(load_config("calculator", []), None) == []
    wants = load_config("calculator", ["queue.journal=redis", "queue.redis.url=redis://127.0.0.1:1/0"])
    assert s.redis_lines(wants, None)[0].what_to_do == "install redis-server and start it"


def test_the_choice_for_a_config_and_for_a_model_of_usual_size_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config, lines = s.settled(load_config("calculator"))
    assert config is not None and config.model.dtype == "float32" and set(levels(lines)) == {"ok"}
    assert any("float32" in line.what and "model.dtype" in line.what for line in lines)
    assert any("launcher.threads" in line.what for line in lines)
    config, lines = s.settled(None)
    assert config is None and any("GFLOP/s" in line.what for line in lines)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    config, lines = s.settled(load_config("calculator-moe", ["warm_start.hidden_size=2048"]))
    assert config is not None and config.model.dtype == "float32" and levels(lines) == ["missing"]

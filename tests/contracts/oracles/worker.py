"""Computes other projects' formulas for the tests, in the environment in which those are installed.

    .venv-oracles/bin/python worker.py verl|trl

Standard input has one request a line, a JSON array of the formula's name, the file with the cases, and the file for the
answers (``oracle.py`` writes and reads them). A line on standard output says that the answers are there (null), or
what was raised. Nothing of rl-async is imported here.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Formula = Callable[[dict[str, Tensor], dict[str, Any]], dict[str, Tensor]]


def compute(formula: Formula, cases: str, answers: str) -> None:
    """Write what ``formula`` makes of each case in the file ``cases`` to the file ``answers``."""
    with safe_open(cases, "pt") as file:
        options = json.loads(file.metadata()["options"])
        tensors: list[dict[str, Tensor]] = [{} for _ in options]
        for key in file.keys():  # noqa: SIM118 (no mapping)
            number, _, name = key.partition(".")
            tensors[int(number)][name] = file.get_tensor(key)
    found = [formula(given, numbers) for given, numbers in zip(tensors, options, strict=True)]
    save_file({f"{i}.{name}": t.contiguous() for i, one in enumerate(found) for name, t in one.items()}, answers)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the projects print goes elsewhere
    sys.path.insert(0, str(Path(__file__).parent))
    formulas = importlib.import_module(f"{sys.argv[1]}_formulas").FORMULAS
    for line in sys.stdin:
        name, cases, answers = json.loads(line)
        try:
            compute(formulas[name], cases, answers)
            reply = None
        except Exception:  # whatever a formula raises fails the test that asked, and not those after it
            reply = traceback.format_exc()
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()

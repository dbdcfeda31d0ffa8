#!/usr/bin/env python3
"""Fail on what basedpyright finds on the plain checkout, as an editor would: an import that does not resolve, a call
whose arguments do not fit, a coroutine that is not awaited, in tests, benchmarks and examples too, which mypy skips.
"""

import json
import subprocess
import sys

# Packages that `make setup-test` leaves out.
OPTIONAL = {"liger_kernel", "megatron", "mlflow", "ray", "sglang", "torchao", "vllm", "wandb"}  # extras
OPTIONAL |= {"gymnasium", "openenv", "pettingzoo", "textarena", "verifiers"}  # of scripts/install environments
OPTIONAL |= {"anthropic", "datasets", "pydantic_ai", "tensordict", "trl", "verl"}  # of tests and benchmarks
OPTIONAL |= {"grafana_foundation_sdk"}  # the same
OPTIONAL |= {"agents", "langchain", "langchain_openai", "litellm", "smolagents"}  # that tests.agent_programs installs

command = ["basedpyright", "--outputjson", "--pythonpath", sys.executable]
report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
if not report["summary"]["filesAnalyzed"]:
    sys.exit("basedpyright found no file to analyze")
errors = []
for found in report["generalDiagnostics"]:
    package = found["message"].partition('"')[2].partition('"')[0].partition(".")[0]
    if found["severity"] == "error" and not (found.get("rule") == "reportMissingImports" and package in OPTIONAL):
        errors.append(f"{found['file']}:{found['range']['start']['line'] + 1}: {found['message']}")
sys.exit("\n".join(errors) or None)

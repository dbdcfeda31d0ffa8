"""Router replay on every backend and layout: the same numbers and gradients as FSDP2 on one rank."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.contracts.backends.models import LAYERS, TERMS, assert_alike, make_model
from tests.support.forked import run_ranks, start_ranks
from tests.support.rounding import assert_near, pass_rounding

MEGATRON = {"backend": "megatron"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2 x2": (2, {"activation_checkpointing": True}),
    "megatron x1": (1, MEGATRON),
    "megatron EP2": (2, MEGATRON | {"expert_parallel": 2}),
    "megatron x2 that share rows": (2, MEGATRON | {"sequence_parallel": 2}),
    "megatron PP2": (2, MEGATRON | {"pipeline_parallel": 2}),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_records_lead_to_the_same_numbers_and_weights(layout: str, tmp_path: Path) -> None:
    ranks, sizes = LAYOUTS[layout]
    if sizes.get("backend") == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    make_model("qwen3-moe", tmp_path / "model")
    told = []
    for number, (size, options) in enumerate([(1, {}), (ranks, sizes)]):
        out = tmp_path / f"{number}.safetensors"
        arguments = [json.dumps(options), str(tmp_path / "model"), str(out)]
        run_ranks("tests.contracts.backends.replay", *arguments, ranks=size, timeout_s=280)
        told.append(load_file(out))
    wanted, found = told
    assert (wanted["logprobs"] - wanted["logprobs without"]).abs().max() > 1e-2, "the record changes nothing"
    assert wanted.keys() - {"agreement"} == found.keys() - {"agreement"}
    outputs = {"logprobs", "logprobs without", "agreement"}
    for name in outputs & found.keys():
        size = wanted[name].abs().max().item()
        assert_near(found[name], wanted[name], pass_rounding(size, LAYERS, TERMS), name)
    of_step, expected = ({name: told[name] for name in told.keys() - outputs} for told in (found, wanted))
    assert_alike(of_step, expected, steps=1)
    assert ("agreement" in found) == ("pipeline_parallel" not in sizes)


def test_tensor_parallel_ranks_that_must_replay_do_not_start(tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    make_model("qwen3-moe", tmp_path / "model")
    options = MEGATRON | {"tensor_parallel": 2, "expert_parallel": 2, "router_replay": "always"}
    arguments = [json.dumps(options), str(tmp_path / "model"), str(tmp_path / "out")]
    processes = start_ranks("tests.contracts.backends.replay", *arguments, ranks=2)
    errors = [process.communicate(280)[1] for process in processes]
    assert all("UserError: trainer.router_replay=always" in error for error in errors), errors

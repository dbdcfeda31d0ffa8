"""Whole runs that train adapters, stopped half way and gone on with: engines get merged weights, or the adapters alone,
which they add to the base or load beside it."""

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.command import HARDLY_WARM, succeed
from tests.e2e.small_runs import APART

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("peft") is None,
        reason="PEFT is not here; install it with pip install 'rl-async[lora]'",
    ),
]
SMALL = [
    "data.train_batch_groups=4",
    "rollout.group_size=4",
    "trainer.ranks=2",
    "trainer.learning_rate=1e-3",
    "trainer.activation_checkpointing=true",
    "trainer.lora={rank: 4, targets: [q_proj, down_proj]}",
    "trainer.checkpoint_hf=false",
    "algorithm.entropy_coef=0.01",  # so that there is a gradient, whatever the rewards
    "eval.every=0",
    "eval.tasks=4",
    *HARDLY_WARM,
]


@pytest.mark.parametrize(
    ("mode", "sync"),
    [("disaggregated", "delta=true"), ("colocated", "adapters=add"), ("disaggregated", "adapters=auto")],
)
def test_a_run_of_adapters_goes_on_and_is_exported_whole(workplace: Path, mode: str, sync: str) -> None:
    launch = ["launch", "--mode", mode, "--config", "calculator", "--name", "run", *SMALL, f"weight_sync.{sync}"]
    succeed(workplace, *launch, "trainer.steps=2")
    succeed(workplace, *launch, "trainer.steps=3", "--resume")
    run = workplace / "runs" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["loss/grad_norm"] > 0 for row in rows)
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) <= APART, "engines got other weights"
    succeed(workplace, "export", "runs/run", "out")
    adapter = load_file(run / "checkpoints" / "step-000003" / "adapter" / "adapter_model.safetensors")
    if "adapters" in sync:
        assert {row["sync/bytes"] for row in rows} == {sum(tensor.nbytes for tensor in adapter.values())}
    succeed(workplace, "export", "runs/run", "apart", "--adapter")
    apart = load_file(workplace / "apart" / "adapter_model.safetensors")
    assert apart.keys() == adapter.keys() and all(apart[name].equal(adapter[name]) for name in adapter)
    path = json.loads((run / "checkpoints" / "step-000003" / "adapter" / "base.json").read_text())["path"]
    base, merged = load_file(Path(path) / "model.safetensors"), load_file(workplace / "out" / "model.safetensors")
    changed = {name.rpartition(".layers.")[2].split(".", 1)[-1] for name in base if not base[name].equal(merged[name])}
    assert changed == {"self_attn.q_proj.weight", "mlp.down_proj.weight"}

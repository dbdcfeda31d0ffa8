"""From a pretrained model to a run with tools in one command, as the preset `smollm2-tools` does; the model is tiny."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.command import HARDLY_WARM, succeed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
MODEL = "artifacts/smollm2-tools/model"
SMALL = [
    *("model.dtype=float32", "rollout.max_model_len=512", "agent.max_tokens=512", "launcher.threads=1"),
    *("trainer.steps=2", "data.train_batch_groups=2", "rollout.group_size=2", "trainer.checkpoint_every=0"),
    *("eval.tasks=4", "warm_start.pretrained={path: base, batch_size: 114}"),
]


def test_one_command_fine_tunes_and_trains_with_both_tools(tmp_path: Path) -> None:
    base = ("model.path=base", "warm_start.out=base", "rollout.max_model_len=512")
    succeed(tmp_path, "sft", "--config", "calculator", *HARDLY_WARM, *base)
    launch = ("launch", "--mode", "disaggregated", "--config", "smollm2-tools", "--name", "tools")
    shown = succeed(tmp_path, *launch, *SMALL)
    assert re.search(r"held-out loss per token \S+ before, \S+ after; model: " + MODEL, shown)
    assert (tmp_path / MODEL / "sft.json").is_file()
    log = [json.loads(line) for line in (tmp_path / "runs" / "tools" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [0, 1]
    assert "ok: every admitted group" in succeed(tmp_path, "audit", "runs/tools")
    assert f"{MODEL} exists" in succeed(tmp_path, "sft", "--config", "smollm2-tools", *SMALL)

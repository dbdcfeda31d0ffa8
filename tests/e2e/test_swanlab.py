"""SwanLab in offline mode, in a process of its own because it keeps global state."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from pathlib import Path
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig, TrackingConfig
from rl_async.trainer.monitoring.trackers import Tracking
config = RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"),
                   tracking=TrackingConfig(backends=("swanlab",)), name="test")
tracking = Tracking(config, Path(sys.argv[1]))
for step in range(3):
    tracking.log(step, {"reward/mean": 0.5 + 0.1 * step})
assert "swanlab" in tracking._live, "it was dropped"
tracking.close()
"""


def test_offline_swanlab_writes_into_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("swanlab", reason="pip install 'rl-async[swanlab]'")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = [p for p in (tmp_path / "swanlab").rglob("*") if p.is_file() and p.stat().st_size]
    assert written
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3

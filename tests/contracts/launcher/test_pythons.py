"""The Pythons of engines, asked for what they have."""

import subprocess
import sys
from pathlib import Path

import pytest

from rl_async.configs.load.loader import load_config
from rl_async.errors import UserError
from rl_async.launcher.plan.machine import check_sglang


def test_sglang_must_be_installed_where_it_is_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=60)
    [site] = bare.glob("lib/python*/site-packages")
    config = load_config("calculator", ["rollout.engine=sglang", f"rollout.python={bare}/bin/python"])
    with pytest.raises(UserError, match=r"has no SGLang; install `rl-async\[sglang\]`.*rollout\.python"):
        check_sglang(config)
    (site / "sglang.py").touch()
    with pytest.raises(UserError, match="SGLang but not rl-async beside it"):
        check_sglang(config)
    (site / "rl_async.py").touch()
    check_sglang(config)

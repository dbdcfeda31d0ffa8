"""The trial of agent programs, with the one whose client the tests have: played confined, trained, and audited."""

import shutil
import sys
from pathlib import Path

import pytest

from rl_async.sandbox.bubblewrap import INSTALL
from tests.agent_programs.clients import PLAYERS, Client
from tests.agent_programs.puppet import make_puppet
from tests.agent_programs.trial import run_trial

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(580)]
pytestmark.append(pytest.mark.skipif(shutil.which("bwrap") is None, reason=INSTALL))
pytest.importorskip("openai", reason="install the openai client: pip install openai")


def test_a_program_calls_tools_and_all_its_episodes_are_trained(tmp_path: Path) -> None:
    client = Client(("openai",), (sys.executable, str(PLAYERS / "openai_client.py"), "chat", "{prompt}"))
    make_puppet(client.lines, model := tmp_path / "model")
    found = run_trial("openai-chat", client, tmp_path / "trial", Path(sys.prefix), model)
    assert found.episodes == 8 <= found.rows and found.results > 0 == found.given_back
    assert found.answers > found.episodes and found.difference < 1e-4

"""The exit codes of a role's errors, also of those that come in groups."""

import pytest

from rl_async.errors import EXIT_RESTART, EXIT_USER, ConfigError, QueueLost, RlAsyncError
from rl_async.process.role import run_role


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a key"), EXIT_USER),
        (ExceptionGroup("", [ExceptionGroup("", [ConfigError("a key")])]), EXIT_USER),
        (ExceptionGroup("", [QueueLost("gone")]), EXIT_RESTART),
    ],
)
def test_a_mistake_of_the_user_is_told_as_one(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise error

    assert run_role("agent", work, {RlAsyncError: EXIT_RESTART}) == code
    assert ("error: a key\n" in capsys.readouterr().err) is (code == EXIT_USER)

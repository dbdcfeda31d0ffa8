from pathlib import Path

import pytest

from rl_async.launcher.runs.launch import present_token


def wanted() -> bool:
    return True


def test_without_a_token_none_is_presented(tmp_path: Path) -> None:
    environment = {"PATH": "/bin"}
    assert not present_token(environment, tmp_path, wanted)
    assert environment == {"PATH": "/bin"}


@pytest.mark.parametrize("variable", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_of_the_environment_is_presented(tmp_path: Path, variable: str) -> None:
    environment = {variable: "x"}
    assert present_token(environment, tmp_path, wanted)
    assert environment["RAY_AUTH_MODE"] == "token"


def test_the_token_that_ray_generates_is_presented(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x")
    environment: dict[str, str] = {}
    assert present_token(environment, tmp_path, wanted)
    assert environment == {"RAY_AUTH_MODE": "token"}


def test_what_the_user_says_counts(tmp_path: Path) -> None:
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x"}
    assert not present_token(environment, tmp_path, wanted)
    assert environment["RAY_AUTH_MODE"] == "disabled"


def test_a_cluster_that_wants_no_token_gets_none(tmp_path: Path) -> None:
    environment = {"RAY_AUTH_TOKEN": "x"}
    assert not present_token(environment, tmp_path, lambda: False)
    assert environment["RAY_AUTH_MODE"] == "disabled"

"""Which rl-async is installed, and the command that installs the same beside an engine."""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import rl_async
from rl_async import installation


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Metadata of rl-async 7.8, found before those of the installation that runs the tests."""
    folder = tmp_path / "site" / "rl_async-7.8.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-async\nVersion: 7.8\n")
    monkeypatch.syspath_prepend(folder.parent)
    return folder


def came_from(installed: Path, **source: Any) -> list[str]:
    """Record the source as pip does; return the arguments of pip that install the same."""
    (installed / "direct_url.json").write_text(json.dumps(source))
    words = shlex.split(installation.install_beside("/a folder/python", *installation.BESIDE_ENGINES))
    assert words[:5] == ["/a folder/python", "-m", "pip", "install", "--no-deps"] and words[-1] == "xxhash"
    return words[5:-1]


def test_the_version_is_that_of_the_installation(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rl_async.__version__ == installation.version() == "7.8"
    left = tmp_path / "checkout" / "rl_async.egg-info"
    left.mkdir(parents=True)
    (left / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: rl-async\nVersion: 6\n")
    monkeypatch.syspath_prepend(left.parent)
    assert installation.version() == "7.8", "a build left these in a checkout"


def test_the_same_rl_async_comes_from_where_this_one_came(installed: Path, tmp_path: Path) -> None:
    words = shlex.split(installation.install_beside("python", *installation.BESIDE_ENGINES))
    assert words[5:-1] == ["rl-async==7.8"] and installation.commit() == ""
    place = tmp_path / "a folder"
    place.mkdir()
    assert came_from(installed, url=place.as_uri(), dir_info={"editable": True}) == ["--editable", str(place)]
    assert came_from(installed, url=place.as_uri(), dir_info={}) == [str(place)]
    address = "https://example.org/rl_async-7.8-py3-none-any.whl"
    assert came_from(installed, url=address, archive_info={}) == [f"rl-async @ {address}"]
    wheel = tmp_path / "rl_async-7.8-py3-none-any.whl"
    # A wheel that was deleted since cannot be installed again.
    assert came_from(installed, url=wheel.as_uri(), archive_info={}) == ["rl-async==7.8"]
    wheel.touch()
    assert came_from(installed, url=wheel.as_uri(), archive_info={}) == [str(wheel)]
    repository = {"url": "https://example.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    assert came_from(installed, **repository) == ["rl-async @ git+https://example.org/r.git@abc"]
    assert installation.commit() == "abc"


def test_the_commit_of_a_checkout_is_known_if_it_is_installed_editable(installed: Path, tmp_path: Path) -> None:
    place = tmp_path / "checkout"

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", *who, *arguments], cwd=place, check=True, capture_output=True, text=True).stdout

    place.mkdir()
    git("init", "--quiet")
    (place / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "--message=first")
    came_from(installed, url=place.as_uri(), dir_info={})
    assert installation.commit() == "", "the checkout may have moved on since"
    came_from(installed, url=place.as_uri(), dir_info={"editable": True})
    head = git("rev-parse", "HEAD").strip()
    assert installation.commit() == head
    (place / "file").write_text("2")
    assert installation.commit() == f"{head}+changes"
    (place / ".git/HEAD").unlink()
    assert installation.commit() == ""

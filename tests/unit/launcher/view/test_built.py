"""The built page that is shipped is what its sources give, and refers to nothing outside."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
STATIC = ROOT / "launcher" / "view" / "static"
WEB = ROOT / "launcher" / "view" / "web"


def test_the_page_refers_to_its_own_files_alone() -> None:
    page = (STATIC / "index.html").read_text()
    files = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(files) == 3 and all((STATIC / file.removeprefix("/")).is_file() for file in files)
    assert not re.search(r"<script(?![^>]*\bsrc=)|style=|\son\w+=", page), "the policy forbids what stands inline"
    assert "http" not in re.sub(r"/\*!.*?\*/", "", (STATIC / "app.css").read_text(), flags=re.DOTALL)


def test_the_page_is_built_from_its_sources(tmp_path: Path) -> None:
    if not (WEB / "node_modules").is_dir() or shutil.which("node") is None:
        pytest.skip("install the page's tools: npm ci --prefix launcher/view/web")
    subprocess.run([ROOT / "scripts" / "build_view", tmp_path], check=True, timeout=150)
    built = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert built.keys() == {"app.js", "app.css", "licenses.txt"}
    differs = [name for name, content in built.items() if (STATIC / name).read_bytes() != content]
    assert not differs, "run scripts/build_view"

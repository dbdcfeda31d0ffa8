"""The page's sources: the built files are theirs, and a report searches as the server does."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
STATIC = ROOT / "insight" / "view" / "static"
WEB = ROOT / "insight" / "view" / "web"


def test_the_page_refers_to_its_own_files_alone() -> None:
    page = (STATIC / "index.html").read_text()
    files = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(files) == 3 and all((STATIC / file.removeprefix("/")).is_file() for file in files)
    assert not re.search(r"<script(?![^>]*\bsrc=)|style=|\son\w+=", page), "the policy forbids what stands inline"
    assert "http" not in re.sub(r"/\*!.*?\*/", "", (STATIC / "app.css").read_text(), flags=re.DOTALL)


def test_the_page_is_built_from_its_sources(tmp_path: Path) -> None:
    if not (WEB / "node_modules").is_dir() or shutil.which("node") is None:
        pytest.skip("install the page's tools: npm ci --prefix insight/view/web")
    subprocess.run([ROOT / "scripts" / "build_view", tmp_path], check=True, timeout=150)
    built = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert built.keys() == {"app.js", "app.css", "licenses.txt"}
    differs = [name for name, content in built.items() if (STATIC / name).read_bytes() != content]
    assert not differs, "run scripts/build_view"


ASKED = """
import { embedded, sameTask } from "./embedded";
const { report, row } = JSON.parse(await new Response(process.stdin as any).text());
console.log(JSON.stringify(embedded(report)(`runs/r/trajectories?${sameTask(row)}`)));
"""


def test_the_same_task_over_time_is_the_newest_of_its_data_source(tmp_path: Path) -> None:
    if not (WEB / "node_modules").is_dir() or shutil.which("node") is None:
        pytest.skip("install the page's tools: npm ci --prefix insight/view/web")
    bundled = subprocess.run(
        [WEB / "node_modules/.bin/esbuild", "--bundle", "--format=esm", "--loader=ts", f"--outfile={tmp_path}/ask.mjs"],
        input=ASKED,
        cwd=WEB / "src",
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert bundled.returncode == 0, bundled.stderr
    numbers = {"partition": "train", "grp": 0, "sample": 0, "segment": 0}
    rows = [{**numbers, "step": n // 2, "task": "1", "source": ("math", "")[n % 2]} for n in range(300)]

    def asked(source: str) -> dict[str, Any]:
        run = {"rows": rows, "trajectories": {}, "recorded": {"trajectories": 300}}
        given = {"report": {"runs": [], "run": {"r": run}}, "row": {"task": "1", "source": source}}
        node = ["node", str(tmp_path / "ask.mjs")]
        said = subprocess.run(node, input=json.dumps(given), capture_output=True, text=True, check=True, timeout=60)
        return dict(json.loads(said.stdout))

    for source in ("math", ""):
        found = asked(source)
        assert found["count"] == 150 and {row["source"] for row in found["rows"]} == {source}
        assert [row["step"] for row in found["rows"]] == [*range(149, 49, -1)]

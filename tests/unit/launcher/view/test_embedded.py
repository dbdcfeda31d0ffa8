"""What a report file answers to its page, and what the page asks: in Node, from the page's own sources."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

WEB = Path(__file__).parents[4] / "launcher" / "view" / "web"
ASKED = """
import { embedded, sameTask } from "./embedded";
const { report, row } = JSON.parse(await new Response(process.stdin as any).text());
console.log(JSON.stringify(embedded(report)(`runs/r/trajectories?${sameTask(row)}`)));
"""


def test_the_same_task_over_time_is_the_newest_of_its_data_source(tmp_path: Path) -> None:
    if not (WEB / "node_modules").is_dir() or shutil.which("node") is None:
        pytest.skip("install the page's tools: npm ci --prefix launcher/view/web")
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

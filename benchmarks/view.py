"""How `rl-async view` copes with many trajectories: time to the first page, memory of the server, time of a search.

    python -m benchmarks.view --trajectories 100000 --evaluated 100000 --json FILE

It records a run of so many trained and held-out trajectories, with a tokenizer, starts the command, and asks as the
page does: for the first page of the list while the index is made, then, once it is, for searches and filters, for one
trajectory of the oldest step with the texts of its tokens, for all evaluations, and for a comparison of two.
"""

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rl_async.messages import Explanation, Sampling, ToolCall, Trajectory, Turn, Version, VersionRun
from rl_async.recording import write_trajectories

GROUPS, SAMPLES = 16, 8  # of a step
EVALUATION = 2500, 4  # tasks, and samples of each
VOCABULARY = 50_000
TOKENS = 400  # of a trajectory on average
WORDS = ("the", "sum", "of", "all", "parts", "is", "less", "than", "what", "was", "asked", "for", "here")
QUERIES = {
    "word": "text=needle",
    "words": "text=parts+asked",
    "filters": "tool=shell&reward_to=0.5&order=masked",
    "last page": "offset=99000",
}


def row(draw: np.random.Generator, step: int, group: int, sample: int) -> tuple[Trajectory, Explanation]:
    """Draw a trajectory of about TOKENS tokens with a call, and what was recorded of its training."""
    length = int(draw.integers(TOKENS // 2, 3 * TOKENS // 2))
    mask = np.arange(length) >= length // 4
    sampled = int(mask.sum())
    said = " ".join(draw.choice(WORDS, length // 2))
    if group % 997 == 0:
        said += " needle"
    call = ToolCall(name="shell", arguments='{"command":"ls"}', result="a b c", error="" if sample % 5 else "exit 1")
    turns = [
        Turn(role="user", text=f"question {group}", start=0, end=length // 4),
        Turn(role="assistant", text=said, start=length // 4, end=length, tool_calls=[call]),
    ]
    made = Trajectory(
        task_id=f"task:{group % 5000}",
        group_id=group,
        sample=sample,
        attempt=0,
        episode_id=f"{group}.{sample}.0",
        token_ids=draw.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -draw.random(length), 0).astype(np.float32),
        versions=[VersionRun(Version(0, max(0, step - 1)), 0, sampled)],
        sampling=Sampling(),
        reward=float(draw.integers(0, 2)),
        finish_reason="stop",
        turns=turns,
        data_source="synthetic",
    )
    told = [round(float(value), 4) for value in made.logprobs[mask]]
    return made, Explanation(weights=[1.0] * sampled, rules=[], logprobs=told, advantages=[0.5])


def save_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer: all bytes, then words that no merge makes, since it only decodes."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"\u0120{WORDS[n % len(WORDS)]}{n}" for n in range(VOCABULARY - len(alphabet))]  # \u0120: a space
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate([*alphabet, *words])}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def record(folder: Path, trajectories: int, evaluated: int) -> None:
    """Write the files of a run with so many trained and so many held-out trajectories."""
    save_tokenizer(folder / "checkpoints" / "step-000000" / "model")
    (folder / "config.yaml").write_text("name: large\nmode: disaggregated\n")
    draw = np.random.default_rng(0)
    for step in range(-(-trajectories // (GROUPS * SAMPLES))):
        groups = range(step * GROUPS, (step + 1) * GROUPS)
        rows = [row(draw, step, group, sample) for group in groups for sample in range(SAMPLES)]
        file = folder / "trajectories" / f"step-{step:06d}-lineage0-rank0.jsonl.gz"
        write_trajectories(file, [made for made, _ in rows], [told for _, told in rows])
    tasks, samples = EVALUATION
    for step in range(-(-evaluated // (tasks * samples))):
        rows = [row(draw, step, task, sample)[0] for task in range(tasks) for sample in range(samples)]
        for made in rows:
            made.partition = "eval"
        write_trajectories(folder / "trajectories" / f"eval-{step:06d}.jsonl.gz", rows)


class Client:
    """Asks the server as a browser that opened the address does."""

    def __init__(self, address: str) -> None:
        _, _, place, *path = address.split("/")
        self._place = place
        answer = self._ask("/" + "/".join(path), "")
        (cookie,) = SimpleCookie(answer.getheader("set-cookie")).values()
        self._cookie = f"{cookie.key}={cookie.value}"

    def _ask(self, path: str, cookie: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._place, timeout=600)
        connection.request("GET", path, headers={"Cookie": cookie})
        return connection.getresponse()

    def get(self, path: str) -> Any:
        answer = self._ask(f"/api/runs/large/{path}", self._cookie)
        assert answer.status == 200, answer.read()
        return json.loads(answer.read())


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return round(time.perf_counter() - began, 3), found


def measure(folder: Path) -> dict[str, Any]:
    """Serve the run in ``folder``, which has two evaluations or more, and measure."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "rl_async.launcher.cli", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        client = Client(server.stdout.readline().strip())
        process, peak = psutil.Process(server.pid), 0
        while not client.get("trajectories?limit=50")["rows"]:
            time.sleep(0.05)
        first_page = time.perf_counter() - began
        while True:
            peak = max(peak, process.memory_info().rss)
            progress = client.get("choices")["progress"]
            if progress["indexed"] == progress["files"] > 0:
                break
            time.sleep(1.0)  # as the page does
        indexed = time.perf_counter() - began
        queries = {}
        for name, query in QUERIES.items():
            seconds, found = timed(lambda query=query: client.get(f"trajectories?limit=50&{query}"))
            queries[name] = {"seconds": seconds, "found": found["count"]}
        seconds, told = timed(lambda: client.get("trajectories/train-0-0-0-0"))
        assert "".join(told["tokens"]["text"]).strip(), "tokens are decoded"
        evaluations, lines = timed(lambda: client.get("evaluations")["table"])
        comparison, _ = timed(lambda: client.get(f"compare?before=0&after={lines[-1]['step']}"))
        peak = max(peak, process.memory_info().rss)
        server.terminate()
    return {
        "trajectories": found["count"],
        "recorded_bytes": sum(file.stat().st_size for file in (folder / "trajectories").iterdir()),
        "index_bytes": (folder / "view.sqlite").stat().st_size,
        "first_page_s": round(first_page, 2),
        "indexed_s": round(indexed, 1),
        "peak_bytes": peak,
        "queries": queries,
        "trajectory_s": seconds,
        "evaluated": sum(line["episodes"] for line in lines),
        "evaluations_s": evaluations,
        "comparison_s": comparison,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--evaluated", type=int, default=100_000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "large"
        run.mkdir()
        record(run, arguments.trajectories, arguments.evaluated)
        found = measure(run)
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""One client's trial: a run of the launcher, episodes played by the client, the audit, and what was found."""

import gzip
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.agent_programs.clients import PROMPT, Client
from tests.agent_programs.puppet import ROOT, Lines

STEPS, EPISODES = 2, 4  # steps, and episodes of each, all of one group
START_S, END_S = 240.0, 900.0
MOST_DIFFERENCE = 1e-3  # of a token's log-probability, between engine and trainer
HERE = Path(__file__).parent
RL_ASYNC = [sys.executable, "-m", "rl_async.launcher.cli"]
IGNORED = re.compile(r"asks for '([^']+)'=.* which the gateway ignores")


class TrialFailed(Exception):
    """A client's episodes were not all trained, or the audit found something."""


class Found(NamedTuple):
    """What a trial found; the fields are the columns of the table."""

    client: str
    version: str
    episodes: int
    rows: int
    answers: int
    results: int  # of tools, that came back in a row
    longest: int  # row, in tokens
    sampled: int  # tokens trained
    ignored: str  # fields that requests have and the gateway ignores
    difference: float  # of the log-probabilities of engine and trainer, in the first step
    given_back: int
    audit: str


def run_trial(name: str, client: Client, folder: Path, installed: Path, model: Path) -> Found:
    """Play and train; ``folder`` is made. Raises TrialFailed."""
    folder.mkdir(parents=True)
    write_inputs(folder, model)
    log = folder / "launch.log"
    words = ["launch", "--mode", "disaggregated", "--config", str(folder / "trial.yaml"), "--name", "run"]
    with log.open("w") as output:
        launch = start(output, *RL_ASYNC, *words, cwd=folder)
        try:
            run = folder / "runs" / "run"
            wait_for(run / "endpoints.json", launch, log)
            play(name, client, run, installed, folder)
            code = launch.wait(END_S)
        finally:
            launch.terminate()  # which ends its processes
            launch.wait(60)
    if code != 0:
        raise TrialFailed(f"{name}: the run ended with {code}; see {log}")
    return inspect(name, client, run, folder)


def write_inputs(folder: Path, model: Path) -> None:
    """Write the tasks and the config of the run."""
    context = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    rest = {"data_source": "digits", "reward_model": {"ground_truth": "9"}}
    tasks = [{"prompt": [{"role": "user", "content": f"{PROMPT} ({number})"}], **rest} for number in range(8)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    config = {
        "model": {"path": str(model)},
        "data": {"path": str(folder / "tasks.jsonl"), "train_batch_groups": 1},
        "agent": {"gateway": {}, "max_tokens": context - 1, "unprinted_tools": "allow"},
        "rollout": {
            "group_size": EPISODES,
            "max_tokens": 256,
            "max_model_len": context,
            "max_batch_size": EPISODES,
            "request_timeout_s": END_S,  # a coding agent's first prompt takes a CPU a minute
        },
        "queue": {"max_staleness": 0},
        "trainer": {
            "steps": STEPS,
            "minibatches": 1,
            "learning_rate": 1e-3,
            "max_tokens_per_microbatch": context,
            "batch_timeout_s": END_S,
        },
        "eval": {"every": 0},
    }
    (folder / "trial.yaml").write_text(json.dumps(config, indent=1) + "\n")


def start(output: Any, *command: str, cwd: Path) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)


def wait_for(path: Path, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise TrialFailed(f"the run did not start:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


def play(name: str, client: Client, run: Path, installed: Path, folder: Path) -> None:
    """Play the run's episodes with the client, until the run is over. Raises TrialFailed."""
    program = [word.replace("{client}", str(installed)) for word in client.command]
    confined = [sys.executable, str(HERE / "confine.py"), "{base_url}", str(installed), "--", *program]
    command = [*RL_ASYNC, "play", "-n", str(EPISODES), "--reward", str(HERE / "grade.py"), str(run), "--", *confined]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | client.environment
    with (folder / "play.log").open("w") as output:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise TrialFailed(f"{name}: play ended with {done.returncode}:\n{(folder / 'play.log').read_text()[-3000:]}")


def inspect(name: str, client: Client, run: Path, folder: Path) -> Found:
    """Read what was trained, and run the audit. Raises TrialFailed."""
    trained, rows = [json.loads(line) for line in (run / "trained.jsonl").read_text().splitlines()], list(recorded(run))
    episodes = len({(row["group"], row["sample"]) for row in trained})
    if episodes != STEPS * EPISODES or len(rows) != len(trained):
        raise TrialFailed(f"{name}: {episodes} episodes were trained, not {STEPS * EPISODES}; see {run}")
    audited = subprocess.run([*RL_ASYNC, "audit", str(run)], cwd=ROOT, capture_output=True, text=True)
    if audited.returncode != 0:
        raise TrialFailed(f"{name}: audit: {audited.stdout}{audited.stderr}")
    turns = [turn for row in rows for turn in row["turns"]]
    difference = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["correction/logprob_diff_max"]
    given_back = (folder / "play.log").read_text().count(": given back: ")
    if missing := unproven(client.lines, rows, difference, given_back):
        raise TrialFailed(f"{name}: {'; '.join(missing)}; see {run}")
    logs = "".join(path.read_text() for path in (run / "logs").glob("gateway*"))
    return Found(
        name,
        client.version,
        episodes,
        len(rows),
        sum(turn["role"] == "assistant" for turn in turns),
        sum(turn["role"] == "tool" for turn in turns),
        max(len(row["token_ids"]) for row in rows),
        sum(sum(row["loss_mask"]) for row in rows),
        ", ".join(sorted(set(IGNORED.findall(logs)))),
        difference,
        given_back,
        audited.stdout.splitlines()[-1],
    )


def unproven(lines: Lines, rows: Sequence[dict[str, Any]], difference: float, given_back: int) -> list[str]:
    """Return what a trial did not show, although its episodes were trained and the audit agrees."""
    shown = lines.shown.partition("N")[0]
    answers = [sum(turn["role"] == "assistant" for turn in row["turns"]) for row in rows]
    turns = [turn for row in rows for turn in row["turns"]]
    if shown:  # such a program writes what came before into the text of the next request, which is a row of its own
        results = [turn for turn in turns if turn["role"] == "user" and shown in turn["text"]]
        continued = len({(row["group_id"], row["sample"]) for row in rows}) < len(rows)
    else:
        results = [turn for turn in turns if turn["role"] == "tool"]
        continued = max(answers, default=0) > 1
    found = {
        "no result of a tool came back": bool(results),
        "no episode went on after its first answer": continued,
        f"log-probabilities differ by {difference:g}": difference < MOST_DIFFERENCE,
        f"{given_back} episodes were given back": given_back == 0,
    }
    return [problem for problem, fine in found.items() if not fine]


def recorded(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows that were trained."""
    for path in sorted((run / "trajectories").glob("step-*")):
        with gzip.open(path, "rt") as file:
            yield from map(json.loads, file)

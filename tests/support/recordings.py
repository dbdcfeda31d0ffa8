"""Run folders as a trainer leaves them, for the tests of the page."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from rl_async.messages import Explanation, RuleRun, ToolCall, Trajectory, Turn
from rl_async.recording import write_trajectories
from tests.conftest import make_rows

HOSTILE = "<script>document.title='owned'</script> \x1b[31mred\x1b[0m \u202egnp.exe"


def explained(row: Trajectory, masked: int = 0) -> Explanation:
    """What a trainer recorded of a row whose first ``masked`` tokens were rejected. The first of a row never trains."""
    trained = row.loss_mask.copy()
    trained[0] = False
    sampled = int(trained.sum())
    return Explanation(
        weights=[0.0] * masked + [0.5] * (sampled - masked),
        rules=[RuleRun("token_k3", 0, masked)] if masked else [],
        logprobs=(row.logprobs[trained] + 0.25).tolist(),
        advantages=[1.5],
    )


def conversation(question: str, answer: str, *, tool: str = "shell", error: str = "") -> list[Turn]:
    """A question, a call of a tool and an answer, which the tokens from 4 on are."""
    call = ToolCall(name=tool, arguments='{"x":1}', result="" if error else "ok", error=error, seconds=0.5)
    return [
        Turn(role="user", text=question, start=0, end=4),
        Turn(role="assistant", text=answer, start=4, end=8, tool_calls=[call], reward=0.25, reason="on time"),
    ]


def write_step(run: Path, step: int, rows: Sequence[Trajectory], *, lineage: int = 0, masked: int = 0) -> Path:
    """Record what a step trained, and its metrics; of each row ``masked`` tokens were masked."""
    file = run / "trajectories" / f"step-{step:06d}-lineage{lineage}-rank0.jsonl.gz"
    write_trajectories(file, rows, [explained(row, masked) for row in rows])
    record = {"step": step, "lineage": lineage, "reward/mean": float(np.mean([row.reward for row in rows]))}
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(record) + "\n")
    return file


def write_evaluation(
    run: Path, step: int, rewards: Sequence[Sequence[float]], sources: Sequence[str], more: str = ""
) -> None:
    """Record an evaluation with the rewards of each task's samples; ``more`` follows each answer."""
    template = make_rows(0)[0]
    rows = [
        msgspec.structs.replace(
            template,
            task_id=f"test:{task}",
            group_id=1000 + task,
            sample=sample,
            episode_id=f"{task}.{sample}",
            partition="eval",
            reward=reward,
            data_source=sources[task],
            turns=conversation(f"question {task}", f"answer {reward:g} of {step}{more}"),
        )
        for task, samples in enumerate(rewards)
        for sample, reward in enumerate(samples)
    ]
    for row in rows:
        row.turns[1].reward = None
    write_trajectories(run / "trajectories" / f"eval-{step:06d}.jsonl.gz", rows)
    record = {"eval/step": step, "eval/reward": float(np.mean([row.reward for row in rows])), "lineage": 0}
    with (run / "evaluations.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def make_run(folder: Path, steps: int = 3) -> Path:
    """A run of some steps of 16 rows; row 0 of step 1 is hostile, and its tool failed."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"name: {folder.name}\nmode: disaggregated\ntrainer:\n  steps: {steps}\n")
    for step in range(steps):
        rows = make_rows(step)
        for row in rows:
            row.turns, row.data_source = conversation(f"question {row.task_id}", f"answer {row.sample}"), "math"
        if step == 1:
            rows[0].turns = conversation("open it", HOSTILE, tool="browser", error="no_such_page")
            rows[0].reward_parts, rows[0].error = {"exact": 0.0}, "TimeoutError: too slow"
            rows[0].reward_reasons = {"exact": "the page is missing"}
        write_step(folder, step, rows, masked=2 if step == 2 else 0)
    return folder

"""Does anything grow with the number of steps? A long run of a trivial task, stopped and continued twice.

    python -m benchmarks.growth --steps 100000 --json FILE

A model of one narrow layer with the demo's tokenizer answers with four tokens, one group of two in a step, one
optimizer step each: what could grow is the same as in a run of the demo, and a step takes half as long. At ten marks,
evenly spread, a line of the table has the seconds of a step since the mark before, the resident memory of each role,
and the bytes of every file and folder of the run. After the first and the ninth mark the run is asked to stop and
continued: from the start of ``rl-async launch`` to the end of the first step that it trains are the seconds of a
resume.

Goals: ``*_growth`` is the last mark's value by the second's, 1 if nothing grows; ``memory_growth`` is that of the role
that grew most, the launcher included; ``resume_growth`` compares the two resumes. Files are told, not judged:
``file_bytes_per_step`` says what each adds per step between these marks.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.processes.command_line import parser
from benchmarks.processes.trainer_arms import resident
from benchmarks.processes.whole_run import RL_ASYNC, processes_of
from rl_async.insight.tail import last_line

MARKS = 10
STOPPED_AFTER = (1, 9)  # marks
KEPT = 200  # steps whose trajectories are kept
POLL_S = 0.5
STALLED_S = 900.0  # without a step
OVERRIDES = [
    *("agent.loop=single_turn", "agent.tools=[]", "data.train_batch_groups=1", "rollout.group_size=2"),
    *("rollout.max_tokens=4", "rollout.max_batch_size=8", "queue.max_staleness=4", "trainer.minibatches=1"),
    *("trainer.checkpoint_every=100", f"trainer.keep_trajectories={KEPT}", "eval.every=0", "eval.tasks=4"),
    *("trainer.schedule=constant", "launcher.threads=1"),
]


class LongRun:
    """A run of ``rl-async launch`` in ``folder``, to be started, watched and stopped several times."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def done(self) -> int:
        """Steps that were recorded."""
        line = last_line(self.folder / "metrics.jsonl")
        return json.loads(line)["step"] + 1 if line else 0

    def start(self) -> float:
        """Start or continue it; seconds until it has recorded a step more."""
        before, began = self.done, time.monotonic()
        command = [RL_ASYNC, "launch", "--mode", "disaggregated", "--config", "calculator", "--name", self.folder.name]
        placed = [f"model.path={self.folder.parent / 'model'}", f"launcher.run_dir={self.folder.parent}"]
        overrides = [*OVERRIDES, *placed, f"trainer.steps={self.steps}"]
        with self.folder.with_suffix(".log").open("ab") as output:
            self._process = subprocess.Popen([*command, *overrides], stdout=output, stderr=output)
        self.wait(before + 1)
        return time.monotonic() - began

    def wait(self, steps: int) -> None:
        """Wait until so many steps are recorded. Ends this process if the run ends before, or trains none for long."""
        seen, since = -1, time.monotonic()
        while (done := self.done) < steps:
            if done > seen:
                seen, since = done, time.monotonic()
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() - since > STALLED_S:
                self.stop()
                sys.exit(f"the run ended or stalled after {done} steps:\n{self._said()}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Ask it to stop, as Ctrl-C does, and wait until it has saved."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(STALLED_S)

    def finish(self) -> None:
        """Wait for its end. Ends this process if the run failed."""
        assert self._process is not None
        if self._process.wait(STALLED_S) != 0:
            sys.exit(f"the run failed:\n{self._said()}")

    def memory(self) -> dict[str, int]:
        """Resident bytes of each role, the largest process of each."""
        assert self._process is not None
        found = {"launcher": resident("VmRSS", self._process.pid)}
        for role, pid in processes_of(self.folder):
            found[role] = max(found.get(role, 0), resident("VmRSS", pid))
        return found

    def files(self) -> dict[str, int]:
        """Bytes of each file and folder in the run folder."""
        return {path.name: _bytes(path) for path in sorted(self.folder.iterdir())}

    def _said(self) -> str:
        return self.folder.with_suffix(".log").read_text(errors="replace")[-2000:]


def _bytes(path: Path) -> int:
    found = 0
    for file in [path] if path.is_file() else path.rglob("*"):
        try:
            found += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:  # it was deleted meanwhile
            continue
    return found


def make_model(source: Path, folder: Path) -> None:
    """Write a model of one narrow layer with random weights, and the tokenizer and chat template of ``source``."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "sft.json"))
    config = AutoConfig.from_pretrained(source)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "layer_types": config.layer_types[:1]}
    config.update(sizes | heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def measure(folder: Path, steps: int, file: Path | None) -> dict[str, Any]:
    """Run it, and write what is known after each mark, so that an interrupted measurement leaves a table."""
    run = LongRun(folder, steps)
    first_start = run.start()
    marks: list[dict[str, Any]] = []
    resumes: list[float] = []
    found: dict[str, Any] = {"steps": steps, "cores": os.cpu_count(), "marks": marks, "resume_s": resumes}
    found["start_s"] = first_start
    before, began = run.done, time.monotonic()
    for number in range(1, MARKS + 1):
        run.wait(steps * number // MARKS - (number == MARKS) * max(2, steps // 500))  # the last while its processes run
        done = run.done
        seconds = (time.monotonic() - began) / max(done - before, 1)
        load = psutil.getloadavg()[0]
        marks.append({"step": done, "step_s": seconds, "load": load, "memory": run.memory(), "files": run.files()})
        print(line(marks[-1]), flush=True)
        if number in STOPPED_AFTER:
            run.stop()
            resumes.append(run.start())
            print(f"continued after {done} steps: {resumes[-1]:.1f} s to the next step, load {load:.1f}", flush=True)
        before, began = run.done, time.monotonic()
        found |= goals(marks, resumes)
        if file is not None:
            file.write_text(json.dumps(found, indent=1) + "\n")
    run.finish()
    return found


def goals(marks: list[dict[str, Any]], resumes: list[float]) -> dict[str, Any]:
    """What grew from the second mark to the last, as far as they are known."""
    if len(marks) < 3:
        return {}
    first, last = marks[1], marks[-1]
    steps = last["step"] - first["step"]
    sizes = first["files"] | last["files"]
    return {
        "memory_growth": max(last["memory"][role] / size for role, size in first["memory"].items()),
        "step_growth": last["step_s"] / first["step_s"],
        "resume_growth": resumes[-1] / resumes[0] if len(resumes) > 1 else None,
        "file_bytes_per_step": {
            name: round((last["files"].get(name, 0) - first["files"].get(name, 0)) / steps, 1) for name in sizes
        },
    }


def line(mark: dict[str, Any]) -> str:
    """Format a mark as a line of the table."""
    memory = "  ".join(f"{role} {size >> 20}" for role, size in mark["memory"].items())
    files = "  ".join(f"{name} {size >> 10}" for name, size in mark["files"].items() if size >> 14)
    return f"step {mark['step']:>7}  {mark['step_s']:.3f} s  load {mark['load']:.1f}  MiB: {memory}  KiB: {files}"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=100_000)
    arguments = made.parse_args()
    subprocess.run([RL_ASYNC, "sft", "--config", "calculator"], check=True, stdout=subprocess.DEVNULL)  # its model
    with tempfile.TemporaryDirectory() as name:
        make_model(Path("artifacts/calculator/model"), Path(name) / "model")
        found = measure(Path(name) / "long", arguments.steps, arguments.json)
    print(json.dumps({name: value for name, value in found.items() if name != "marks"}, indent=1))


if __name__ == "__main__":
    main()

"""What ``rl-async sft`` prints: a line of a table every few steps, and a summary at the end."""

import asyncio
import os
from pathlib import Path

import msgspec
from rich.console import Console

from rl_async.launcher.folder.tail import MetricsTail, Record

POLL_S = 0.3
LINES = 40  # of the whole run, besides those of measurements
HEAD = f"{'steps':>7} {'epoch':>6} {'loss':>8} {'held-out':>8} {'tokens/s':>10} {'rate':>8} {'left':>8}"


class ReplacedTail:
    """Reads the records that were added to a file since the last call, also when the file is replaced.

    Ranks that restart from a checkpoint replace the file by a shorter one, which is then read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset = path, -1, 0

    def read(self) -> list[Record]:
        """New records, oldest first; none if there is no file yet."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [msgspec.json.decode(line, type=Record) for line in whole.splitlines()]


class FinetuneView:
    """Shows the records that the ranks write, each step once, of ``steps`` in all, the first ``begun`` done before."""

    def __init__(self, folder: Path, steps: int, begun: int, console: Console) -> None:
        self._console, self._steps, self._shown = console, steps, begun
        self._metrics = ReplacedTail(folder / "metrics.jsonl")
        self._evaluations = ReplacedTail(folder / "evaluations.jsonl")
        self._since: list[Record] = []
        self._measured, self._headed = begun > 0, False
        self._metrics.read()  # left by an earlier start; the ranks replace the file
        self._evaluations.read()

    async def run(self) -> None:
        """Consumes metrics.jsonl and evaluations.jsonl; produces lines. Waits POLL_S. Runs until cancelled."""
        while True:
            self.show_new()
            await asyncio.sleep(POLL_S)

    def show_new(self) -> None:
        """Print the lines for the records since the last call."""
        for evaluation in self._evaluations.read():
            if evaluation["eval/step"] == 0 and not self._measured:
                self._measured = True
                self._print(row(0, 0.0, None, evaluation["eval/loss"], None, None, None))
        for record in self._metrics.read():
            completed = int(record["step"]) + 1
            if completed <= self._shown:
                continue  # it was trained again
            self._shown = completed
            self._since.append(record)
            if completed == self._steps or completed % max(1, self._steps // LINES) == 0 or "eval/loss" in record:
                self._print(line(self._since, self._steps))
                self._since = []

    def _print(self, text: str) -> None:
        if not self._headed:
            self._console.print(HEAD, markup=False)
            self._headed = True
        self._console.print(text, markup=False)


def line(records: list[Record], steps: int) -> str:
    """Format the mean of some steps; the time left assumes that the other steps take as long."""
    last = records[-1]
    completed = int(last["step"]) + 1
    trained = sum(r["tokens/trained"] for r in records)
    loss = sum(r["loss/train"] * r["tokens/trained"] for r in records) / max(trained, 1)
    speed = sum(r["tokens/all"] for r in records) / sum(r["time/train_s"] for r in records)
    left = (steps - completed) * sum(r["time/step_s"] for r in records) / len(records)
    return row(completed, last["epoch"], loss, last.get("eval/loss"), speed, last["learning_rate"], left)


def row(
    completed: int,
    epoch: float,
    loss: float | None,
    held_out: float | None,
    speed: float | None,
    rate: float | None,
    left: float | None,
) -> str:
    """Format one line of the table; ``left`` is in seconds."""
    cells = (
        (f"{completed}", 7),
        (f"{epoch:.2f}", 6),
        ("" if loss is None else f"{loss:.4f}", 8),
        ("" if held_out is None else f"{held_out:.4f}", 8),
        ("" if speed is None else f"{speed:,.0f}", 10),
        ("" if rate is None else f"{rate:.1e}", 8),
        ("" if left is None else f"{int(left) // 60}:{int(left) % 60:02d}", 8),
    )
    return " ".join(text.rjust(width) for text, width in cells)


def summary(folder: Path, out: Path) -> str:
    """Summarize a run that wrote ``out``: held-out loss before and after, and where its files are."""
    losses = [evaluation["eval/loss"] for evaluation in MetricsTail(folder / "evaluations.jsonl").read()]
    held_out = f"held-out loss per token {losses[0]:.4f} before, {losses[-1]:.4f} after; " if losses else ""
    return f"{held_out}model: {out}; metrics and checkpoints: {folder}"

"""Checks the history of a finished run from the files in its folder alone, sharing no code with the queue's audit.

The trainer's record (``trained.jsonl``), the trajectories, the metrics and the queue's ledger must tell one story: each
step was trained once in the history that led to the final weights, on whole groups, each sample on the tokens that its
producer announced, no token staler than the bound; and no admitted group is missing.
"""

import gzip
import json
import struct
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128_hexdigest

from tests.support.queue import stale, twice, whole_lines

Row = tuple[int, int, int]  # group, sample, segment


class Expected(NamedTuple):
    """What the run was asked for."""

    steps: int
    groups: int  # per step
    samples: int  # per group
    staleness: int


def problems(run: Path, expected: Expected) -> list[str]:
    """Return what is wrong with a run that finished; empty if nothing is."""
    trained, found = _trained(run)
    if sorted(trained) != list(range(expected.steps)):
        return [*found, f"steps {sorted(trained)} were trained, not {expected.steps}"]
    found += _metrics(run, trained)
    found += _once(trained, expected)
    for step, (lineage, rows) in trained.items():
        found += _trajectories(run, step, lineage, rows, expected.staleness)
    return found + _ledger(run, trained, expected)


def _trained(run: Path) -> tuple[dict[int, tuple[int, dict[Row, str]]], list[str]]:
    """Return lineage and rows with their hashes of each step, as the newest lineage trained it."""
    steps: dict[int, dict[int, dict[Row, str]]] = defaultdict(lambda: defaultdict(dict))
    found = []
    for line in whole_lines(run / "trained.jsonl"):
        rows, row = steps[line["step"]][line["lineage"]], (line["group"], line["sample"], line["segment"])
        if row in rows:
            found.append(f"row {row} was trained twice in step {line['step']} of lineage {line['lineage']}")
        rows[row] = line["tokens_hash"]
    newest = {step: max(lineages) for step, lineages in steps.items()}
    in_order = [newest[step] for step in sorted(newest)]
    if in_order != sorted(in_order):
        found.append(f"an older lineage trained after a newer one: {in_order}")
    return {step: (lineage, steps[step][lineage]) for step, lineage in newest.items()}, found


def _metrics(run: Path, trained: dict[int, tuple[int, dict[Row, str]]]) -> list[str]:
    """The newest lineage with metrics of a step is the one that trained it."""
    newest: dict[int, int] = {}
    for line in whole_lines(run / "metrics.jsonl"):
        if line["step"] >= 0 and "lineage" in line:
            newest[line["step"]] = max(line["lineage"], newest.get(line["step"], 0))
    wrong = [step for step, (lineage, _) in trained.items() if newest.get(step) != lineage]
    return [f"steps {wrong} have no metrics of the lineage that trained them"] if wrong else []


def _once(trained: dict[int, tuple[int, dict[Row, str]]], expected: Expected) -> list[str]:
    """Every step has whole groups, and no group is in two steps."""
    found = twice({step: {group for group, _, _ in rows} for step, (_, rows) in trained.items()})
    for step, (_, rows) in sorted(trained.items()):
        samples: dict[int, set[int]] = defaultdict(set)
        for group, sample, _ in rows:
            samples[group].add(sample)
        if len(samples) != expected.groups or any(got != set(range(expected.samples)) for got in samples.values()):
            found.append(f"step {step} trained the samples {dict(samples)}")
    return found


def _trajectories(run: Path, step: int, lineage: int, rows: dict[Row, str], staleness: int) -> list[str]:
    """The files of a step hold its rows and no others, with the tokens whose hash was recorded, none too stale."""
    found, there = [], set()
    for file in (run / "trajectories").glob(f"step-{step:06d}-lineage{lineage}-rank*.jsonl.gz"):
        with gzip.open(file, "rt") as lines:
            for line in lines:
                row = json.loads(line)
                key = (row["group_id"], row["sample"], row["segment"])
                there.add(key)
                tokens = row["token_ids"]
                if xxh3_128_hexdigest(struct.pack(f"<{len(tokens)}i", *tokens)) != rows.get(key):
                    found.append(f"step {step}: row {key} has other tokens than were trained")
                oldest = min((version_step for (_, version_step), _, _ in row["versions"]), default=step)
                if stale(step, oldest, staleness):
                    found.append(f"step {step}: row {key} was sampled by version {oldest}")
    if there != set(rows):
        found.append(f"step {step}: trajectories are missing, or too many: {sorted(there ^ set(rows))[:4]}")
    return found


def _ledger(run: Path, trained: dict[int, tuple[int, dict[Row, str]]], expected: Expected) -> list[str]:
    """The queue reserved what was trained, announced with the same hashes, and forgot no group that it admitted."""
    admitted, dropped, announced, reserved = set(), set(), defaultdict(set), {}
    for line in whole_lines(run / "ledger.jsonl"):
        match line["event"]:
            case "admit" if line["partition"] == "train":
                admitted.add(line["group"])
            case "drop" | "dead_letter":
                dropped.add(line["group"])
            case "put":
                for group, sample, digests in line["stored"]:
                    announced[group, sample].update(digests)
            case "reserve":
                reserved[line["step"]] = set(line["groups"])
    found = []
    for step, (_, rows) in trained.items():
        if reserved.get(step) != {group for group, _, _ in rows}:
            found.append(f"step {step} trained other groups than the queue reserved: {reserved.get(step)}")
        for (group, sample, _), digest in rows.items():
            if digest not in announced[group, sample]:
                found.append(f"step {step}: sample {group}.{sample} has tokens that no producer announced")
    open_groups = admitted - dropped - {group for _, rows in trained.values() for group, _, _ in rows}
    slots = (expected.staleness + 1) * expected.groups
    if len(open_groups) > slots:
        found.append(f"{len(open_groups)} admitted groups were neither trained nor dropped: {sorted(open_groups)[:8]}")
    return found

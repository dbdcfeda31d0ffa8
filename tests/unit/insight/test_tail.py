"""Lines that are read while they are written, and warnings of logs, one entry for each kind."""

import math
from pathlib import Path

import pytest

from rl_async.errors import UserError
from rl_async.insight.tail import MOST_KINDS, OTHERS, LineTail, LogWarnings, last_record


def test_a_number_that_was_none_in_training_is_nan(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0,"loss":null}\n{"step":1,"lo')
    tail = LineTail(path)
    (record,) = tail.records()
    assert record["step"] == 0 and math.isnan(record["loss"])
    with path.open("a") as file:
        file.write('ss":2.5}\n')
    assert tail.records() == [{"step": 1.0, "loss": 2.5}]
    assert last_record(path) == {"step": 1.0, "loss": 2.5}
    path.write_bytes(b'{"step": \xff}\n')
    for read in (lambda: last_record(path), LineTail(path).records):
        with pytest.raises(UserError, match=r"metrics\.jsonl"):
            read()


def write(run: Path, name: str, *lines: str) -> None:
    (run / "logs").mkdir(exist_ok=True)
    with (run / "logs" / f"{name}.log").open("a") as log:
        log.writelines(line + "\n" for line in lines)


def counts(warnings: LogWarnings) -> dict[str, int]:
    return {warning.text: warning.count for warning in warnings.newest_first}


def test_lines_that_differ_in_numbers_alone_are_of_one_kind_in_all_processes(tmp_path: Path) -> None:
    warnings = LogWarnings(tmp_path)
    write(tmp_path, "worker-0", "10:00:00 agent-0 WARNING request 45.13.0.3: engine-0 was lost after 0 tokens")
    write(tmp_path, "worker-1", "10:00:01 agent-1 WARNING request 7.1.0.3: engine-1 was lost after 12 tokens")
    write(tmp_path, "launcher", "10:00:02 WARNING engine-0 ended", "10:00:02 INFO engine-0 started")
    write(tmp_path, "trainer-0", "10:00:03 trainer-0 ERROR engine-0 ended", "no line of a log")
    assert {found.count for found in warnings.read()} == {2, 1}
    (lost,) = [found for found in warnings.newest_first if "lost" in found.text]
    assert lost.processes == "worker-0, worker-1" and "2 times" in lost.line
    assert len(warnings.newest_first) == 3, "an error is no warning"
    assert warnings.read() == [], "nothing is new"


def test_a_process_that_thins_out_its_lines_says_how_many_there_were(tmp_path: Path) -> None:
    warnings = LogWarnings(tmp_path)
    write(tmp_path, "worker-0", *(f"10:00:00 agent-0 WARNING it failed ({times} times)" for times in (2, 64)))
    warnings.read()
    assert counts(warnings) == {"it failed (64 times)": 64}


def test_what_was_logged_before_is_not_read_and_new_logs_are_read_from_their_beginning(tmp_path: Path) -> None:
    write(tmp_path, "engine-0", "10:00:00 engine-0 WARNING before")
    warnings = LogWarnings(tmp_path)
    write(tmp_path, "engine-0", "10:00:01 engine-0 WARNING after \x1b[2J")
    write(tmp_path, "engine-1", "10:00:01 engine-1 WARNING new")
    # It repeats what is shown.
    write(tmp_path, "output", "10:00:01 engine-1 WARNING shown")
    warnings.read()
    assert counts(warnings) == {"after \\x1b[2J": 1, "new": 1}


def test_the_number_of_kinds_is_bounded(tmp_path: Path) -> None:
    warnings = LogWarnings(tmp_path)
    words = ["".join("abcdefghij"[int(digit)] for digit in str(i)) for i in range(MOST_KINDS + 5)]
    write(tmp_path, "engine-0", *(f"10:00:00 engine-0 WARNING {word}" for word in words))
    warnings.read()
    found = warnings.newest_first
    assert len(found) == MOST_KINDS + 1
    assert [one.count for one in found if one.text.startswith(OTHERS)] == [5]

"""Lines that are read while they are written."""

import math
from pathlib import Path

import pytest

from rl_async.errors import UserError
from rl_async.insight.tail import MetricsTail, last_record


def test_a_number_that_was_none_in_training_is_nan(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0,"loss":null}\n{"step":1,"lo')
    tail = MetricsTail(path)
    (record,) = tail.read()
    assert record["step"] == 0 and math.isnan(record["loss"])
    with path.open("a") as file:
        file.write('ss":2.5}\n')
    assert tail.read() == [{"step": 1.0, "loss": 2.5}]
    assert last_record(path) == {"step": 1.0, "loss": 2.5}
    path.write_bytes(b'{"step": \xff}\n')
    for read in (lambda: last_record(path), MetricsTail(path).read):
        with pytest.raises(UserError, match=r"metrics\.jsonl"):
            read()

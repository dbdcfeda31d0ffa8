"""The judges that the rigs of the queue share accept a good history and notice each kind of damage."""

from pathlib import Path

from tests.support.queue import lost, stale, twice, whole_lines


def test_a_group_in_two_steps_is_named_and_one_with_several_rows_of_a_step_is_not() -> None:
    assert twice({0: [1, 1, 2], 1: [3]}) == []
    assert len(twice({0: [1, 2], 1: [2], 2: [2]})) == 2


def test_acknowledged_samples_are_trained_with_their_tokens_or_excused() -> None:
    acknowledged = [((1, 0), "a"), ((2, 0), "b")]
    assert lost(acknowledged, {(1, 0): "a", (2, 0): "b"}) == []
    assert lost(acknowledged, {(1, 0): "a"}, lambda group: group == 2) == []
    assert len(lost(acknowledged, {(1, 0): "a"})) == 1
    assert len(lost(acknowledged, {(1, 0): "a", (2, 0): "other"}, lambda group: group == 2)) == 1


def test_the_bound_itself_is_fresh_enough() -> None:
    assert not stale(3, 2, 1) and stale(3, 1, 1)


def test_a_torn_last_line_and_a_missing_file_are_no_lines(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"a": 1}\n{"b": ')
    assert whole_lines(tmp_path / "lines") == [{"a": 1}]
    assert whole_lines(tmp_path / "missing") == []

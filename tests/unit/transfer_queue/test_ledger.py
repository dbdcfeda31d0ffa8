"""The audit finds what is missing, doubled or unknown, and cuts what a resume made void."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from rl_async.errors import DataError
from rl_async.transfer_queue.ledger import SHOWN, audit, main


def admit(group, samples=2, partition="train"):
    return {"event": "admit", "group": group, "task": f"t{group}", "partition": partition, "samples": samples}


def put(group, sample, *tokens):
    return {"event": "put", "stored": [[group, sample, tokens or ["00"]]]}


def puts(*groups):
    return [put(group, sample) for group in groups for sample in range(2)]


def reserve(step, *groups):
    return {"event": "reserve", "step": step, "groups": list(groups)}


def resume(step, lineage, **more):
    return {"event": "resume", "step": step, "lineage": lineage, **more}


def trained(step, group, sample, lineage=0, tokens="00", segment=0):
    row = {"lineage": lineage, "step": step, "group": group, "sample": sample, "segment": segment}
    return row | {"tokens_hash": tokens}


FINISH = {"event": "finish"}


def rows(step, *groups, lineage=0):
    return [trained(step, group, sample, lineage) for group in groups for sample in range(2)]


@pytest.fixture
def run(tmp_path: Path):
    def write(ledger, lines):
        for name, items in (("ledger.jsonl", ledger), ("trained.jsonl", lines)):
            (tmp_path / name).write_text("".join(json.dumps(item) + "\n" for item in items))
        return tmp_path

    return write


LEDGER = [
    admit(0),
    admit(1),
    admit(2**40, partition="eval"),
    admit(2),
    *puts(0, 1, 2**40),
    reserve(0, 0, 1),
    admit(3),
    {"event": "dead_letter", "group": 2, "error": "x"},
    admit(4),
    *puts(3, 4),
    reserve(1, 3, 4),
    {"event": "commit", "step": 1},
    FINISH,
]
TRAINED = rows(0, 0, 1) + rows(1, 3, 4)


def test_what_an_unfinished_run_has_not_trained_is_in_flight(run, capsys):
    folder = run(LEDGER[:-1], rows(0, 0, 1))
    report = audit(folder)
    assert report.ok and report.in_flight == 2
    assert main([str(folder)]) == 0
    assert "ok so far" in capsys.readouterr().out
    assert not audit(run(LEDGER, rows(0, 0, 1))).ok, "a finished run has lost them"
    assert not audit(run(LEDGER[:-1], rows(0, 0, 1) * 2)).ok, "twice is twice at any time"
    assert audit(run([*LEDGER, resume(1, 1)], rows(0, 0, 1))).in_flight == 2, "resumed, it is unfinished again"


def test_hashes_of_an_older_version_are_compared_too(run):
    def older(row):
        return {"tokens_sha256" if name == "tokens_hash" else name: value for name, value in row.items()}

    assert audit(run(LEDGER, list(map(older, TRAINED)))).ok
    changed = [older(TRAINED[0] | {"tokens_hash": "ff"}), *map(older, TRAINED[1:])]
    assert any("other tokens" in violation for violation in audit(run(LEDGER, changed)).violations)


def test_a_correct_run_passes(run, capsys):
    folder = run(LEDGER, TRAINED)
    report = audit(folder)
    assert report.ok, report.violations
    assert (report.admitted, report.given_up, report.trained, report.rows, report.cut) == (5, 1, 4, 8, 0)
    assert main([str(folder)]) == 0
    assert "ok: every admitted group was trained exactly once or given up" in capsys.readouterr().out
    assert replace(report, given_up=0).text().endswith("exactly once")


def test_groups_without_signal_count_as_given_up(run):
    dropped = [admit(5), {"event": "ready", "group": 5}, {"event": "drop", "group": 5, "reason": "no_signal"}]
    report = audit(run(LEDGER + dropped, TRAINED))
    assert report.ok, report.violations
    assert (report.admitted, report.given_up, report.trained) == (6, 2, 4)
    assert not audit(run(LEDGER + dropped, TRAINED + rows(1, 5))).ok


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (TRAINED[:-1], "group 4 was admitted, but its samples [1] were not trained"),
        (TRAINED[:-2], "group 4 was admitted, but its samples [0, 1] were not trained"),
        ([*TRAINED, trained(1, 3, 0)], "group 3 sample 0 was trained 2 times"),
        ([*TRAINED, trained(1, 9, 0)], "group 9 sample 0 was trained (0.1) but never admitted"),
        ([*TRAINED, trained(1, 2, 0)], "although it was dropped or dead-lettered"),
        ([*TRAINED, trained(1, 3, 5)], "but the group has 2 samples"),
        ([*TRAINED, trained(1, 2**40, 0)], "but never admitted"),
        (
            [*TRAINED[:-1], trained(1, 4, 1, tokens="11")],
            "group 4 sample 1 was trained (0.1) on other tokens",
        ),
        (
            [*TRAINED, trained(1, 4, 1, segment=1)],
            "group 4 sample 1 segment 1 was trained (0.1), but its sample came with 1",
        ),
        (rows(0, 0, 3) + rows(1, 1, 4), "group 1 sample 0 was trained (0.1) but not reserved for that step"),
    ],
)
def test_violations_are_named(run, capsys, lines, message):
    folder = run(LEDGER, lines)
    assert any(message in violation for violation in audit(folder).violations)
    assert main([str(folder)]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_what_never_came_to_the_queue_cannot_be_trained(run):
    ledger = [line for line in LEDGER if line != put(3, 1)]
    (violation,) = audit(run(ledger, TRAINED)).violations
    assert violation == "group 3 sample 1 was trained (0.1), but no trajectory of it came to the queue"


def test_a_group_that_was_generated_again_is_judged_by_its_last_trajectory(run):
    again = [resume(1, 1, fresh=True, next_group=4, readmitted=[3]), admit(4), put(3, 0, "11"), put(3, 1)]
    ledger = [*LEDGER, *again, *puts(4), reserve(1, 3, 4)]
    lines = TRAINED + rows(1, 3, 4, lineage=1)
    assert not audit(run(ledger, lines)).ok
    lines[-4] = trained(1, 3, 0, lineage=1, tokens="11")
    assert audit(run(ledger, lines)).ok


def test_what_went_with_a_payload_shard_counts_whichever_time_it_was_trained(run):
    lost = {"event": "lost", "shard": "s", "rows": [[0, 0]]}
    ledger = [admit(0), put(0, 0, "aa"), put(0, 1), reserve(0, 0), lost, put(0, 0, "bb"), FINISH]
    for tokens, ok in (("aa", True), ("bb", True), ("cc", False)):
        report = audit(run(ledger, [trained(0, 0, 0, tokens=tokens), trained(0, 0, 1)]))
        assert report.ok == ok, (tokens, report.violations)
    assert not audit(run([*ledger[:5], FINISH], [trained(0, 0, 1)])).ok, "lost, and never trained"


def test_steps_beyond_a_checkpoint_are_cut(run):
    ledger = [*LEDGER, resume(1, 1), reserve(1, 3, 4)]
    report = audit(run(ledger, TRAINED + rows(1, 3, 4, lineage=1)))
    assert report.ok, report.violations
    assert report.cut == 4


def test_the_lowest_later_resume_cuts_a_lineage(run):
    ledger = [*LEDGER, resume(1, 1), reserve(1, 3, 4), resume(0, 2), reserve(0, 0, 1), reserve(1, 3, 4), FINISH]
    lines = TRAINED + rows(1, 3, 4, lineage=1) + rows(0, 0, 1, lineage=2) + rows(1, 3, 4, lineage=2)
    report = audit(run(ledger, lines))
    assert report.ok, report.violations
    assert report.cut == 12
    assert not audit(run(ledger, TRAINED)).ok


def test_a_fresh_queue_voids_what_the_old_one_admitted_later(run):
    old = [*LEDGER, admit(5), {"event": "drop", "group": 3, "reason": "late"}, admit(6)]
    ledger = [*old, resume(1, 1, fresh=True, next_group=4, readmitted=[3]), admit(4), reserve(1, 3, 4)]
    report = audit(run(ledger, rows(0, 0, 1) + rows(1, 3, 4, lineage=1)))
    assert report.ok, report.violations
    assert (report.admitted, report.given_up) == (5, 1)


def test_a_torn_last_line_does_not_count_and_a_broken_one_is_named(run, capsys):
    folder = run(LEDGER, TRAINED)
    with (folder / "trained.jsonl").open("a") as file:
        file.write('{"lineage": 0, "st')
    assert audit(folder).ok
    with (folder / "trained.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match=r"trained\.jsonl:9"):
        audit(folder)
    assert main([str(folder)]) == 2
    (folder / "trained.jsonl").unlink()
    with pytest.raises(DataError, match="does not exist"):
        audit(folder)


def test_many_violations_are_summed_up(run):
    report = audit(run([*(admit(group) for group in range(SHOWN + 5)), FINISH], []))
    assert "and 5 more violations" in report.text()


SEGMENTED = [*LEDGER[:-4], admit(4), *puts(3), put(4, 0), put(4, 1, "00", "11"), reserve(1, 3, 4), FINISH]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([trained(1, 4, 1, tokens="11", segment=1)], None),
        ([], "group 4 sample 1 was trained, but its segments [1] never were"),
        ([trained(1, 4, 1, tokens="22", segment=1)], "group 4 sample 1 segment 1 was trained (0.1) on other tokens"),
        (2 * [trained(1, 4, 1, tokens="11", segment=1)], "group 4 sample 1 segment 1 was trained 2 times"),
    ],
)
def test_every_row_of_a_sample_must_be_trained_once(run, more, message):
    violations = audit(run(SEGMENTED, TRAINED + more)).violations
    assert (violations == []) if message is None else any(message in violation for violation in violations)


def test_a_row_that_came_to_a_rank_changed_must_be_trained_in_a_later_lineage(run):
    changed = {"lineage": 0, "step": 1, "group": 3, "sample": 1, "segment": 0, "tokens_hash": "ff", "rank": 1}
    folder = run([*LEDGER[:-2]], rows(0, 0, 1))
    (folder / "refused.jsonl").write_text(json.dumps(changed) + "\n")
    (violation,) = audit(folder).violations
    assert "group 3 sample 1" in violation and "rank 1 (0.1)" in violation
    assert main([str(folder)]) == 1

    run([*LEDGER[:-2], resume(1, 1), reserve(1, 3, 4), FINISH], rows(0, 0, 1) + rows(1, 3, 4, lineage=1))
    report = audit(folder)
    assert report.ok and report.refused == 1, report.violations
    assert "1 rows came" in report.text()
    dropped = {"event": "drop", "group": 3, "reason": "late"}
    assert audit(run([*LEDGER[:-2], resume(1, 1), dropped], rows(0, 0, 1))).ok, "given up, and so never trained"


def test_a_row_refused_before_anything_was_trained_is_a_violation(run):
    changed = {"lineage": 0, "step": 0, "group": 0, "sample": 0, "segment": 0, "tokens_hash": "ff", "rank": 0}
    folder = run(LEDGER[:8], [])
    (folder / "trained.jsonl").unlink()
    (folder / "refused.jsonl").write_text(json.dumps(changed) + "\n")
    assert len(audit(folder).violations) == 1


def finish(*left):
    return {"event": "finish", "left": list(left)}


def test_groups_left_over_by_a_resume_with_fewer_steps_are_counted_and_no_violation(run, capsys):
    ledger = [*LEDGER[:-3], resume(1, 1), finish(3, 4)]
    folder = run(ledger, rows(0, 0, 1))
    report = audit(folder)
    assert report.ok and report.left == 2, report.violations
    assert main([str(folder)]) == 0
    assert "trainer.steps" in capsys.readouterr().out
    assert audit(run([*ledger, resume(1, 2), reserve(1, 3, 4), finish()], rows(0, 0, 1) + rows(1, 3, 4, lineage=2))).ok


@pytest.mark.parametrize(
    "ledger",
    [
        [*LEDGER[:-3], finish(3, 4)],  # it was never resumed
        [*LEDGER[:-3], resume(1, 1), admit(5), finish(3, 4, 5)],  # it admitted more than it trained
        [*LEDGER[:-3], resume(1, 1), finish(4)],  # the queue no longer has group 3
    ],
)
def test_groups_left_over_otherwise_are_violations(run, ledger):
    assert not audit(run(ledger, rows(0, 0, 1))).ok

"""Journal, ledger, payloads and the envelope, and the file systems that a journal refuses."""

import json
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from rl_async.errors import DataError, JournalError, ProtocolError, UserError
from rl_async.messages import Done, Malformed, Sampling, Status, Trajectory, Version
from rl_async.transfer_queue import journal as payloads_module
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.book import Leases, Lost
from rl_async.transfer_queue.client import checked
from rl_async.transfer_queue.journal import (
    MemoryJournal,
    Payloads,
    SqliteJournal,
    file_system,
    freed_by,
    require_local,
)
from rl_async.transfer_queue.ledger import SHOWN, Ledger, audit, main, tells_end
from rl_async.transfer_queue.server import JournalRecorder, recover
from rl_async.transfer_queue.store import Feed, Store
from rl_async.transfer_queue.transitions import (
    EvalClosed,
    GroupDropped,
    Published,
    Retired,
    RolledBack,
    RunFinished,
)


def test_ledger_has_one_line_per_event_and_is_only_appended(make_rig, tmp_path):
    path = tmp_path / "ledger.jsonl"
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    first, second = rig.lease()
    rig.put_all([first])
    for _ in range(2):
        rig.store.delivery.fail("w", second.group_id, 0, second.attempt, "boom", 0.0)
        second = next((group for group in rig.lease(max_groups=1)), second)
    rig.put_all([second])
    rig.store.batches.reserve(0, 0.0)
    rig.store.batches.commit(0)
    rig.store.resume(0, 1, b"")
    rig.store.finish()
    ledger = Ledger(path)
    for transition in rig.seen:
        ledger.append(transition)
    assert path.read_bytes() == b"", "nothing is written before the flush"
    ledger.flush()
    ledger.close()
    lines = without_numbers(path)
    assert lines[0] == {"event": "admit", "group": 0, "task": "t0", "partition": "train", "samples": 2}
    assert [line["event"] for line in lines] == [
        *("admit", "admit"),
        *("put", "put", "ready"),
        *("dead_letter", "admit"),
        *("put", "put", "ready"),
        "reserve",
        "commit",
        "resume",
        "finish",
    ]
    assert lines[3] == {"event": "put", "stored": [[0, 1, ["0-1-0"]]]}
    assert lines[5]["group"] == 1 and "boom" in lines[5]["error"]
    assert lines[10] == {"event": "reserve", "step": 0, "groups": [0, 2]}
    assert (lines[12]["step"], lines[12]["lineage"], lines[12]["fresh"]) == (0, 1, False)
    with path.open("ab") as file:
        file.write(b'{"event":"fi')  # torn by a crash
    again = Ledger(path)
    again.append(RunFinished())
    again.flush()
    again.close()
    assert without_numbers(path) == [*lines, {"event": "finish", "left": []}]


def without_numbers(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seq"} for line in lines]


def follow(path, journal, count, transitions):
    """A queue that goes on from a journal of these transitions."""
    ledger = Ledger(path)
    ledger.follow(journal, count)
    assert list(ledger.catch_up(transitions)) == transitions
    assert ledger.count == count + len(transitions)
    return ledger


DROPS = [GroupDropped(group=group, reason="") for group in range(6)]


def dropped(path):
    return [line.get("group", line.get("id")) for line in without_numbers(path)]


def test_a_ledger_is_completed_from_the_journal(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = follow(path, "one", 0, [])
    for transition in DROPS[:2]:
        ledger.append(transition)
    ledger.flush()
    ledger.append(DROPS[2])  # the journal has it, and the queue is killed
    ledger.close()
    ledger = follow(path, "one", 0, DROPS[:3])
    ledger.close()
    assert dropped(path) == ["one", 0, 1, 2]
    follow(path, "one", 2, [*DROPS[2:4], Published(version=Version(0, 1), released=[])]).close()
    assert dropped(path) == ["one", 0, 1, 2, 3]


def test_what_a_journal_lost_is_cut_off_the_ledger_and_another_journal_cuts_nothing(tmp_path):
    path = tmp_path / "ledger.jsonl"
    follow(path, "one", 0, DROPS).close()
    ledger = follow(path, "one", 0, DROPS[:4])
    ledger.append(RunFinished())
    ledger.flush()
    ledger.close()
    assert dropped(path) == ["one", 0, 1, 2, 3, None]
    ledger = follow(path, "two", 0, [])
    ledger.append(DROPS[5])
    ledger.flush()
    ledger.close()
    assert dropped(path) == ["one", 0, 1, 2, 3, None, "two", 5]
    follow(path, "two", 0, []).close()
    assert dropped(path) == ["one", 0, 1, 2, 3, None, "two"]


def test_a_journal_that_ends_before_its_ledger_is_refused_beside_clients_and_the_ledger_kept(tmp_path):
    path = tmp_path / "ledger.jsonl"
    follow(path, "one", 0, DROPS).close()
    before = path.read_bytes()
    with closing(Ledger(path)) as ledger:
        assert ledger.follow("one", 0)
        with pytest.raises(JournalError, match=r"ledger\.jsonl.*--resume"):
            list(ledger.catch_up(DROPS[:4], may_cut=False))
    assert path.read_bytes() == before


def test_what_a_power_cut_tore_is_written_again_if_the_journal_still_has_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = follow(path, "one", 0, DROPS[:2])
    ledger.compacting()
    for transition in DROPS[2:]:
        ledger.append(transition)
    ledger.flush()
    ledger.close()
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert [json.loads(line)["seq"] for line in lines[1:]] == [0, 1, 1, 2, 3, 4, 5]

    def without(torn):
        """The file with zeros in the place of a line."""
        return b"".join([*lines[:torn], bytes(len(lines[torn]) - 1) + b"\n", *lines[torn + 1 :]])

    for torn in range(4, len(lines)):
        path.write_bytes(without(torn))
        follow(path, "one", 2, DROPS[2:]).close()
        assert path.read_bytes() == whole
    for torn in (1, 2):
        path.write_bytes(without(torn))
        with closing(Ledger(path)) as ledger, pytest.raises(JournalError, match=rf"ledger\.jsonl:{torn + 1}"):
            ledger.follow("one", 2)
        assert path.read_bytes() == without(torn), "and nothing is cut off"


def test_a_long_ledger_is_read_from_the_last_compaction_but_one(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = follow(path, "one", 0, [])
    for transition in DROPS[:4]:
        ledger.append(transition)
        ledger.compacting()
    ledger.append(DROPS[4])
    ledger.flush()
    ledger.close()
    lines = path.read_bytes().splitlines(keepends=True)
    events = [json.loads(line)["event"] for line in lines]
    assert events == ["journal", *("drop", "compacted") * 4, "drop"]
    path.write_bytes(b"".join([*lines[:2], b"x" * (len(lines[2]) - 1) + b"\n", *lines[3:]]))
    follow(path, "one", 4, DROPS[4:]).close()  # what is written before it was on the disk, and is not read
    assert [json.loads(line)["seq"] for line in path.read_bytes().splitlines()[-2:]] == [4, 5]
    path.write_bytes(b"".join([*lines[:7], b"\0" * (len(lines[7]) - 1) + b"\n", *lines[8:]]))
    with closing(Ledger(path)) as ledger, pytest.raises(JournalError, match=r"ledger\.jsonl:8"):
        ledger.follow("one", 4)  # the newest compaction may itself have been torn by a power cut
    path.write_bytes(b"".join(lines))
    with closing(Ledger(path)) as ledger:
        assert not ledger.follow("two", 0)


def test_the_end_of_a_run_is_found_whatever_is_written_around_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    said = 'quoted: "event":"finish" {"event":"finish"'
    for events, ended in (
        ([], False),
        ([GroupDropped(group=1, reason=said)], False),
        ([RunFinished()], True),
        ([RunFinished(), GroupDropped(group=1, reason=said)], True),
        (
            [RunFinished(), RolledBack(step=1, lineage=1, readmitted=[], fresh=False, next_group=1, max_staleness=1)],
            False,
        ),
    ):
        path.unlink(missing_ok=True)
        with closing(Ledger(path)) as ledger:
            for event in events:
                ledger.append(event)
            ledger.flush()
        assert tells_end(path) is ended
    assert not tells_end(tmp_path / "none")


def test_clients_that_know_of_lost_transitions_are_not_forgotten_over_torn_lines(tmp_path):
    path = tmp_path / "ledger.jsonl"
    follow(path, "one", 0, DROPS).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"\0\n", *lines[4:]]))
    ledger = Ledger(path)
    ledger.follow("one", 0)
    with closing(ledger), pytest.raises(JournalError, match="knows 6"):
        list(ledger.catch_up(DROPS[:4], may_cut=False))


def test_a_ledger_that_is_none_is_named(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event":"admit"}\nnonsense\n')
    with closing(Ledger(path)) as ledger, pytest.raises(JournalError, match=r"ledger\.jsonl:2"):
        ledger.follow("one", 0)


def test_payloads_are_freed_with_their_groups():
    payloads = Payloads()
    feed = Feed()
    feed.subscribe(lambda transition: payloads.free(freed_by(transition)))
    for group in range(4):
        payloads.put(group, 0, [b"x", b"y"])
    feed(GroupDropped(group=0, reason=""))
    feed(Retired(step=1, groups=[1]))
    feed(EvalClosed(eval_id=1, groups=[2]))
    feed(Published(version=Version(0, 1), released=[3]))
    assert [payloads.get(group, 0, 0) for group in range(4)] == [None, None, None, b"x"]
    assert [payloads.get(3, sample, segment) for sample, segment in ((0, 1), (0, 2), (1, 0))] == [
        b"y",
        None,
        None,
    ]
    feed(RolledBack(step=0, lineage=1, fresh=False, next_group=4, max_staleness=1))
    assert payloads.get(3, 0, 0) == b"x"
    feed(RolledBack(step=0, lineage=2, fresh=True, next_group=4, max_staleness=1))
    assert payloads.get(3, 0, 0) is None


def test_leases_live_as_long_as_their_worker_is_heard():
    leases = Leases(10.0, 100.0)
    leases.hear("a", 0.0)
    leases.give("a", 1, [0, 1], 0.0)
    leases.hear("b", 2.0)
    leases.give("b", 2, [0], 2.0)
    leases.hear("a", 9.0)
    assert leases.expired(11.0) == [] and leases.workers == 2
    leases.end("a", 1, 0)
    assert leases.expired(12.0) == [Lost("b", {2: [0]})]
    leases.end("b", 2, 0)
    assert (leases.workers, leases.oldest_s(12.0), leases.age("a", 1, 12.0)) == (1, 12.0, 12.0)
    assert leases.expired(19.0) == [Lost("a", {1: [1]})]
    leases.end("a", 1, 1)
    assert leases.holding() == [] and leases.oldest_s(20.0) == 0.0


def test_envelope_round_trip():
    ids = wire.RequestIds()
    first, second = ids.take(), ids.take()
    assert first != second and len(first) == wire.ID_BYTES
    assert wire.decode_request(wire.encode(first, Status(), [b"a", b"b"])) == (first, Status(), [b"a", b"b"])
    assert wire.decode_reply(wire.encode(first, Done())).reply == Done()


@pytest.mark.parametrize("parts", [[], [b"12345678"], [b"12345678", b"\xc1"], [b"1", b""]])
def test_broken_envelopes_are_protocol_errors(parts):
    with pytest.raises(ProtocolError):
        wire.decode_request(parts)
    with pytest.raises(ProtocolError):
        wire.decode_reply(parts)


def test_malformed_replies_become_errors():
    with pytest.raises(ProtocolError, match="too short"):
        checked(wire.ReplyMessage(b"", Malformed(reason="too short"), []))


def test_the_journal_of_another_run_of_the_same_name_is_refused(make_rig, tmp_path):
    def queue(folder):
        """A queue of a run in this folder, with a journal that is elsewhere."""
        folder.mkdir(exist_ok=True)
        with closing(SqliteJournal(tmp_path, "run")) as journal, closing(Ledger(folder / "ledger.jsonl")) as ledger:
            rig = make_rig()
            settings = QueueSettings(steps=1, batch_groups=1, group_size=1)
            rig.store = Store(settings, rig.source, [], Feed(journal.append, ledger.append))
            transitions = recover(rig.store, journal, ledger, 0.0)
            rig.store.publish(Version(0, 0), [])
            JournalRecorder(rig.store, journal, ledger).flush()
            return transitions

    assert queue(tmp_path / "one") == 0
    assert queue(tmp_path / "one") == 2
    with pytest.raises(JournalError, match=r"run-[0-9a-f]+.*ledger\.jsonl"):
        queue(tmp_path / "two")


def test_the_status_tells_the_slowest_flush_of_the_last_minute(make_rig, tmp_path):
    rig, now, seconds = make_rig(), [0.0], iter([0.5, 5.0, 0.5, 0.25])

    class Slow(MemoryJournal):
        def flush(self) -> None:
            now[0] += next(seconds)

    told = []
    with closing(Ledger(tmp_path / "ledger.jsonl")) as ledger:
        recorder = JournalRecorder(rig.store, Slow(), ledger, clock=lambda: now[0])
        for pause in (0.0, 0.0, 10.0, 60.0):
            now[0] += pause
            recorder.flush()
            told.append(rig.store.status(0.0).flush_s)
    assert told == [0.5, 5.0, 5.0, 0.25]


def test_a_lost_ledger_is_written_again_from_the_journal_that_is_within_the_run_or_named(make_rig, tmp_path):
    path = tmp_path / "ledger.jsonl"

    def queue(act=lambda store: None, compact=False):
        with closing(SqliteJournal(tmp_path, "run")) as journal, closing(Ledger(path)) as ledger:
            rig, settings = make_rig(), QueueSettings(steps=1, batch_groups=1, group_size=1)
            rig.store = Store(settings, rig.source, [], Feed(journal.append, ledger.append))
            recover(rig.store, journal, ledger, 0.0, within=True)
            act(rig.store)
            JournalRecorder(rig.store, journal, ledger).flush()
            if compact:
                journal.compact(rig.store.dump())

    queue(lambda store: store.finish())
    before = path.read_text()
    assert '"finish"' in before
    for content in (None, ""):
        path.unlink()
        if content is not None:
            path.write_text(content)
        queue()
        assert path.read_text() == before
    queue(compact=True)
    path.unlink()
    with pytest.raises(JournalError, match=r"ledger\.jsonl is lost"):
        queue()


def test_memory_is_given_back_when_much_was_freed(monkeypatch):
    given: list[int] = []
    monkeypatch.setattr(payloads_module, "give_back_freed_memory", lambda: given.append(len(given)))
    monkeypatch.setattr(payloads_module, "TRIM_BYTES", 10)
    payloads = Payloads()
    for group in range(5):
        payloads.put(group, 0, [b"12345", b"6"])
    payloads.free([0])
    assert given == []
    payloads.free([1, 2, 77])
    assert given == [], "more than a quarter of it is still held"
    payloads.free([3])
    assert given == [0]
    for group in range(5, 8):
        payloads.put(group, 0, [b"12345", b"6"])
    payloads.free(None)
    assert given == [0, 1]
    assert all(payloads.get(group, 0, 0) is None for group in range(8))


@pytest.mark.parametrize("sizes", [[], [1], [5, 3, 2], [10], [10, 10, 1], [11, 1, 30, 4, 4, 4]])
def test_rows_travel_in_few_frames_and_come_apart_again(sizes, monkeypatch):
    monkeypatch.setattr(wire, "JOINED_BYTES", 10)
    rows = [bytes([i]) * size for i, size in enumerate(sizes)]
    frames = wire.join([memoryview(row) for row in rows])
    assert b"".join(frames) == b"".join(rows)
    assert all(len(frame) >= 10 for frame in frames[:-1])
    assert [bytes(row) for row in wire.split(frames, sizes)] == rows


@pytest.mark.parametrize("lengths", [[], [3], [4, 1], [2, 2, 1], [-1, 5], [0, 4], [2, 3]])
def test_rows_that_do_not_fit_their_frames_are_a_protocol_error(lengths):
    with pytest.raises(ProtocolError):
        wire.split([b"abcd"], lengths)
    with pytest.raises(ProtocolError):
        wire.split([b"ab", b"cd"], [4])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": [0, 1, 2]}, "token_ids"),
        ({"loss_mask": [True] * 3}, "loss_mask"),
        ({"logprobs": np.zeros(1, np.float32)}, "logprobs"),
        ({"token_ids": np.zeros((3, 1), np.int32)}, "token_ids"),
    ],
)
def test_a_row_that_nobody_could_read_is_refused_where_it_is_handed_over(change, field):
    row = Trajectory(
        task_id="t",
        group_id=4,
        sample=1,
        attempt=0,
        episode_id="e",
        token_ids=np.zeros(3, np.int32),
        loss_mask=np.ones(3, bool),
        logprobs=np.zeros(3, np.float32),
        versions=[],
        sampling=Sampling(),
        reward=0.0,
    )
    row.header()
    with pytest.raises(ProtocolError, match=f"{field} of group 4 sample 1"):
        msgspec.structs.replace(row, **change).header()


MOUNTS = """22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:26 / /home rw shared:2 - nfs4 server:/home rw,vers=4.2
31 30 259:2 / /home/me/scratch rw - xfs /dev/nvme1n1 rw
32 22 0:40 / /data\\040sets rw - fuse.sshfs host:/ rw
33 22 0:41 / /lustre rw - ext4 /dev/sdb rw
34 33 0:42 / /lustre rw master:9 - lustre 10.0.0.1@tcp:/fs rw
35 22 0:43 / /overlay rw - fuse.fuse-overlayfs fuse-overlayfs rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    return table


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me/runs/x", "nfs4"),
        ("/home/me/scratch/runs/x", "xfs"),
        ("/homestead", "ext4"),
        ("/data sets/x", "fuse.sshfs"),
        ("/lustre/x", "lustre"),
        ("/overlay/x", "fuse.fuse-overlayfs"),
    ],
)
def test_the_innermost_mount_decides(mounts: Path, path: str, kind: str) -> None:
    assert file_system(Path(path), mounts) == kind
    if kind in ("nfs4", "fuse.sshfs", "lustre"):
        with pytest.raises(UserError, match=rf"(?s){path}.*{kind}.*the way out"):
            require_local(Path(path), "the way out", mounts)
    else:
        require_local(Path(path), "the way out", mounts)


def test_a_machine_without_the_table_refuses_nothing(tmp_path: Path) -> None:
    assert file_system(tmp_path, tmp_path / "missing") == ""
    require_local(tmp_path, "", tmp_path / "missing")


def test_links_are_followed(mounts: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/lustre")
    assert file_system(tmp_path / "link" / "runs", mounts) == "lustre"


# The audit finds what is missing, doubled or unknown, and cuts what a resume made void.


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

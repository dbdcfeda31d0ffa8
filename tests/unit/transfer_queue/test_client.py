"""Samples that travel together (order, size, a message that fails), and rows that must come as they were announced."""

import asyncio
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from rl_async import messages, tracing
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import QueueConfig, RunConfig
from rl_async.errors import ProtocolError, QueueLost, RowsChanged, RowsLost, UserError
from rl_async.messages import Done, Refused, Sampling, Task, Trajectory, Version
from rl_async.process.http_auth import ROLES
from rl_async.tracing import Value
from rl_async.transfer_queue import client
from rl_async.transfer_queue.auth import (
    AllowList,
    client_keys,
    make_client_keys,
    make_keys,
    provide_keys,
    read_client_keys,
    server_keys,
)
from rl_async.transfer_queue.client import Outbox, Parcel, Session, announced_rows, parcel
from rl_async.transfer_queue.telemetry import QueueTraces, traced_samples
from rl_async.transfer_queue.transitions import (
    Admitted,
    BatchCommitted,
    BatchReserved,
    GroupDropped,
    LeaseGiven,
    LeaseLost,
    SamplesStored,
)
from tests.conftest import make_rows
from tests.unit.transfer_queue.test_server import HEADER


def row(sample: int, tokens: int = 4) -> Trajectory:
    return Trajectory(
        task_id="t",
        group_id=0,
        sample=sample,
        attempt=0,
        episode_id=str(sample),
        token_ids=np.zeros(tokens, np.int32),
        loss_mask=np.ones(tokens, bool),
        logprobs=np.zeros(tokens, np.float32),
        versions=[],
        sampling=Sampling(),
        reward=0.0,
    )


class Queue:
    """Answers when it is told to; refuses odd samples."""

    def __init__(self) -> None:
        self.messages: list[list[int]] = []
        self.error: Exception | None = None
        self.open = asyncio.Event()

    async def send(self, parcels: list[Parcel]) -> list[Refused | None]:
        assert all(len(parcel.headers) == len(parcel.rows) for parcel in parcels)
        self.messages.append([parcel.headers[0].sample for parcel in parcels])
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return [Refused(code="odd", reason="") if parcel.headers[0].sample % 2 else None for parcel in parcels]


async def handed_over(box: Outbox, *rows: Trajectory) -> list["asyncio.Future[Done | Refused]"]:
    answers = [box.put(parcel([row], {})) for row in rows]
    await asyncio.sleep(0)  # the outbox looks at what waits
    await asyncio.sleep(0)  # its messages are sent
    return answers


def test_what_comes_while_a_message_is_on_its_way_shares_the_next() -> None:
    async def check() -> None:
        queue = Queue()
        box = Outbox(queue.send)
        first = await handed_over(box, row(0))
        later = await handed_over(box, row(1), row(2), row(3))
        assert queue.messages == [[0]]
        queue.open.set()
        answers = await asyncio.gather(*first, *later)
        assert queue.messages == [[0], [1, 2, 3]]
        assert [isinstance(answer, Done) for answer in answers] == [True, False, True, False]
        await asyncio.gather(*await handed_over(box, row(4)))
        assert queue.messages[2:] == [[4]]

    asyncio.run(check())


def test_a_message_has_a_largest_size_and_a_larger_sample_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_BYTES", 2000)

    async def check() -> None:
        queue = Queue()
        box = Outbox(queue.send)
        tasks = await handed_over(box, row(0), row(1), row(2, tokens=1000), row(3), row(4))
        queue.open.set()
        await asyncio.gather(*tasks)
        assert queue.messages == [[0, 1], [2], [3, 4]]

    asyncio.run(check())


def test_full_messages_do_not_wait_for_one_another_and_a_growing_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_BYTES", 2000)
    monkeypatch.setattr(client, "AT_ONCE", 3)

    async def check() -> None:
        queue = Queue()
        box = Outbox(queue.send)
        answers = await handed_over(box, *(row(sample, tokens=1000) for sample in (0, 2)), row(4))
        assert queue.messages == [[0], [2]], "the last is not full"
        answers += await handed_over(box, *(row(sample, tokens=1000) for sample in (6, 8)))
        assert queue.messages == [[0], [2], [4]], "more would be too many at once"
        queue.open.set()
        assert all(isinstance(answer, Done) for answer in await asyncio.gather(*answers))
        assert sorted(queue.messages) == [[0], [2], [4], [6], [8]]

    asyncio.run(check())


@pytest.mark.parametrize("error", [QueueLost("gone"), ProtocolError("odd"), OSError("no socket")])
def test_an_error_reaches_everyone_whose_sample_was_in_the_message(error: Exception) -> None:
    async def check() -> None:
        queue = Queue()
        queue.error = error
        box = Outbox(queue.send)
        tasks = await handed_over(box, row(0), row(2), row(4))
        queue.open.set()
        assert await asyncio.gather(*tasks, return_exceptions=True) == [error] * 3
        queue.error = None
        assert isinstance(await box.put(parcel([row(6)], {})), Done)

    asyncio.run(check())


def test_one_that_no_longer_waits_does_not_keep_the_others_from_their_answers() -> None:
    async def check() -> None:
        queue = Queue()
        box = Outbox(queue.send)
        tasks = await handed_over(box, row(0), row(2), row(4))
        tasks[1].cancel()
        queue.open.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[0], Done) and isinstance(answers[2], Done)
        assert isinstance(answers[1], asyncio.CancelledError)
        assert queue.messages == [[0, 2, 4]]  # what was handed over is sent all the same

    asyncio.run(check())


ROWS = make_rows(0, groups=1, samples=3)
HEADERS = [parcel([row], None).headers[0] for row in ROWS]
FRAMES = [messages.encode(row) for row in ROWS]


def test_rows_as_they_were_put_pass():
    assert [row.header() for row in announced_rows(HEADERS, FRAMES)] == [row.header() for row in ROWS]


def test_other_tokens_are_named_with_who_kept_them():
    headers = [msgspec.structs.replace(header, shards=["shard-0-ab"]) for header in HEADERS]
    changed = msgspec.structs.replace(ROWS[1], token_ids=ROWS[1].token_ids[::-1])
    with pytest.raises(RowsChanged, match=r"group 0 sample 1.*shard-0-ab") as caught:
        announced_rows(headers, [FRAMES[0], messages.encode(changed), FRAMES[2]])
    assert caught.value.tokens_hash == {(0, 1, 0): changed.tokens_hash()}


def test_another_row_in_its_place_is_noticed_though_both_are_whole():
    with pytest.raises(RowsChanged) as caught:
        announced_rows(HEADERS, [FRAMES[1], FRAMES[0], FRAMES[2]])
    assert set(caught.value.tokens_hash) == {(0, 0, 0), (0, 1, 0)}


def test_a_row_of_a_later_attempt_asks_for_the_batch_again():
    later = msgspec.structs.replace(ROWS[0], attempt=ROWS[0].attempt + 1)
    with pytest.raises(RowsLost):
        announced_rows(HEADERS[:1], [messages.encode(later)])


def test_a_row_of_which_any_byte_changed_is_noticed_whatever_it_was_and_though_it_is_none_any_more():
    for place in range(len(FRAMES[0])):
        frame = bytearray(FRAMES[0])
        frame[place] ^= 1
        with pytest.raises((RowsChanged, RowsLost)):  # lost: it seems to be of a later attempt
            announced_rows(HEADERS[:1], [bytes(frame)])


# The queue's spans of an episode: as a whole, and its waits.


Added = tuple[str, str, str]  # episode, name, error


class FakeSpans:
    """Keeps what is added."""

    def __init__(self) -> None:
        self.added: list[Added] = []
        self.traced: set[str] = set()

    def begins(self, episode: str) -> bool:
        return episode in self.traced

    def add(
        self,
        episode: str,
        name: str,
        key: str,
        parent: str,
        times: tuple[int, int],
        error: str,
        about: Mapping[str, Value],
    ) -> None:
        assert 0 < times[0] <= times[1] and bool(parent) == (name != "episode") == (not key)
        self.added.append((episode, name, error))


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> FakeSpans:
    fake = FakeSpans()
    monkeypatch.setattr(tracing, "_spans", fake)
    return fake


def admitted(group: int) -> Admitted:
    task = Task(task_id="t", data_source="", prompt=[], ground_truth="")
    return Admitted(group=group, partition="train", samples=1, task=task)


def leased(group: int, attempt: int, *, traced: bool = True) -> LeaseGiven:
    return LeaseGiven(
        group=group, samples=[0], attempt=attempt, worker="w", min_version=Version(), traced=[0] if traced else []
    )


def stored(group: int, attempt: int, *, traced: bool = True) -> SamplesStored:
    return SamplesStored(samples=[[msgspec.structs.replace(HEADER, group_id=group, attempt=attempt, traced=traced)]])


def test_an_episode_that_is_trained(spans: FakeSpans) -> None:
    traces = QueueTraces()
    for transition in (
        admitted(3),
        leased(3, 0),
        stored(3, 0),
        BatchReserved(step=0, groups=[3]),
        BatchCommitted(step=0),
    ):
        traces(transition)
    assert spans.added == [
        ("3.0.0", "wait for worker", ""),
        ("3.0.0", "wait for batch", ""),
        ("3.0.0", "episode", ""),
    ]


def test_an_attempt_whose_worker_was_lost_has_a_trace_that_failed(spans: FakeSpans) -> None:
    traces = QueueTraces()
    lost = LeaseLost(group=3, samples=[0], worker="w", charged=True)
    for transition in (
        admitted(3),
        leased(3, 0),
        lost,
        leased(3, 1),
        stored(3, 1),
        GroupDropped(group=3, reason="late"),
    ):
        traces(transition)
    ended = [(episode, bool(error)) for episode, name, error in spans.added if name == "episode"]
    assert ended == [("3.0.0", True), ("3.0.1", True)]


def test_what_happened_before_a_restart_of_the_queue_is_not_needed(spans: FakeSpans) -> None:
    traces = QueueTraces()
    for transition in (stored(3, 0), BatchReserved(step=0, groups=[3, 4]), BatchCommitted(step=0)):
        traces(transition)
    assert ("3.0.0", "episode", "") in spans.added


def test_an_episode_without_a_trace_has_no_span(spans: FakeSpans) -> None:
    traces = QueueTraces()
    for transition in (
        admitted(3),
        leased(3, 0, traced=False),
        LeaseLost(group=3, samples=[0], worker="w", charged=True),
        leased(3, 1, traced=True),
        stored(3, 1, traced=True),
        admitted(4),
        leased(4, 0, traced=False),
        stored(4, 0, traced=False),
        BatchReserved(step=0, groups=[3, 4]),
        BatchCommitted(step=0),
    ):
        traces(transition)
    assert {episode for episode, _, _ in spans.added} == {"3.0.1"} and len(spans.added) == 3


def test_the_queue_chooses_among_the_samples_that_it_leases(spans: FakeSpans) -> None:
    spans.traced = {"3.1.0", "3.2.1"}
    assert traced_samples(3, [0, 1, 2], 0) == [1] and traced_samples(3, [0, 1, 2], 1) == [2]


# Key files: who may read them, what is refused, who is on the list, and who may be behind a socket file.


def config(**queue: object) -> RunConfig:
    settings = msgspec.convert(queue, QueueConfig)
    return RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"), queue=settings)


def test_only_their_owner_can_read_keys(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    files = [path for path in (tmp_path / "keys").rglob("*") if path.is_file()]
    assert len(files) == 2 * (1 + len(ROLES))
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_keys_that_are_there_stay(tmp_path: Path) -> None:
    assert make_keys(tmp_path) == [tmp_path / f"{name}.key" for name in ("server", *ROLES)]
    before = read_client_keys(tmp_path, "worker")
    assert make_keys(tmp_path) == []
    assert make_client_keys(tmp_path, "guest", "worker") == [tmp_path / "guest.key"]
    assert read_client_keys(tmp_path, "worker") == before != read_client_keys(tmp_path, "guest")


def test_a_client_that_was_shut_out_is_not_let_in_by_the_next_keygen(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "clients" / "worker.pub").unlink()
    with pytest.raises(UserError, match="another name"):
        make_keys(tmp_path)


@pytest.mark.parametrize("name", ["", "../run", "server", "trainer", "a/b", "a.b"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="--client"):
        make_client_keys(tmp_path, name, "worker")


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    make_keys(tmp_path)
    keys, secret = read_client_keys(tmp_path, "worker"), (tmp_path / "server.key").read_text().strip()
    assert keys.secret.decode() not in repr(keys) and keys.public == zmq.curve_public(keys.secret)
    assert secret not in repr(server_keys(config(keys=str(tmp_path)), tmp_path))


@pytest.mark.parametrize("queue", [{}, {"host": "0.0.0.0"}, {"host": "10.1.2.3"}, {"curve": "always"}])
def test_every_run_gets_its_own_keys_one_for_each_role(tmp_path: Path, queue: dict[str, str]) -> None:
    with pytest.raises(UserError, match="keygen"):
        server_keys(config(**queue), tmp_path)
    provide_keys(config(**queue), tmp_path)
    allowed = server_keys(config(**queue), tmp_path).allowed
    assert allowed.roles == {client_keys(config(**queue), tmp_path, role).public: role for role in ROLES}
    assert len(allowed.roles) == len(ROLES)


def test_keys_that_a_config_names_are_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"server\.key.*keygen"):
        provide_keys(config(keys=str(tmp_path / "none")), tmp_path)
    make_keys(tmp_path / "some")
    (tmp_path / "some" / "reader.key").unlink()
    with pytest.raises(UserError, match=r"reader\.key"):
        provide_keys(config(keys=str(tmp_path / "some")), tmp_path)


def test_a_file_without_a_key_is_named(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "clients" / "bad.pub").write_text("short")
    with pytest.raises(UserError, match=r"bad\.pub"):
        AllowList(tmp_path / "clients")
    (tmp_path / "worker.key").write_text("\x7f" * 40)
    with pytest.raises(UserError, match=r"worker\.key"):
        read_client_keys(tmp_path, "worker")


@pytest.mark.parametrize("role", ["", " ", " king", " worker trainer"])
def test_a_client_without_a_role_is_named(tmp_path: Path, role: str) -> None:
    make_keys(tmp_path)
    (tmp_path / "clients" / "old.pub").write_text("x" * 40 + role)
    with pytest.raises(UserError, match=r"old\.pub has no role"):
        AllowList(tmp_path / "clients")


def test_the_list_follows_its_folder(tmp_path: Path) -> None:
    make_keys(tmp_path)
    allowed = AllowList(tmp_path / "clients", ["x" * 40 + " reader"])
    assert {key: role for key, role in allowed.roles.items() if role == "reader"} == {
        read_client_keys(tmp_path, "reader").public: "reader",
        b"x" * 40: "reader",
    }
    make_client_keys(tmp_path, "guest", "operator")
    for role in ROLES:
        (tmp_path / "clients" / f"{role}.pub").unlink()
    allowed.refresh()
    assert allowed.roles == {read_client_keys(tmp_path, "guest").public: "operator", b"x" * 40: "reader"}
    (tmp_path / "clients" / "guest.pub").unlink()
    (tmp_path / "clients").rmdir()
    allowed.refresh()
    assert allowed.roles == {b"x" * 40: "reader"}


def test_a_file_that_is_just_being_copied_lets_nobody_in_and_ends_nothing(tmp_path: Path) -> None:
    make_keys(tmp_path)
    allowed = AllowList(tmp_path / "clients")
    before, file = allowed.roles, tmp_path / "clients" / "new.pub"
    file.write_text("")
    allowed.refresh()
    assert allowed.roles == before
    # This does not change the folder's time stamp.
    file.write_bytes(b"y" * 40 + b" reader")
    allowed.refresh()
    assert allowed.roles == {**before, b"y" * 40: "reader"}


def test_a_folder_that_was_away_counts_again_when_it_is_back(tmp_path: Path) -> None:
    make_keys(tmp_path)
    # It was long ago, so that the time stamp alone says that nothing changed.
    os.utime(tmp_path / "clients", (1, 1))
    allowed = AllowList(tmp_path / "clients")
    roles = allowed.roles
    (tmp_path / "clients").rename(tmp_path / "away")
    allowed.refresh()
    assert not allowed.roles
    (tmp_path / "away").rename(tmp_path / "clients")
    allowed.refresh()
    assert allowed.roles == roles != {}


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_enter_is_shown_no_key(tmp_path: Path, mode: int) -> None:
    make_keys(tmp_path / "keys")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    keys = read_client_keys(tmp_path / "keys", "worker")
    with pytest.raises(UserError, match="open"):
        Session(f"ipc://{tmp_path}/open/queue", "test", "t", keys).check_place()
    with pytest.raises(QueueLost, match="none"):
        Session(f"ipc://{tmp_path}/none/queue", "test", "t", keys).check_place()

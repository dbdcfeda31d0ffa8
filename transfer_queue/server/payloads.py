"""The verbs that bring and fetch rows: checked against what the request says, and handed on as they came."""

import hashlib
import sys
from collections.abc import Callable, Sequence

from rl_async import messages as m
from rl_async.configs.derived.rewards import unbounded
from rl_async.errors import ProtocolError
from rl_async.messages.codec import Frame
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.server.gate import Response
from rl_async.transfer_queue.server.serving import Incoming, Serving
from rl_async.transfer_queue.state.store import Store

Headers = Sequence[m.TrajectoryHeader]  # of the rows of one sample


def put(queue: Serving, incoming: Incoming[m.Put], last: bool) -> Response:
    """Handle a Put: take in the samples that are wanted, all by one transition. Raises ProtocolError."""
    request, payload, store = incoming.request, incoming.payload, queue.store
    if not all(request.samples):
        raise ProtocolError("a Put of a sample without rows")
    places = {sha256: m.media_sample(sha256) for sha256 in _media_of(request)}
    if not store.settings.replicas:
        put_here = _put_with_media if places or request.media else _put_rows
        return Response(m.Taken(refused=put_here(queue, request, payload, places)))
    if payload:
        return Response(m.Refused(code=wire.SHARDED, reason="the payloads of this queue go to its shards"))
    return Response(m.Taken(refused=_take(queue, request, store.shards.misplaced)))


def _media_of(request: m.Put) -> set[str]:
    """The hashes of all media that the rows refer to."""
    found: set[str] = set()
    for headers in request.samples:
        for header in headers:
            if header.media:
                found.update(header.media)
    return found


def _take(
    queue: Serving,
    request: m.Put,
    refusal: Callable[[Headers], m.Refused | None] | None = None,
    sized: Callable[[Headers], list[m.TrajectoryHeader]] = list,
) -> list[m.Refused | None]:
    """Take the samples for which there is no ``refusal``, all at once; of each, None or why it is not wanted.

    Those that are new are stored with the headers that ``sized`` returns.
    """
    store, worker, now = queue.store, request.worker, queue.clock()
    answers: list[m.Refused | None] = []
    for headers in request.samples:
        refused = _unbounded(store, worker, headers, now)
        answers.append(refusal(headers) if refused is None and refusal is not None else refused)
    wanted = [number for number, answer in enumerate(answers) if answer is None]
    samples = request.samples if len(wanted) == len(answers) else [request.samples[number] for number in wanted]
    taken = store.delivery.put_all(worker, samples, now, sized)
    for number, refused in zip(wanted, taken, strict=True):
        answers[number] = refused
    return answers


def _unbounded(store: Store, worker: str, headers: Headers, now: float) -> m.Refused | None:
    """Refuse a sample with a reward beyond the bound; its attempt has failed, so it is generated again."""
    limit, bounded = store.settings.reward_limit, store.settings.reward_parts
    for header in headers:
        if abs(header.reward) <= limit and not header.reward_parts:
            continue
        others = {name: part for name, part in header.reward_parts.items() if name not in bounded}
        parts = {name: part for name, part in header.reward_parts.items() if name in bounded}
        problem = unbounded({"the reward": header.reward} | parts, limit) or unbounded(others, sys.float_info.max)
        if problem:
            failed = store.delivery.fail(worker, header.group_id, header.sample, header.attempt, problem, now)
            return failed if isinstance(failed, m.Refused) else m.Refused(code="reward", reason=problem)
    return None


def _put_rows(
    queue: Serving, request: m.Put, payload: Sequence[Frame], places: dict[str, int]
) -> list[m.Refused | None]:
    """Take samples with their payload, none of which refers to media: there are no ``places``."""
    rows, _ = _payload_of(request, payload)
    answers = _take(queue, request)
    _keep_rows(queue, request, answers, rows)
    return answers


def _keep_rows(queue: Serving, request: m.Put, answers: Sequence[m.Refused | None], rows: Sequence[Frame]) -> None:
    """Hand the rows of the samples that were taken to the journal, but for groups that are gone already: the last
    sample may have shown that a group is not worth keeping."""
    put, groups, start = queue.journal.put, queue.store.book.groups, 0
    for headers, refused in zip(request.samples, answers, strict=True):
        end = start + len(headers)
        if refused is None and headers[0].group_id in groups:
            put(headers[0].group_id, headers[0].sample, rows[start:end])
        start = end


def _put_with_media(
    queue: Serving, request: m.Put, payload: Sequence[Frame], places: dict[str, int]
) -> list[m.Refused | None]:
    """Take samples with their payload and the media that their groups lack; ``places`` are their sample numbers."""
    journal, groups = queue.journal, queue.store.book.groups
    rows, media = _payload_of(request, payload)
    coming: set[m.MediaKey] = set()  # media that the queue does not have yet, of the samples that it takes

    def lacking(headers: Headers) -> set[m.MediaKey]:
        keys = {(headers[0].group_id, sha256) for header in headers for sha256 in header.media}
        return {key for key in keys if not journal.has(key[0], places[key[1]])}

    def missing(headers: Headers) -> m.Refused | None:
        absent = sorted(sha256 for _, sha256 in lacking(headers) - media.keys())
        return m.Refused(code=wire.MEDIA, reason=" ".join(absent)) if absent else None

    def sized(headers: Headers) -> list[m.TrajectoryHeader]:
        new = lacking(headers) - coming
        coming.update(new)
        headers[0].nbytes += sum(len(media[key]) for key in new)
        return list(headers)

    answers = _take(queue, request, missing, sized)
    _keep_rows(queue, request, answers, rows)
    for headers, refused in zip(request.samples, answers, strict=True):
        group = headers[0].group_id
        if refused is None and group in groups:
            for key in {(group, sha256) for header in headers for sha256 in header.media} & coming:
                journal.put(group, places[key[1]], [media[key]])
    return answers


def _payload_of(request: m.Put, payload: Sequence[Frame]) -> tuple[Sequence[Frame], dict[m.MediaKey, Frame]]:
    """The rows of a Put, whose headers get their lengths, and its media.

    Raises ProtocolError if they are not what the request says.
    """
    count = sum(map(len, request.samples))
    media = len(payload) - len(request.media)
    if count != len(request.lengths) or media < 0 or not all(map(len, payload)):
        raise ProtocolError(
            f"a Put of {count} rows with {len(request.lengths)} lengths, and of {len(request.media)} media with "
            f"{len(payload)} payload frames, none of which may be empty"
        )
    rows = wire.split(payload[:media], request.lengths)
    lengths = iter(request.lengths)
    for headers in request.samples:
        for header in headers:
            header.nbytes, header.shards = next(lengths), []
    return rows, _checked_media(request.media, payload[media:])


def _checked_media(keys: Sequence[m.MediaKey], frames: Sequence[Frame]) -> dict[m.MediaKey, Frame]:
    """Media by group and hash. Raises ProtocolError for bytes that have another hash."""
    for (_, sha256), frame in zip(keys, frames, strict=True):
        if hashlib.sha256(frame).hexdigest() != sha256:
            raise ProtocolError(f"the bytes of a medium do not have the hash {sha256[:80]}")
    return dict(zip(keys, frames, strict=True))


def fetch(queue: Serving, incoming: Incoming[m.Fetch], last: bool) -> Response:
    """Handle a Fetch: the rows, or where they are."""
    wanted = incoming.request.rows
    if len(set(wanted)) != len(wanted):
        return Response(m.Refused(code="rows", reason="a row is requested twice"))
    if queue.store.settings.replicas:
        return Response(queue.store.shards.places(wanted))
    rows = list(map(queue.journal.get, wanted))
    missing = [key for key, row in zip(wanted, rows) if row is None]
    if missing:
        return Response(m.Refused(code="unknown_row", reason=f"no row (group, sample, segment) {missing[:8]}"))
    found = [row for row in rows if row is not None]
    return Response(m.FetchedRows(lengths=list(map(len, found))), wire.join(found))

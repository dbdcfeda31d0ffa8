"""What was fetched is what was announced, row by row."""

import msgspec
import pytest

from rl_async import codec
from rl_async.errors import RowsChanged, RowsLost
from rl_async.transfer_queue.conversations import announced_rows, parcel
from tests.conftest import make_rows

ROWS = make_rows(0, groups=1, samples=3)
HEADERS = [parcel([row], None).headers[0] for row in ROWS]
FRAMES = [codec.encode(row) for row in ROWS]


def test_rows_as_they_were_put_pass():
    assert [row.header() for row in announced_rows(HEADERS, FRAMES)] == [row.header() for row in ROWS]


def test_other_tokens_are_named_with_who_kept_them():
    headers = [msgspec.structs.replace(header, shards=["shard-0-ab"]) for header in HEADERS]
    changed = msgspec.structs.replace(ROWS[1], token_ids=ROWS[1].token_ids[::-1])
    with pytest.raises(RowsChanged, match=r"group 0 sample 1.*shard-0-ab") as caught:
        announced_rows(headers, [FRAMES[0], codec.encode(changed), FRAMES[2]])
    assert caught.value.tokens_hash == {(0, 1, 0): changed.tokens_hash()}


def test_another_row_in_its_place_is_noticed_though_both_are_whole():
    with pytest.raises(RowsChanged) as caught:
        announced_rows(HEADERS, [FRAMES[1], FRAMES[0], FRAMES[2]])
    assert set(caught.value.tokens_hash) == {(0, 0, 0), (0, 1, 0)}


def test_a_row_of_a_later_attempt_asks_for_the_batch_again():
    later = msgspec.structs.replace(ROWS[0], attempt=ROWS[0].attempt + 1)
    with pytest.raises(RowsLost):
        announced_rows(HEADERS[:1], [codec.encode(later)])


def test_a_row_of_which_any_byte_changed_is_noticed_whatever_it_was_and_though_it_is_none_any_more():
    for place in range(len(FRAMES[0])):
        frame = bytearray(FRAMES[0])
        frame[place] ^= 1
        with pytest.raises((RowsChanged, RowsLost)):  # lost: it seems to be of a later attempt
            announced_rows(HEADERS[:1], [bytes(frame)])

"""What was fetched is what was announced, row by row."""

import msgspec
import pytest

from rl_async.errors import RowsChanged, RowsLost
from rl_async.transfer_queue.client.announced import check_announced
from tests.conftest import make_rows

ROWS = make_rows(0, groups=1, samples=3)
HEADERS = [row.header() for row in ROWS]


def test_rows_as_they_were_put_pass():
    check_announced(HEADERS, ROWS)


def test_other_tokens_are_named_with_who_kept_them():
    headers = [msgspec.structs.replace(header, shards=["shard-0-ab"]) for header in HEADERS]
    changed = msgspec.structs.replace(ROWS[1], token_ids=ROWS[1].token_ids[::-1])
    with pytest.raises(RowsChanged, match=r"group 0 sample 1.*shard-0-ab") as caught:
        check_announced(headers, [ROWS[0], changed, ROWS[2]])
    assert caught.value.tokens_sha256 == {(0, 1, 0): changed.tokens_sha256()}


def test_another_row_in_its_place_is_noticed_though_both_are_whole():
    with pytest.raises(RowsChanged) as caught:
        check_announced(HEADERS, [ROWS[1], ROWS[0], ROWS[2]])
    assert set(caught.value.tokens_sha256) == {(0, 0, 0), (0, 1, 0)}


def test_a_row_of_a_later_attempt_asks_for_the_batch_again():
    later = msgspec.structs.replace(ROWS[0], attempt=ROWS[0].attempt + 1)
    with pytest.raises(RowsLost):
        check_announced(HEADERS[:1], [later])

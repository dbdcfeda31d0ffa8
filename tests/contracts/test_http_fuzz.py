"""Hostile requests harm no HTTP server of a run; ``python -m tests.fuzz.http`` sends many more of them."""

import random
from collections.abc import Iterator

import pytest
import torch

from tests.conftest import make_model
from tests.fuzz.http import Fuzzer, Heard, tokenizer
from tests.fuzz.http_attacks import Attack, judge
from tests.fuzz.http_servers import Target, targets
from tests.support.effort import examples

NAMES = ("gateway", "engine", "reward model", "metrics")


@pytest.fixture(scope="module")
def heard() -> Iterator[Heard]:
    with Heard() as listening:
        yield listening


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, heard: Heard) -> Iterator[dict[str, Target]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with targets(make_model(tmp_path_factory.mktemp("model")), tokenizer()) as found:
        yield {target.name: target for target in found}
    torch.set_num_threads(threads)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_hostile_requests_change_nothing_for_a_valid_client(served: dict[str, Target], heard: Heard, name: str) -> None:
    fuzzer = Fuzzer(served[name], heard)
    for number in range(examples(60)):
        try:
            fuzzer.round(random.Random(f"{name}.{number}"), at_once=5)
        except AssertionError as error:
            error.add_note(f"in round {number} at the {name}")
            raise
    assert sum(fuzzer.statuses.values()) >= examples(60)


ATTACK = Attack([b"POST /pause HTTP/1.1\r\n\r\n"], authorised=False, whole=True, method="POST", anthropic=False)
ERROR = b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s"


def refused(status: int, body: bytes) -> bytes:
    return ERROR % (status, len(body), body)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n",
        refused(500, b'{"error": {"message": "x", "type": "y"}}'),
        refused(401, b"Unauthorized"),
        refused(401, b'{"error": {"message": "no sesame", "type": "y"}}'),
        refused(401, b'{"error": {"message": "Traceback (most recent call last)", "type": "y"}}'),
    ],
)
def test_what_it_is_there_to_notice_is_noticed(answer: bytes) -> None:
    assert judge(ATTACK, refused(401, b'{"error": {"message": "x", "type": "y"}}'), ["sesame"]) == 401
    with pytest.raises(AssertionError):
        judge(ATTACK, answer, ["sesame"])

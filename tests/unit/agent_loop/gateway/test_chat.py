"""What a run does not obey is dropped and counted, or refused."""

import logging

import pytest

from rl_async.agent_loop.gateway import chat
from rl_async.agent_loop.gateway.chat import UnobeyedFields
from rl_async.errors import RequestRefused


def test_dropped_fields_are_counted_and_logged_once_for_each_client(caplog: pytest.LogCaptureFixture) -> None:
    unobeyed = UnobeyedFields("ignore")
    with caplog.at_level(logging.INFO, logger="rl_async.gateway"):
        for client in ("a/1", "a/1", "b/2"):
            unobeyed.settle({"temperature": 0.0, "top_k": 5}, client)
        unobeyed.settle({}, "c/3")
    assert unobeyed.dropped == {
        ("a/1", "temperature"): 2,
        ("a/1", "top_k"): 2,
        ("b/2", "temperature"): 1,
        ("b/2", "top_k"): 1,
    }
    assert len(caplog.records) == 4
    assert unobeyed.listing()[0] == {"client": "a/1", "field": "temperature", "requests": 2}


def test_names_that_clients_choose_take_bounded_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "COUNTED", 3)
    unobeyed = UnobeyedFields("ignore")
    for number in range(9):
        unobeyed.settle({f"{number}" * 500: 1}, "x" * 500)
    assert len(unobeyed.dropped) == 4 and unobeyed.dropped["others", "others"] == 6
    assert max(len(name) for key in unobeyed.dropped for name in key) == chat.SHOWN


def test_they_are_refused_by_name_if_the_run_says_so() -> None:
    unobeyed = UnobeyedFields("refuse")
    with pytest.raises(RequestRefused, match="ignore") as refused:
        unobeyed.settle({"top_p": 0.5}, "a/1")
    assert (refused.value.param, refused.value.code, refused.value.status) == ("top_p", "unsupported_value", 400)
    assert not unobeyed.dropped


@pytest.mark.parametrize("table", [chat.OPENAI, chat.ANTHROPIC])
def test_a_field_with_a_way_out_has_values_that_are_accepted(table: dict[str, chat.Field]) -> None:
    assert all(field.neutral is not None or not field.way_out for field in table.values())

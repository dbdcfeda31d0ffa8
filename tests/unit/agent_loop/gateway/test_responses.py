"""What requests in the Responses dialect ask for, what is kept of them, and what their clients read back."""

from typing import Any

import msgspec
import pytest

from rl_async.agent_loop.gateway.chat import ChatMessage, Completion, FunctionCall
from rl_async.agent_loop.gateway.responses import (
    KeptResponses,
    ResponseHead,
    ResponsesRequest,
    ResponseStream,
    read_request,
)
from rl_async.errors import RequestRefused


def ask(kept: KeptResponses | None = None, **fields: Any) -> ResponsesRequest:
    return read_request(msgspec.json.encode({"input": "hello", **fields}), kept or KeptResponses())


def test_whole_conversations_in_every_request_are_kept_once() -> None:
    kept, items, turns = KeptResponses(), list[dict[str, Any]](), 50
    for turn in range(turns):
        items.append({"role": "user", "content": f"question {turn}"})
        wanted = ask(kept, input=items)
        answer = ChatMessage("assistant", f"answer {turn}", reasoning="so")
        kept.keep(f"r{turn}", "", [*wanted.said, answer], [])
        items.append({"role": "assistant", "content": answer.text})
    assert len(kept) <= 3 * turns, "a question, and an answer as it was given and as it comes back"
    history = kept.history(f"r{turns - 1}")
    assert [message.text for message in history[:3]] == ["question 0", "answer 0", "question 1"]
    assert (len(history), history[-1].reasoning) == (2 * turns, "so")


def test_a_kept_response_continues_another() -> None:
    kept = KeptResponses()
    kept.keep("a", "", [ChatMessage("user", "1"), ChatMessage("assistant", "2")], [])
    for name in ("b", "c"):
        kept.keep(name, "a", [ChatMessage("user", name), ChatMessage("assistant", "2")], [])
    assert [message.text for message in kept.history("c")] == ["1", "2", "c", "2"]
    assert [message.text for message in ask(kept, previous_response_id="b").chat.messages] == [*"12b2", "hello"]
    kept.keep("empty", "", [], [])
    assert kept.history("empty") == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ({"format": {"type": "grammar"}, "verbosity": None}, ["text.format"]),
        ({"format": {"type": "json_object"}, "verbosity": None}, []),  # which is read
        ({"verbosity": "low"}, ["text.verbosity"]),
        ({"frobnicate": 1}, ["text.frobnicate"]),
        ({"format": None, "verbosity": None}, []),
        ({"format": {"type": "text"}, "verbosity": "medium"}, []),
        (None, []),
    ],
)
def test_options_of_the_text_that_the_run_does_not_obey_are_named(text: Any, named: list[str]) -> None:
    assert list(ask(text=text).chat.unobeyed) == named


def test_members_of_null_ask_for_nothing() -> None:
    assert ask(reasoning={"effort": None, "summary": None}).chat.unobeyed == {}
    assert ask(reasoning={"effort": "low", "summary": None}).chat.unobeyed != {}


def test_a_function_without_a_name_is_refused() -> None:
    function = {"type": "function", "parameters": {}}
    for tools in ([function], [function | {"name": ""}], [{"type": "namespace", "name": "n", "tools": [function]}]):
        with pytest.raises(RequestRefused) as refused:
            ask(tools=tools)
        assert (refused.value.code, refused.value.param) == ("invalid_request", "tools")


@pytest.mark.parametrize(
    ("choice", "forces"),
    [
        ("required", ""),
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "function", "name": "g"}, "n__g"),
        ("auto", None),
    ],
)
def test_a_call_of_an_offered_function_may_be_forced(choice: Any, forces: Any) -> None:
    space = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]}
    request = ask(tools=[{"type": "function", "name": "f", "parameters": {}}, space], tool_choice=choice).chat
    assert request.forces == forces and "tool_choice" not in request.unobeyed


@pytest.mark.parametrize("name", ["", "g"])
def test_forcing_a_function_that_is_not_offered_is_refused(name: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        ask(tools=[{"type": "function", "name": "f"}], tool_choice={"type": "function", "name": name})
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_request", "tool_choice")


@pytest.mark.parametrize(
    "said",
    [
        ChatMessage("assistant", "", reasoning="so"),
        ChatMessage("assistant", "hi", reasoning="so"),
        ChatMessage("assistant", "hi"),
        ChatMessage("assistant", ""),
        ChatMessage("assistant", "", (FunctionCall("f", "{}"),), "so"),
        ChatMessage("assistant", "hi", (FunctionCall("f", "{}"), FunctionCall("g", "{}"))),
    ],
)
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize("early", [True, False])
def test_a_stream_ends_with_the_items_of_an_answer_that_is_not_streamed(
    said: ChatMessage, finish_reason: str, early: bool
) -> None:
    head = ResponseHead(ask(), "ep", 0, "m")
    done, stream = Completion(0, said, finish_reason, 5, 7), ResponseStream(head)
    rest = ("", "") if early else (said.reasoning, said.text)
    sent = list(stream.more(said.reasoning, said.text)) if early else []
    events = [*stream.begin(), *sent, *stream.end(done, *rest)]
    assert events[-1]["response"] == head.answer(done)
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == head.output(done)

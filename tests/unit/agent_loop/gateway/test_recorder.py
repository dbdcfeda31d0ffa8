"""Messages to rows: continued, branched, edited and parallel conversations, and what always holds of the tokens."""

import json
from collections.abc import Sequence
from typing import Any

import jinja2
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_async.agent_loop.chat_formats.format import Message, SampledTurn
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.episode import RowTokens
from rl_async.agent_loop.gateway.chat import (
    ChatMessage,
    FunctionCall,
    answered,
    history_keys,
    in_order_of_calls,
    read_answer,
)
from rl_async.agent_loop.gateway.gateway_episode import (
    OFFERS,
    Conversations,
    EpisodeRecorder,
    Prompt,
    cut_at_stop,
    stopped_by,
)
from rl_async.agent_loop.gateway.server import Ending, Program
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.messages import Version, VersionRun
from rl_async.rollout_server.api import GenerateResult, Routes
from tests.support.seed import examples
from tests.support.tiny_models import byte_tokenizer
from tests.unit.agent_loop.fakes import FakeQueue, ScriptedEngine, ask, begin, gateway, leased
from tests.unit.agent_loop.test_episode import TEMPLATE

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def tool(text: str) -> ChatMessage:
    return ChatMessage("tool", text)


class Talk:
    """A recorder with an engine whose every token has a log-probability of its own."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer, self.recorder = renderer, EpisodeRecorder(renderer)
        self.prompts: list[Prompt] = []
        self.results: list[GenerateResult] = []
        self._sampled = 0

    def result(self, token_ids: list[int], finish_reason: Any = "stop") -> GenerateResult:
        logprobs = [-0.001 * (self._sampled + i + 1) for i in range(len(token_ids))]
        self._sampled += len(token_ids)
        middle = len(token_ids) // 2
        runs = [VersionRun(Version(0, len(self.results)), 0, middle)] if middle else []
        runs.append(VersionRun(Version(0, len(self.results) + 1), middle, len(token_ids)))
        return GenerateResult(token_ids=token_ids, logprobs=logprobs, versions=runs, finish_reason=finish_reason)

    def say(self, messages: list[ChatMessage], text: str, tools: Any = (), *, ends: bool = True) -> ChatMessage:
        """One request, answered with ``text``; the answer as it is given out."""
        spoken = self.renderer.encode(text) + [self.renderer.end_of_turn] * ends
        return self.answer(self.recorder.prompt(messages, tools), self.result(spoken, "stop" if ends else "length"))

    def answer(self, prompt: Prompt, result: GenerateResult) -> ChatMessage:
        said = read_answer(self.renderer.parse(SampledTurn(result.token_ids)), tools=bool(prompt.tools))
        self.prompts.append(prompt)
        self.results.append(result)
        self.recorder.record(prompt, result, said)
        return said

    def text(self, row: int) -> str:
        return self.renderer.decode(self.recorder.rows[row].tokens.token_ids)

    def trained(self, row: int) -> str:
        arrays = self.recorder.rows[row].tokens.arrays()
        return self.renderer.decode(arrays["token_ids"][arrays["loss_mask"]].tolist())


class Spy(ChatRenderer):
    """Keeps the messages that it was to print."""

    def __init__(self, like: ChatRenderer) -> None:
        super().__init__(like._tokenizer)
        self.messages: list[Message] = []

    def prompt(self, messages: Sequence[Message], *args: Any, **options: Any) -> list[int]:
        self.messages = list(messages)
        return super().prompt(messages, *args, **options)


@pytest.fixture
def talk(renderer: ChatRenderer) -> Talk:
    return Talk(renderer)


def test_a_conversation_with_calls_is_one_row_of_the_sampled_tokens(talk: Talk) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'
    said = talk.say([user("2+3?")], "so: " + call, TOOLS)
    assert said == ChatMessage("assistant", "so:", (FunctionCall("calculator", '{"expression":"2+3"}'),))
    echoed = ChatMessage("assistant", "so: ", (FunctionCall("calculator", '{ "expression" : "2+3" }'),))
    talk.say([user("2+3?"), echoed, tool("5<|im_end|>")], "5", TOOLS)
    assert talk.text(0) == (
        f"<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\nso: {call}<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n5im_end\n</tool_response><|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    )
    assert talk.trained(0) == f"so: {call}<|im_end|>5<|im_end|>"
    (row,) = talk.recorder.rows
    assert [turn.role for turn in row.turns] == ["user", "assistant", "tool", "assistant"]
    assert [call.name for call in row.turns[1].tool_calls] == ["calculator"]
    spans = [talk.renderer.decode(row.tokens.token_ids[turn.start : turn.end]) for turn in row.turns[1::2]]
    assert spans == [f"so: {call}<|im_end|>", "5<|im_end|>"]


def test_a_branch_shares_tokens_as_context_and_trains_its_own(talk: Talk) -> None:
    first = talk.say([user("a?")], "1")
    talk.say([user("a?"), first, user("b?")], "2")
    third = talk.say([user("a?"), first, user("c?")], "3")
    talk.say([user("a?"), first, user("c?"), third, user("d?")], "4")
    assert [talk.trained(row) for row in (0, 1)] == ["1<|im_end|>2<|im_end|>", "3<|im_end|>4<|im_end|>"]
    rows = [row.tokens.arrays() for row in talk.recorder.rows]
    shared = talk.prompts[0].token_ids + talk.results[0].token_ids
    assert all(row["token_ids"][: len(shared)].tolist() == shared for row in rows)
    assert not rows[1]["loss_mask"][: len(shared)].any() and not rows[1]["logprobs"][: len(shared)].any()
    assert [turn.text for turn in talk.recorder.rows[1].turns] == ["a?", "1", "c?", "3", "d?", "4"]
    assert rows[1]["versions"][0].start == 0


def test_the_same_question_again_is_another_row_of_which_either_goes_on(talk: Talk) -> None:
    for _ in range(2):
        said = talk.say([user("a?")], "1")
    talk.say([user("a?"), said, user("b?")], "2")
    talk.say([user("a?"), said, user("c?")], "3")
    assert sorted(map(talk.trained, range(2))) == ["1<|im_end|>2<|im_end|>", "1<|im_end|>3<|im_end|>"]
    assert len(talk.recorder.rows) == 2


def test_two_requests_at_once_that_continue_one_answer_are_two_rows(talk: Talk) -> None:
    first = talk.say([user("a?")], "1")
    prompts = [talk.recorder.prompt([user("a?"), first, user(text)], ()) for text in ("b?", "c?")]
    for prompt in reversed(prompts):
        talk.answer(prompt, talk.result([*talk.renderer.encode("2"), talk.renderer.end_of_turn]))
    assert [talk.trained(row) for row in (0, 1)] == ["1<|im_end|>2<|im_end|>", "2<|im_end|>"]
    assert talk.text(0).count("c?") == 1 and talk.text(1).count("b?") == 1


@pytest.mark.parametrize(
    "messages",
    [
        [user("other?"), ChatMessage("assistant", "1"), user("b?")],
        [ChatMessage("system", "s"), user("a?"), ChatMessage("assistant", "1"), user("b?")],
        [user("a?"), ChatMessage("assistant", "7"), user("b?")],
        [user("a?"), ChatMessage("assistant", "1", (FunctionCall("x", "{}"),)), user("b?")],
    ],
    ids=["user", "system", "assistant", "calls"],
)
def test_an_edited_history_begins_anew(talk: Talk, messages: list[ChatMessage]) -> None:
    talk.say([user("a?")], "1")
    talk.say(messages, "2")
    assert [talk.trained(row) for row in (0, 1)] == ["1<|im_end|>", "2<|im_end|>"]
    assert talk.prompts[1].continues is None


@pytest.mark.parametrize(
    ("prints", "rows"),
    [("", [1, 1, 1]), ("{{ tool.function.name }}", [1, 1, 2]), ("{{ tool | tojson }}", [1, 2, 3])],
    ids=["nothing", "names", "everything"],
)
def test_only_what_is_printed_of_tools_begins_a_row(prints: str, rows: list[int]) -> None:
    template = f"{{% for tool in tools or [] %}}{prints}{{% endfor %}}{TEMPLATE}"
    talk = Talk(ChatRenderer(byte_tokenizer(template, eos="<|im_end|>")))
    function = {"name": "calculator", "parameters": {}}
    said, found = [user("a?")], []
    for offered in (function, function | {"strict": True}, function | {"name": "other"}):
        said += [talk.say(said, "1", [{"type": "function", "function": offered}]), user("b?")]
        found.append(len(talk.recorder.rows))
    assert found == rows


STRICT_ORDER = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('order') }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("strict", [False, True])
def test_a_late_system_message_is_the_users_where_the_template_takes_none(strict: bool) -> None:
    talk = Talk(ChatRenderer(byte_tokenizer(STRICT_ORDER * strict + TEMPLATE, eos="<|im_end|>")))
    told = ChatMessage("system", "now")
    said = talk.say([ChatMessage("system", "s"), user("a?"), told], "1")
    talk.say([ChatMessage("system", "s"), user("a?"), told, said, told, user("b?")], "2")
    assert talk.text(0).count("<|im_start|>" + ("user" if strict else "system") + "\nnow") == 2
    assert len(talk.recorder.rows) == 1 and talk.text(0).startswith("<|im_start|>system\ns")


class Overtaken(ChatRenderer):
    """Runs another request, as another thread may, when a prompt was rejected."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.meanwhile: Any = None

    def prompt(self, *given: Any, **options: Any) -> list[int]:
        try:
            return super().prompt(*given, **options)
        except jinja2.TemplateError:
            if (meanwhile := self.meanwhile) is not None:
                self.meanwhile = None
                meanwhile()
            raise


def test_requests_at_the_same_time_do_not_disturb_one_another() -> None:
    chat = Overtaken(byte_tokenizer(STRICT_ORDER + TEMPLATE, eos="<|im_end|>"))
    late = [ChatMessage("system", "s"), user("a?"), ChatMessage("system", "now")]
    expected = EpisodeRecorder(chat).prompt(late, ()).token_ids
    recorder, others = EpisodeRecorder(chat), list[list[int]]()
    chat.meanwhile = lambda: others.append(recorder.prompt(late, ()).token_ids)
    assert recorder.prompt(late, ()).token_ids == expected
    assert others == [expected]


def test_tools_that_differ_in_every_request_take_bounded_space(talk: Talk) -> None:
    def held(value: Any) -> int:
        if isinstance(value, dict):
            return sum(held(part) for pair in value.items() for part in pair)
        if isinstance(value, list | tuple):
            return sum(map(held, value))
        return len(value) if isinstance(value, bytes | str) else 1

    for number in range(2 * OFFERS):
        described = [{"type": "function", "function": {"name": "f", "description": f"{number} " * 1000}}]
        talk.recorder.prompt([user("a?")], described)
    assert held([value for name, value in vars(talk.recorder).items() if name != "_chat"]) <= 100 * OFFERS


@pytest.mark.parametrize(("past", "rows"), [("keep", 1), ("strip", 2), ("split", 2)])
def test_dropped_reasoning_begins_a_row(past: Any, rows: int) -> None:
    chat = ChatRenderer(byte_tokenizer(TEMPLATE, eos="<|im_end|>"))
    talk = Talk(chat)
    talk.recorder = EpisodeRecorder(chat, past)
    said = talk.say([user("2+3?")], "<think>\nso\n</think>\n\n5")
    talk.say([user("2+3?"), said, user("sure?")], "<think>\nhm\n</think>\n\nyes")
    assert len(talk.recorder.rows) == rows
    assert ("so\n" in talk.text(rows - 1)) == (past == "keep")
    assert "".join(map(talk.trained, range(rows))) == (
        "<think>\nso\n</think>\n\n5<|im_end|><think>\nhm\n</think>\n\nyes<|im_end|>"
    )


def test_an_edit_keeps_the_longest_recorded_part_and_the_words_as_sampled(talk: Talk) -> None:
    call = '<tool_call>\n{"name":"calculator","arguments":{"expression":"1"}}</tool_call>'
    first = talk.say([user("a?")], "1", TOOLS)
    second = talk.say([user("a?"), first, user("b?")], call, TOOLS)
    talk.say([user("a?"), first, user("c?"), second, tool("9")], "3", TOOLS)
    shared = talk.prompts[0].token_ids + talk.results[0].token_ids
    assert talk.prompts[2].token_ids[: len(shared)] == shared and talk.prompts[2].continues is not None
    assert f"c?<|im_end|>\n<|im_start|>assistant\n{call}<|im_end|>" in talk.text(1)
    assert talk.trained(1) == "3<|im_end|>"


def test_a_cut_answer_is_closed_by_a_token_that_does_not_train(talk: Talk) -> None:
    said = talk.say([user("a?")], "12", ends=False)
    talk.say([user("a?"), said, user("b?")], "3")
    assert talk.text(0).count("<|im_end|>") == 4 and talk.trained(0) == "123<|im_end|>"
    assert talk.recorder.rows[0].finish_reason == "stop"


def test_answers_with_a_broken_call_are_text(renderer: ChatRenderer) -> None:
    def read(text: str, *, tools: bool) -> ChatMessage:
        return read_answer(renderer.parse(SampledTurn(renderer.encode(text))), tools=tools)

    broken = 'x <tool_call>{"name": "f"}</tool_call><tool_call>{</tool_call>'
    assert read(broken, tools=True) == ChatMessage("assistant", broken)
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(good, tools=False).calls == ()
    said = read(good, tools=True)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]}
    printed = renderer.decode(renderer.prompt([call])).partition("<tool_call>")
    assert read(printed[1] + printed[2].partition("<|im_end|>")[0], tools=True) == said


def test_a_history_is_named_by_all_that_counts() -> None:
    names = [
        history_keys(messages, tools)[-1]
        for messages in (
            [user("ab")],
            [user("a"), user("b")],
            [tool("ab")],
            [user("ab ")],
            [ChatMessage("assistant", "", (FunctionCall("f", '{"a":1}'),))],
            [ChatMessage("assistant", "", (FunctionCall("f", '{"a":2}'),))],
        )
        for tools in (b"", b"tools")
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("stops", "kept", "text"), [(["4"], "12+34", "12+3"), (["+3", "2"], "12", "1"), (["9"], "12+34-46", "12+34-46")]
)
def test_a_stop_string_cuts_tokens_log_probabilities_and_versions(
    talk: Talk, stops: list[str], kept: str, text: str
) -> None:
    whole = talk.result([*talk.renderer.encode("12+34-46"), talk.renderer.end_of_turn])
    cut = cut_at_stop(whole, stops, talk.renderer)
    shown = talk.renderer.parse(SampledTurn(cut.token_ids, stops=stops)).text
    n = len(cut.token_ids)
    assert (talk.renderer.turn_text(cut.token_ids), shown, cut.finish_reason) == (kept, text, "stop")
    assert cut.token_ids == whole.token_ids[:n] and cut.logprobs == whole.logprobs[:n]
    assert cut.versions[-1].end == n and all(run.start < run.end for run in cut.versions)
    assert (n == len(whole.token_ids)) is ("9" in stops)
    assert stopped_by(cut, stops, talk.renderer) == {"4": "4", "+3": "2", "9": ""}[stops[0]]


def test_a_stop_string_cuts_the_experts_too(talk: Talk) -> None:
    """Each token's expert is the token's own number here, in the row of two answers as well."""

    def answer(row: RowTokens, said: str) -> GenerateResult:
        given = talk.renderer.encode(said)
        experts = np.array([*row.token_ids, *given][:-1], np.uint16)[:, None, None]
        return msgspec.structs.replace(talk.result(given), routes=Routes(0, experts))

    row = RowTokens(talk.renderer.encode("12"))
    row.add_sampled(cut_at_stop(answer(row, "4+4 and much more"), ["+"], talk.renderer))
    row.add(talk.renderer.encode("next"))
    row.add_sampled(answer(row, "5 and as much"))
    arrays = row.arrays()
    experts = arrays["routed_experts"][:, 0, 0].tolist()
    assert experts == arrays["token_ids"].tolist()[: len(experts)]
    assert len(experts) == len(row) - 1


def test_messages_that_the_template_refuses_record_nothing(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + str(
        talk.renderer._tokenizer.chat_template
    )
    monkeypatch.setattr(talk.renderer._tokenizer, "chat_template", template)
    with pytest.raises(jinja2.TemplateError, match="no system"):
        talk.recorder.prompt([ChatMessage("system", "never seen before"), user("a?")], ())
    assert talk.recorder.rows == []


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_sampled_token_trains_in_exactly_one_row_as_it_was_returned(renderer: ChatRenderer, data: Any) -> None:
    """Random requests and random tokens: continued, branched, edited, parallel, with special tokens in any place."""
    talk = Talk(renderer)
    histories: list[list[ChatMessage]] = []
    open_prompts: list[Prompt] = []
    vocabulary = len(renderer._tokenizer)
    for _ in range(data.draw(st.integers(1, 9))):
        history = list(data.draw(st.sampled_from(histories))) if histories and data.draw(st.booleans()) else []
        if history and data.draw(st.integers(0, 3)) == 0:
            place = data.draw(st.integers(0, len(history) - 1))
            history[place] = ChatMessage(history[place].role, "edited")
        if history and data.draw(st.booleans()):
            history = history[: data.draw(st.integers(0, len(history)))]
        history.append(data.draw(st.sampled_from([user("a"), user("b"), tool("7")])))
        open_prompts.append(talk.recorder.prompt(history, data.draw(st.sampled_from([(), TOOLS]))))
        if data.draw(st.booleans()):
            continue  # others are asked before this one is answered
        for prompt in open_prompts:
            sampled = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=6))
            histories.append([*prompt.messages, talk.answer(prompt, talk.result(sampled))])
        open_prompts = []
    found = []
    for row in talk.recorder.rows:
        arrays = row.tokens.arrays()
        sampled = np.flatnonzero(arrays["loss_mask"])
        versions = [run.version for run in arrays["versions"] for _ in range(run.start, run.end)]
        assert len(versions) == len(sampled) and not arrays["logprobs"][~arrays["loss_mask"]].any()
        tokens, logprobs = arrays["token_ids"], arrays["logprobs"]
        found += [(np.float32(logprobs[i]), int(tokens[i]), v) for i, v in zip(sampled, versions, strict=True)]
    expected = [
        (np.float32(logprob), token, next(run.version for run in result.versions if run.start <= i < run.end))
        for result in talk.results
        for i, (logprob, token) in enumerate(zip(result.logprobs, result.token_ids, strict=True))
    ]
    assert sorted(found) == sorted(expected)
    contexts = [row.tokens.token_ids for row in talk.recorder.rows]
    for prompt, result in zip(talk.prompts, talk.results, strict=True):
        whole = prompt.token_ids + result.token_ids
        assert any(tokens[: len(whole)] == whole for tokens in contexts), "not behind the tokens that the engine saw"
        if prompt.continues is not None:
            before = prompt.continues.row.tokens.token_ids[: prompt.continues.tokens]
            assert prompt.token_ids[: len(before)] == before


def test_results_are_named_after_the_calls_that_they_answer() -> None:
    said = ChatMessage("assistant", "", (FunctionCall("f", "{}"), FunctionCall("g", "{}")))
    found = answered([user("a"), tool("?"), said, tool("1"), tool("2"), tool("3")])
    assert {place: call.name for place, (_, call) in found.items()} == {3: "f", 4: "g"}


@pytest.mark.parametrize(
    ("ids", "names"),
    [(("one", "two"), ["f", "g"]), (("two", "one"), ["g", "f"]), (("two", "?"), ["g", "f"]), (("", ""), ["f", "g"])],
)
def test_results_may_come_in_any_order_if_they_name_their_calls(
    renderer: ChatRenderer, ids: tuple[str, str], names: list[str]
) -> None:
    said = ChatMessage("assistant", "", (FunctionCall("f", "{}", "one"), FunctionCall("g", "{}", "two")))
    history = [user("a"), said, *(ChatMessage("tool", "7", answers=name) for name in ids)]
    assert [call.name for _, call in answered(history).values()] == names
    given = Spy(renderer)
    EpisodeRecorder(given).prompt(history, ())
    assert [call["id"] for call in given.messages[1]["tool_calls"]] == ["one", "two"]
    assert [(m["name"], m.get("tool_call_id")) for m in given.messages[2:]] == [
        (name, {"f": "one", "g": "two"}[name]) for name in names
    ]


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        (("one", "two", "three"), "123"),
        (("three", "one", "two"), "231"),
        (("two", "", ""), "213"),
        (("", "", ""), "123"),
        (("?", "one", "?"), "213"),
    ],
)
def test_results_are_put_into_the_order_of_their_calls(ids: tuple[str, ...], texts: str) -> None:
    calls = tuple(FunctionCall(name, "{}", name) for name in ("one", "two", "three"))
    results = [ChatMessage("tool", str(place), answers=name) for place, name in enumerate(ids, 1)]
    other = [user("a"), ChatMessage("assistant", "", (FunctionCall("f", "{}", "one"),)), tool("x"), user("b")]
    ordered = in_order_of_calls([*other, ChatMessage("assistant", "", calls), *results, user("c"), tool("late")])
    assert ordered[:5] == [*other, ChatMessage("assistant", "", calls)]
    assert "".join(message.text for message in ordered[5:8]) == texts
    assert [message.text for message in ordered[8:]] == ["c", "late"]


def test_arguments_are_compared_as_values() -> None:
    first, second = (
        ChatMessage("assistant", "", (FunctionCall("f", text),)) for text in ('{"b": 1,"a":2}', '{"a": 2, "b": 1}')
    )
    assert first.identity() == second.identity()
    assert json.loads(first.calls[0].arguments) == json.loads(second.calls[0].arguments)
    assert ChatMessage("assistant", "", (FunctionCall("f", "{"),)).identity() != first.identity()


CALL = (FunctionCall("f", "{}"),)


class Told:
    """An episode as it goes on: answers to the requests of several agents, those of each in a row."""

    def __init__(self, task: str = "fix the bug") -> None:
        self.conversations = Conversations(task)

    def say(self, row: int, opening: str, text: str, *said: ChatMessage, calls: Any = (), after: int = -1) -> None:
        """``opening``: the system message. ``after``: the answers before its request; else all so far."""
        messages = [ChatMessage("system", opening), *said]
        answer = ChatMessage("assistant", text, calls)
        asked = self.conversations.recorded if after < 0 else after
        self.conversations.add(row, messages, answer, asked, finished=True)

    def main(self) -> None:
        self.say(0, "you code", "", ChatMessage("user", "please fix the bug"), calls=CALL)
        self.say(0, "you code", "the bug is fixed")

    def ends(self, output: str | None = None, *patterns: str) -> tuple[set[int], int]:
        """The rows that are not trained, and the one that is scored."""
        untrained = self.conversations.untrained(patterns, output)
        rows = {row for one in untrained for row in one.rows}
        return rows, self.conversations.scored_row(untrained, output)


@pytest.mark.parametrize("output", [None, "", "Done: the bug is fixed\n"])
def test_notes_after_the_last_answer_are_none_of_the_work(output: str | None) -> None:
    told = Told()
    told.main()
    told.say(1, "you extract memories", "nothing to note", ChatMessage("user", "what is worth keeping?"))
    assert told.ends(output) == ({1}, 0)


def test_a_second_agent_after_a_handoff_is_work_and_is_scored() -> None:
    told = Told()
    told.main()
    told.say(0, "you code", "", calls=CALL)
    told.say(1, "you review", "all is well")
    assert told.ends() == (set(), 1)


def test_an_agent_that_gets_the_first_ones_answer_is_work() -> None:
    told = Told()
    told.main()
    told.say(1, "you review", "approved", ChatMessage("user", "review this: the bug is fixed"))
    assert told.ends() == (set(), 0)
    assert told.ends("approved") == (set(), 1), "the program printed its answer"


def test_an_empty_last_answer_is_in_no_output() -> None:
    told = Told()
    told.say(0, "you code", "", ChatMessage("user", "please fix the bug"), calls=CALL)
    told.say(0, "you code", "")
    told.say(1, "you review", "all is well")
    assert told.ends("Done.") == (set(), 0)


def test_what_the_program_printed_is_work() -> None:
    told = Told()
    told.main()
    told.say(1, "you report", "a summary", ChatMessage("user", "report"))
    assert told.ends("a summary") == (set(), 1)
    assert told.ends("something else") == (set(), 0), "nothing is certain"


def test_what_began_before_the_last_answer_is_work() -> None:
    for after in (0, 1):
        told = Told()
        told.main()
        told.say(1, "you search", "found it", after=after)
        assert told.ends() == (set(), 0)


def test_a_title_is_not_taken_for_the_work_nor_the_work_for_an_aside() -> None:
    told = Told()
    told.say(0, "you write titles", "Fixing", ChatMessage("user", "title of: fix the bug"))
    told.say(1, "you code", "the bug is fixed", ChatMessage("user", "fix the bug"))
    assert told.ends("the bug is fixed") == (set(), 1)
    assert told.ends()[0] == set(), "of two with one answer each nothing is certain"


def test_equal_conversations_are_all_work() -> None:
    told = Told()
    for row in range(4):
        told.say(row, f"part {row}", f"answer {row}", ChatMessage("user", "fix the bug"))
    assert told.ends()[0] == set()


def test_conversations_that_the_user_names_are_left_out() -> None:
    told = Told()
    told.main()
    told.say(1, "you write titles", "Fixing", after=0)
    told.say(2, "x", "y", ChatMessage("user", "Summarise: this"), after=1)
    assert told.ends(None, "write titles$", "^Summarise") == ({1, 2}, 0)
    assert told.ends(None, "titles$", "^you code") == ({0, 1}, 2)
    assert told.ends() == (set(), 0)


async def test_left_out_rows_are_not_put_and_the_main_answer_is_scored(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased("fix it")])
    engine = ScriptedEngine(renderer, ["1", "2", "7"])
    async with gateway(queue, renderer, engine) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("fix it"))
        await episode.complete(ask("fix it", "1", "on"))
        await episode.complete(ask("notes?"))
        assert (await episodes.end(episode.id, Ending(program=Program(0, "so 2")))).rows == 1
        assert episode.sampled == {"main": 4, "left_out": 2}
    ((row,),) = queue.rows
    assert renderer.decode(row.token_ids[row.loss_mask].tolist()) == "1<|im_end|>2<|im_end|>"


async def test_patterns_leave_out_what_they_match(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased("fix it")])
    options = {"gateway": GatewayConfig(untrained=("^title",))}
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["7", "1"]), **options) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("title?"))
        await episode.complete(ask("fix it"))
        assert (await episodes.end(episode.id, Ending(reward=1.0))).rows == 1
    ((row,),) = queue.rows
    assert row.turns[-1].text == "1"

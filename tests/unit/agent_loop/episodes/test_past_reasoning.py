"""Episodes whose past reasoning stays or is dropped: what engines are sent, and how the rows are cut."""

import logging

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.episode import Episode, tool_agent
from rl_async.agent_loop.tools.tool_registry import task_tools
from rl_async.configs.schema.chat_formats import PastReasoning
from rl_async.messages import Trajectory
from tests.support.families import byte_tokenizer
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config

# As Qwen3's template: reasoning is printed of the turns after the last user's message only.
TEMPLATE = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>'
SAYS = [
    f"<think>\nthink\n</think>\n\n{CALL}",
    "<think>\nit is 5\n</think>\n\n5",
    "<think>\nso sure\n</think>\n\nyes",
]
OPENING = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def chat() -> ChatRenderer:
    return ChatRenderer(byte_tokenizer(TEMPLATE, eos="<|im_end|>"))


async def ask_again(episode: Episode) -> str:
    """Let the model call tools until it answers, and ask it again."""
    reason = await tool_agent(episode)
    if reason != "stop" or not episode.add([{"role": "user", "content": "sure?"}]):
        return reason
    return await episode.generate()


async def play(
    chat: ChatRenderer, past: PastReasoning, says: list[str] = SAYS, max_tokens: int = 1000
) -> tuple[list[Trajectory], ScriptedEngine]:
    engine = ScriptedEngine(chat, says, versions=range(len(says)))
    sizes = {"max_model_len": 1000, "max_tokens": 500}
    config = run_config(sizes, tools=("calculator",), past_reasoning=past, max_tokens=max_tokens)
    group = leased()
    tools = task_tools(config, group.task)
    episode = Episode(group, 0, config=config, chat=chat, generator=engine, tools=tools)
    reason = await ask_again(episode)
    assert episode.drift() is None or past == "keep", "the last row is the template's text of the conversation"
    return episode.trajectories(reason), engine


def pieces(chat: ChatRenderer, row: Trajectory) -> list[tuple[bool, str]]:
    """The row's text in runs of tokens that were sampled, or were not."""
    found: list[tuple[bool, list[int]]] = []
    for token, sampled in zip(row.token_ids.tolist(), row.loss_mask.tolist(), strict=True):
        if not found or found[-1][0] != sampled:
            found.append((sampled, []))
        found[-1][1].append(token)
    return [(sampled, chat.decode(tokens)) for sampled, tokens in found]


ASKED = f"<|im_start|>user\nwhat is 2+3?<|im_end|>\n{OPENING}"
RESULT = f"<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n{OPENING}"
AGAIN = f"<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n{OPENING}"


async def test_kept_reasoning_stays_where_it_was_sampled_in_one_row(chat: ChatRenderer) -> None:
    (row,), _ = await play(chat, "keep")
    assert "".join(text for _, text in pieces(chat, row)) == (
        f"{ASKED}{SAYS[0]}{RESULT}{SAYS[1]}{AGAIN}{SAYS[2]}<|im_end|>"
    )
    assert [sampled for sampled, _ in pieces(chat, row)] == [False, True] * 3


async def test_a_row_begins_where_the_template_drops_reasoning(chat: ChatRenderer) -> None:
    rows, _ = await play(chat, "strip")
    assert len(rows) == 2, "the template keeps reasoning between calls, and drops it when a user speaks"
    assert "".join(text for _, text in pieces(chat, rows[0])) == f"{ASKED}{SAYS[0]}{RESULT}{SAYS[1]}<|im_end|>"
    assert pieces(chat, rows[1]) == [
        (False, f"{ASKED}{CALL}{RESULT}5{AGAIN}"),
        (True, f"{SAYS[2]}<|im_end|>"),
    ]


async def test_split_makes_a_row_of_each_turn(chat: ChatRenderer) -> None:
    rows, _ = await play(chat, "split")
    assert [pieces(chat, row) for row in rows] == [
        [(False, ASKED), (True, f"{SAYS[0]}<|im_end|>")],
        [(False, f"{ASKED}{SAYS[0]}{RESULT}"), (True, f"{SAYS[1]}<|im_end|>")],
        [(False, f"{ASKED}{CALL}{RESULT}5{AGAIN}"), (True, f"{SAYS[2]}<|im_end|>")],
    ]


@pytest.mark.parametrize("past", ["keep", "strip", "split"])
async def test_rows_are_what_engines_were_sent_and_what_they_sampled(chat: ChatRenderer, past: PastReasoning) -> None:
    rows, engine = await play(chat, past)
    assert [row.segment for row in rows] == list(range(len(rows)))
    answered = iter(range(len(SAYS)))
    for row in rows:
        ends = [turn.end for turn in row.turns if row.loss_mask[turn.start : turn.end].any()]
        for end in ends:
            turn = next(answered)
            sent = engine.requests[turn].token_ids
            spoken = [*chat.encode(SAYS[turn]), chat.end_of_turn]
            assert row.token_ids.tolist()[:end] == sent + spoken
        assert ends[-1] == len(row.token_ids)
    assert next(answered, None) is None, "every answer is trained in one row"
    assert sum(row.header().sampled for row in rows) == sum(len(chat.encode(text)) + 1 for text in SAYS)
    assert [run.version.step for row in rows for run in row.versions] == [0, 1, 2]
    assert [turn.text for turn in rows[-1].turns] == ["what is 2+3?", SAYS[0], "5", SAYS[1], "sure?", SAYS[2]]
    assert rows[-1].turns[1].tool_calls[0].result == "5", "what is scored has the calls of earlier rows"


async def test_a_row_without_an_answer_is_left_out(chat: ChatRenderer) -> None:
    config = run_config({"max_model_len": 1000, "max_tokens": 500}, past_reasoning="split", max_tokens=1000)
    episode = Episode(leased(), 0, config=config, chat=chat, generator=ScriptedEngine(chat, SAYS), tools=[])
    await episode.generate()
    assert episode.add([{"role": "user", "content": "sure?"}]) and episode.add([{"role": "user", "content": "yes?"}])
    (row,) = episode.trajectories("max_turns")
    assert (row.finish_reason, row.turns[-1].text) == ("max_turns", SAYS[0])


async def test_what_leaves_no_room_ends_the_episode(chat: ChatRenderer) -> None:
    _, engine = await play(chat, "strip", SAYS[1:])
    room = len(engine.requests[1].token_ids)
    rows, _ = await play(chat, "strip", SAYS[1:], max_tokens=room)
    assert len(rows) == 1 and rows[0].finish_reason == "stop"


async def test_answers_without_reasoning_stay_in_one_row(chat: ChatRenderer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rows, _ = await play(chat, "strip", [CALL, "5", "yes"])
    assert len(rows) == 1 and not caplog.records


async def rewarded(chat: ChatRenderer, past: PastReasoning) -> list[Trajectory]:
    """An episode whose loop rewards each answer in another way: at once, after it was asked again, and at the end."""
    config = run_config({"max_model_len": 1000, "max_tokens": 500}, past_reasoning=past, max_tokens=1000)
    episode = Episode(leased(), 0, config=config, chat=chat, generator=ScriptedEngine(chat, SAYS), tools=[])
    await episode.generate()
    episode.turns[-1].reward = 1.0
    assert episode.add([{"role": "user", "content": "sure?"}])
    await episode.generate()
    second = episode.turns[-1]
    assert episode.add([{"role": "user", "content": "really?"}])
    episode.turns[-2].reward = 2.0
    assert second.reward == 2.0, "a turn stays the same object"
    reason = await episode.generate()
    episode.turns[1].reward = 4.0
    episode.turns[-1].reward = 8.0
    assert [turn.reward for turn in episode.turns] == [None, 4.0, None, 2.0, None, 8.0]
    return episode.trajectories(reason)


@pytest.mark.parametrize("past", ["keep", "strip", "split"])
async def test_a_turns_reward_stands_in_the_row_in_which_it_was_sampled(
    chat: ChatRenderer, past: PastReasoning
) -> None:
    rows = await rewarded(chat, past)
    assert len(rows) == (1 if past == "keep" else 3)
    sampled = [[turn.reward for turn in row.turns if row.loss_mask[turn.start : turn.end].any()] for row in rows]
    assert sampled == ([[4.0, 2.0, 8.0]] if past == "keep" else [[4.0], [2.0], [8.0]])
    assert sorted(turn.reward for row in rows for turn in row.turns if turn.reward is not None) == [2.0, 4.0, 8.0]

"""Images in conversations: ids as the family's own processor makes them, rows with their media, and limits."""

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_async.agent_loop.chat_formats.format import Message, TooLong
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments.interface import Environment
from rl_async.agent_loop.environments.session import Session, joined
from rl_async.agent_loop.episode import Episode, PromptTooLong, tool_agent
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.step import Step
from rl_async.agent_loop.tools.tool import Tool, ToolResult
from rl_async.errors import DataError, EnvironmentFailed
from rl_async.messages import Media
from rl_async.picture_decoder import DECODER, Want
from rl_async.pictures import read_picture
from rl_async.transfer_queue.client import parcel
from rl_async.transfer_queue.images import MARK, MOST_IMAGES, as_parts, images_of
from tests.support.vision_models import drawing, vision_tokenizer
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config
from tests.unit.rl_async.test_pictures import oracle, saved

_PARTS = (
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}IMAGE{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}"
)
_CHATML = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' }}PARTS{{ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_UTTERANCES = (
    "<|im_start|>{%- for message in messages -%}{{ message.role + ': ' }}PARTS{{ '<end_of_utterance>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
)
_TURNS = (
    "{%- for message in messages -%}{{ '<start_of_turn>' + message.role + '\\n' }}PARTS{{ '<end_of_turn>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>assistant\\n' }}{%- endif -%}"
)
# The layout of each family's own chat template.
TEMPLATES = {
    "qwen2_5_vl": (_CHATML, "<|vision_start|><|image_pad|><|vision_end|>"),
    "qwen3_vl": (_CHATML, "<|vision_start|><|image_pad|><|vision_end|>"),
    "idefics3": (_UTTERANCES, "<image>"),
    "smolvlm": (_UTTERANCES, "<image>"),
    "gemma3": (_TURNS, "<start_of_image>"),
}
# A family's own processor takes the text of a control token for the token, so these have none.
WORDS = ["what", " is ", "here?", "\n", "\n\n", "é", "<", ""]


def template(family: str) -> str:
    layout, mark = TEMPLATES[family]
    return layout.replace("PARTS", _PARTS.replace("IMAGE", mark))


def vision_chat(family: str, folder: Path) -> ChatRenderer:
    tokenizer = vision_tokenizer()
    tokenizer.chat_template = template(family)
    chat = ChatRenderer(tokenizer)
    chat.pictures = saved(family, folder)
    return chat


@pytest.fixture
def chat(tmp_path: Path) -> ChatRenderer:
    return vision_chat("qwen2_5_vl", tmp_path)


def asking(*images: bytes, text: str = "add") -> Message:
    return {"role": "user", "content": MARK * len(images) + text, "images": list(images)}


def conversation(draw: random.Random) -> list[Message]:
    made = []
    for turn in range(draw.randint(1, 5)):
        role = "assistant" if turn % 2 else "user"
        count = draw.randint(0, 2) if role == "user" else 0
        images = [drawing(draw.randrange(20), draw.randint(16, 50), draw.randint(16, 50)) for _ in range(count)]
        texts = ["".join(draw.choices(WORDS, k=draw.randint(0, 3))) for _ in range(count + 1)]
        message: Message = {"role": role, "content": MARK.join(texts)}
        made.append(message | ({"images": images} if images else {}))
    return made


def expected(processor: Any, chat: ChatRenderer, messages: Sequence[Message]) -> list[int]:
    """The ids of the family's own processor."""
    printed = processor.tokenizer.apply_chat_template(
        [as_parts(message) for message in messages], tokenize=False, add_generation_prompt=True
    )
    images = [read_picture(data) for data in images_of(messages)]
    found = processor(text=[printed], images=[images] if images else None, add_special_tokens=False)
    return list(found["input_ids"][0])


@pytest.mark.parametrize("family", TEMPLATES)
def test_prompts_have_the_ids_of_the_familys_own_processor(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = vision_chat(family, tmp_path)
    tokenizer = vision_tokenizer()
    tokenizer.chat_template = template(family)
    processor, draw, seen = oracle(family, tokenizer, monkeypatch), random.Random(family), 0
    for _ in range(40):
        messages = conversation(draw)
        found, images = chat.expand(chat.prompt(messages), messages)
        assert found == expected(processor, chat, messages)
        for image in images:
            tokens = chat.pictures.encode(image.data).tokens
            # In Gemma 3 the newlines around an image's tokens join those of the text.
            assert found[image.position + 1 : image.position + len(tokens) - 1] == tokens[1:-1]
        seen += len(images)
    assert seen > 20


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_text_of_a_mark_is_text(family: str, tmp_path: Path) -> None:
    chat = vision_chat(family, tmp_path)
    _, mark = TEMPLATES[family]
    messages = [asking(drawing(0), text=mark)]
    found, (image,) = chat.expand(chat.prompt(messages), messages)
    ((plain, _), alone) = chat.expand(chat.prompt([asking(drawing(0), text="")]), messages), chat.encode(mark)
    assert len(found) > len(plain) + len(alone), "spelled with more tokens than the mark has"
    assert image.data == drawing(0)


def looker(images: list[bytes], said: str = "look: ") -> Tool:
    def look() -> list[dict[str, Any]]:
        """Return a picture of the surroundings."""
        return [{"type": "text", "text": said}, *({"type": "image", "image": image} for image in images)]

    return Tool(look)


CALL = '<tool_call>\n{"name":"look","arguments":{}}\n</tool_call>'


async def test_rows_refer_to_the_images_of_prompts_and_tools(chat: ChatRenderer) -> None:
    first, second, third = drawing(1), drawing(2, 64, 16), drawing(3)
    engine = ScriptedEngine(chat, [CALL, "5"])
    group = leased([{"role": "system", "content": "see"}, asking(first, second)])
    episode = Episode(group, 0, config=run_config(), chat=chat, generator=engine, tools=[looker([third, first])])
    (row,) = episode.trajectories(await tool_agent(episode))
    assert [medium.sha256 for medium in row.media] == [
        Media.of(data, "", 0).sha256 for data in (first, second, third, first)
    ]
    assert {medium.mime for medium in row.media} == {"image/png"}
    for medium, data in zip(row.media, (first, second, third, first), strict=True):
        tokens = chat.pictures.encode(data).tokens
        assert row.token_ids[medium.position : medium.position + len(tokens)].tolist() == tokens
        assert not row.loss_mask[medium.position : medium.position + len(tokens)].any()
    # Every prefix is what the engine was given, and all of it what the template prints of the whole conversation.
    assert [len(request.images) for request in engine.requests] == [2, 4]
    for request in engine.requests:
        assert request.token_ids == row.token_ids[: len(request.token_ids)].tolist()
        assert [image.position for image in request.images] == [
            medium.position for medium in row.media[: len(request.images)]
        ]
    assert episode.drift() is None
    whole = [*group.task.prompt, *episode.messages[2:]]
    printed, _ = chat.expand(chat.prompt(whole), whole)
    assert printed[: len(row.token_ids)] == row.token_ids.tolist()
    assert row.turns[3].text == f"look: {MARK}{MARK}"
    # The queue takes each image once.
    assert parcel([row], episode.images).media == {
        Media.of(data, "", 0).sha256: data for data in (first, second, third)
    }


async def test_a_limit_never_cuts_an_image(chat: ChatRenderer) -> None:
    picture = drawing(4)
    size = len(chat.pictures.encode(picture).tokens)
    plain = len(chat.prompt([asking(picture)]))
    # The mark is a token of the prompt, which the image's tokens replace.
    assert len(chat.expand(chat.prompt([asking(picture)]), [asking(picture)])[0]) == plain + size - 1
    chat.expand(chat.prompt([asking(picture)]), [asking(picture)], limit=plain + size)
    with pytest.raises(TooLong):
        chat.expand(chat.prompt([asking(picture)]), [asking(picture)], limit=plain + size - 1)
    with pytest.raises(PromptTooLong):
        Episode(
            leased([asking(picture)]),
            0,
            config=run_config(max_tokens=plain + size - 1),
            chat=chat,
            generator=ScriptedEngine(chat, []),
            tools=(),
        )
    # The results of tools that do not fit end the episode before they begin.
    engine = ScriptedEngine(chat, [CALL, "5"])
    config = run_config(max_tokens=130)
    episode = Episode(leased("?"), 0, config=config, chat=chat, generator=engine, tools=[looker([picture] * 20)])
    assert await tool_agent(episode) == "length"
    (row,) = episode.trajectories("length")
    assert (row.media, len(engine.requests)) == ([], 1)


async def test_a_cut_result_loses_the_images_behind_the_cut(chat: ChatRenderer) -> None:
    tool = looker([drawing(5), drawing(6)], said="x" * 100)
    config = run_config(tool_response_tokens=50)
    episode = Episode(leased("?"), 0, config=config, chat=chat, generator=ScriptedEngine(chat, [CALL]), tools=[tool])
    await episode.generate()
    (message,) = await episode.call(episode.tool_calls())
    assert MARK not in message["content"]
    assert "images" not in message


async def test_a_tools_damaged_image_is_an_error_that_the_model_sees(chat: ChatRenderer) -> None:
    for images in ([drawing(5), drawing(6)[:90]], [drawing(5)] * (MOST_IMAGES + 1)):
        engine = ScriptedEngine(chat, [CALL])
        episode = Episode(leased("?"), 0, config=run_config(), chat=chat, generator=engine, tools=[looker(images)])
        await episode.generate()
        (message,) = await episode.call(episode.tool_calls())
        assert message["content"].startswith("error: ") and "images" not in message
        assert episode.turns[-1].tool_calls[0].error
        assert episode.add([message])


async def test_a_text_model_gets_the_description_of_a_servers_image(chat: ChatRenderer) -> None:
    class Server:
        name, schema = "look", looker([]).schema

        async def call(self, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
            return ToolResult(MARK, images=(drawing(5),), plain="[image: 9 bytes]")

    for pictures, content in ((chat.pictures, MARK), (None, "[image: 9 bytes]")):
        chat.pictures = pictures
        engine = ScriptedEngine(chat, [CALL])
        episode = Episode(leased("?"), 0, config=run_config(), chat=chat, generator=engine, tools=[Server()])
        await episode.generate()
        (message,) = await episode.call(episode.tool_calls())
        assert message["content"] == content and ("images" in message) == (pictures is not None)


async def test_the_event_loop_goes_on_while_images_are_decoded(chat: ChatRenderer) -> None:
    DECODER.decode(drawing(5), Want.SIZE)
    assert DECODER._program is not None
    decoder = DECODER._program[0].pid
    engine = ScriptedEngine(chat, [CALL])
    episode = Episode(leased("?"), 0, config=run_config(), chat=chat, generator=engine, tools=[looker([drawing(5)])])
    await episode.generate()
    os.kill(decoder, signal.SIGSTOP)
    try:
        calling = asyncio.create_task(episode.call(episode.tool_calls()))
        # The tool itself runs in a thread.
        assert not (await asyncio.wait([calling], timeout=0.3))[0]
    finally:
        os.kill(decoder, signal.SIGCONT)
    (message,) = await calling
    assert message["images"] == [drawing(5)]


class Shows(Environment):
    """Shows a picture at first, and another one after a turn."""

    def reset(self) -> Any:
        return [{"role": "user", "content": [{"type": "image", "image": drawing(7)}, {"type": "text", "text": "?"}]}]

    def step(self, answer: str) -> Step:
        return Step([{"role": "user", "content": "<image>", "images": [drawing(8)]}], done=answer == "stop")


async def test_environments_show_images(chat: ChatRenderer) -> None:
    async with Session("shows", Shows(), 5.0) as world:
        prompt = joined(leased([asking(drawing(6))]).task.prompt, await world.reset())
        engine = ScriptedEngine(chat, ["more", "stop"])
        episode = Episode(
            leased(), 0, config=run_config(), chat=chat, generator=engine, tools=(), environment=world, prompt=prompt
        )
        (row,) = episode.trajectories(await tool_agent(episode))
    assert list(episode.images.values()) == [drawing(6), drawing(7), drawing(8)]
    assert len(row.media) == 3
    assert episode.drift() is None


async def test_an_environments_message_with_a_video_fails_the_sample() -> None:
    class Films(Environment):
        def reset(self) -> Any:
            return [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]

    async with Session("films", Films(), 5.0) as world:
        with pytest.raises(EnvironmentFailed, match="video"):
            await world.reset()


async def test_a_model_of_text_refuses_images(renderer: ChatRenderer) -> None:
    with pytest.raises(DataError, match="text only"):
        await EpisodeRunner(run_config(), renderer, ScriptedEngine(renderer, [])).run(
            leased([{"role": "user", "content": f"{MARK}?", "images": [drawing(0)]}]), 0
        )

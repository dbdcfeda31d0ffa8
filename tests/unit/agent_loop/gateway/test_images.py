"""Images in the gateway's dialects: the same message of each, rows with their media, and refusals in words."""

import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.agent_loop.gateway import anthropic, openai, responses
from rl_async.agent_loop.gateway.chat import ChatMessage, ChatRequest
from rl_async.agent_loop.gateway.gateway_episode import GatewayEpisode
from rl_async.errors import RequestRefused
from rl_async.transfer_queue.images import MARK, MOST_IMAGES
from tests.support.vision_models import drawing
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config
from tests.unit.agent_loop.test_images import vision_chat

PNG, OTHER = drawing(1), drawing(2)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


def block(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(data)}}


def chat(content: Any, role: str = "user") -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}, {"role": role, "content": content}]}
    return openai.read_request(msgspec.json.encode(body))


def items(*given: dict[str, Any]) -> ChatRequest:
    return responses.read_request(msgspec.json.encode({"input": given}), responses.KeptResponses()).chat


def messages(*given: dict[str, Any], **fields: Any) -> ChatRequest:
    return anthropic.read_request(msgspec.json.encode({"max_tokens": 9, "messages": given, **fields}))


def test_each_dialect_gives_the_same_message() -> None:
    said = ChatMessage("user", f"see {MARK}!", images=(PNG,))
    part = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": url(PNG), "detail": "low"}}]
    assert chat([*part, {"type": "text", "text": "!"}]).messages[-1] == said
    part = [{"type": "input_text", "text": "see "}, {"type": "input_image", "image_url": url(PNG)}]
    content = [*part, {"type": "input_text", "text": "!"}]
    assert items({"role": "user", "content": content}).messages == [said]
    content = [{"type": "text", "text": "see "}, block(PNG), {"type": "text", "text": "!"}]
    assert messages({"role": "user", "content": content}).messages == [said]
    assert said.identity() != msgspec.structs.replace(said, images=(OTHER,)).identity()


def test_tool_results_show_images() -> None:
    said = ChatMessage("tool", MARK, answers="c", images=(PNG,))
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block(PNG)]}
    assert messages({"role": "user", "content": [result]}).messages == [said]
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_image", "image_url": url(PNG)}],
    }
    assert items(output).messages == [said]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], "not fetched"),
        ([{"type": "image_url", "image_url": {"url": "/etc/hostname"}}], "only data sets"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}}], "not base64"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}], "not an image"),
        ([{"type": "image_url"}], "an image is"),
        ([{"type": "input_audio", "input_audio": {}}], "input_audio"),
        ([{"type": "image_url", "image_url": {"url": url(PNG)}}, {"type": "text", "text": MARK}], "U\\+FFFC"),
    ],
)
def test_other_images_are_refused_in_words(content: Any, named: str) -> None:
    with pytest.raises(RequestRefused, match=named) as caught:
        chat(content)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith("messages[1].content")


def test_the_assistant_shows_no_images() -> None:
    with pytest.raises(RequestRefused, match="image"):
        chat([{"type": "image_url", "image_url": {"url": url(PNG)}}], role="assistant")
    with pytest.raises(RequestRefused, match="image"):
        messages({"role": "assistant", "content": [block(PNG)]})
    with pytest.raises(RequestRefused, match="image"):
        messages({"role": "user", "content": "x"}, system=[block(PNG)])


def request(*said: ChatMessage) -> ChatRequest:
    return chat("x")._replace(messages=list(said))


async def test_a_conversation_with_images_becomes_one_row(tmp_path: Path) -> None:
    renderer = vision_chat("qwen2_5_vl", tmp_path)
    engine = ScriptedEngine(renderer, ["first", "second"])
    episode = GatewayEpisode(leased(), 0, config=run_config(), chat=renderer, generator=engine, max_answers=9)
    asked = ChatMessage("user", f"{MARK}?", images=(PNG,))
    done = await episode.complete(request(asked))
    more = ChatMessage("user", f"and {MARK}?", images=(OTHER,))
    await episode.complete(request(asked, done.message, more))
    ((row,), _) = episode.trajectories(None)
    assert [episode.images[medium.sha256] for medium in row.media] == [PNG, OTHER]
    for medium in row.media:
        tokens = renderer.pictures.encode(episode.images[medium.sha256]).tokens
        assert row.token_ids[medium.position : medium.position + len(tokens)].tolist() == tokens
    assert [[image.data for image in request.images] for request in engine.requests] == [[PNG], [PNG, OTHER]]
    for sent in engine.requests:
        assert sent.token_ids == row.token_ids[: len(sent.token_ids)].tolist()


@pytest.mark.parametrize(
    ("images", "named"), [((PNG[:40],), "damaged"), ((PNG,) * (MOST_IMAGES + 1), "more than 64 images")]
)
async def test_images_that_cannot_be_shown_are_refused(tmp_path: Path, images: Any, named: str) -> None:
    renderer = vision_chat("qwen2_5_vl", tmp_path)
    episode = GatewayEpisode(
        leased(), 0, config=run_config(), chat=renderer, generator=ScriptedEngine(renderer, []), max_answers=9
    )
    with pytest.raises(RequestRefused, match=named) as caught:
        await episode.complete(request(ChatMessage("user", MARK * len(images), images=images)))
    assert caught.value.status == 400

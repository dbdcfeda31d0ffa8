"""Images in rows: each form becomes bytes at its mark, and anything else is refused by name."""

import base64
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from rl_async.errors import DataError
from rl_async.messages import Task
from rl_async.picture_decoder import MOST_BYTES
from rl_async.transfer_queue.chat_messages import to_messages
from rl_async.transfer_queue.dataset import to_task
from rl_async.transfer_queue.images import MARK, MOST_IMAGES, as_parts, mime_of, read_image


def picture(kind: str = "PNG", grey: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("L", (8, 8), grey).save(file, kind)
    return file.getvalue()


PNG, JPEG = picture(), picture("JPEG")
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def task_of(row: dict[str, Any], folder: Path | None = None) -> Task:
    return to_task({"reward_model": {"ground_truth": "3"}, **row}, "file, row 0", "t", folder)


def asked(content: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content, **more}]}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_formats_are_told_by_their_first_bytes(kind: str) -> None:
    assert mime_of(picture(kind)) == f"image/{kind.lower()}"


@pytest.mark.parametrize(
    "row",
    [
        # verl's column.
        asked("<image>what?") | {"images": [{"bytes": PNG, "path": None}]},
        {"prompt": "<image>what?", "images": [PNG]},
        asked("<image>what?") | {"images": [{"bytes": None, "path": "in/a.png"}]},
        asked("<image>what?") | {"images": ["in/a.png"]},
        asked("<image>what?") | {"images": [URL]},
        asked("<image>what?", images=[PNG]),
        # OpenAI's parts, of both dialects, and those of Qwen's and TRL's data.
        asked([{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "what?"}]),
        asked([{"type": "image_url", "image_url": "in/a.png"}, {"type": "text", "text": "what?"}]),
        asked([{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "what?"}]),
        asked([{"type": "image", "image": PNG}, {"type": "text", "text": "what?"}]),
        asked([{"type": "image"}, {"type": "text", "text": "what?"}]) | {"images": [PNG]},
        # As a message already is.
        asked(f"{MARK}what?", images=[PNG]),
    ],
)
def test_every_form_becomes_bytes_at_a_mark(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(PNG)
    task = task_of(row, tmp_path)
    assert task.prompt == [{"role": "user", "content": f"{MARK}what?", "images": [PNG]}]
    # The queue's journal and its messages keep the bytes.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task) == task


def test_images_go_to_the_messages_with_their_marks() -> None:
    prompt = [
        {"role": "system", "content": "Compare <image>"},
        {"role": "user", "content": "with <image> and <image>."},
    ]
    task = task_of({"prompt": prompt, "images": [PNG, JPEG, PNG]})
    assert [message["images"] for message in task.prompt] == [[PNG], [JPEG, PNG]]
    assert as_parts(task.prompt[1])["content"] == [
        {"type": "text", "text": "with "},
        {"type": "image"},
        {"type": "text", "text": " and "},
        {"type": "image"},
        {"type": "text", "text": "."},
    ]


def test_without_images_the_marks_are_text() -> None:
    assert task_of({"prompt": f"write <image> or {MARK}"}).prompt[0]["content"] == f"write <image> or {MARK}"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (asked("what?") | {"images": [PNG]}, "column images: 1 images for 0 marks"),
        (asked("<image><image>") | {"images": [PNG]}, "1 images for 2 marks"),
        (asked("<image>") | {"images": PNG}, "needs a list"),
        (asked("<image>") | {"images": [b"GIF89"]}, "not an image"),
        (asked("<image>") | {"images": [PNG[1:]]}, "not an image"),
        (asked("<image>") | {"images": [5]}, "int"),
        (asked("<image>") | {"images": [{"path": None}]}, "needs bytes, url or path"),
        (asked("<image>") | {"images": ["https://example.org/a.png"]}, "not fetched"),
        (asked("<image>") | {"images": ["file:///etc/passwd"]}, "not fetched"),
        (asked("<image>") | {"images": ["../secret.png"]}, "outside"),
        (asked("<image>") | {"images": ["/etc/hostname"]}, "outside"),
        (asked("<image>") | {"images": ["link.png"]}, "outside"),
        (asked("<image>") | {"images": ["missing.png"]}, "No such file"),
        (asked("<image>") | {"images": ["data:image/png,xx"]}, "needs base64"),
        (asked("<image>") | {"images": ["data:image/png;base64,%%%"]}, "not base64"),
        (asked("<image>") | {"images": [b"<svg xmlns='http://www.w3.org/2000/svg'/>"]}, "not an image in PNG"),
        (asked("<image>") | {"images": [b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"]}, "not an image in PNG"),
        (asked("<image>") | {"images": [b"%PDF-1.7"]}, "not an image in PNG"),
        (asked("<image>") | {"images": [b""]}, "needs|not an image"),
        (asked("<image>" * (MOST_IMAGES + 1)) | {"images": [PNG] * (MOST_IMAGES + 1)}, "65 images"),
        (asked([{"type": "video_url", "video_url": {"url": "x"}}]), "message 0: content part 0: of type 'video_url'"),
        (asked([{"type": "input_audio", "input_audio": {}}]), "input_audio"),
        (asked([{"type": "text"}]), "content part 0: needs its text"),
        (asked([{"type": "image_url"}]), "content part 0"),
        (asked([{"type": "image", "image": PNG}], images=[PNG]), "in its content and beside it"),
        (asked([{"type": "image", "image": PNG}, {"type": "text", "text": MARK}]), "U\\+FFFC"),
        (asked(f"{MARK}<image>") | {"images": [PNG]}, "U\\+FFFC"),
        (asked({"text": "x"}), "message 0"),
        (asked("x") | {"videos": ["a.mp4"]}, "has videos"),
    ],
)
def test_other_images_are_refused_by_name(row: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path.parent / "secret.png").write_bytes(PNG)
    (tmp_path / "link.png").symlink_to(tmp_path.parent / "secret.png")
    with pytest.raises(DataError, match=f"file, row 0.*{named}"):
        task_of(row, tmp_path)


# As parameters of a test, values of this size would take seconds.
def test_images_of_too_many_bytes_are_refused_by_name(tmp_path: Path) -> None:
    for image in (PNG + b"\0" * MOST_BYTES, "data:;base64," + "A" * (2 * MOST_BYTES)):
        with pytest.raises(DataError, match="more than 20 MiB"):
            task_of(asked("<image>") | {"images": [image]}, tmp_path)


def test_the_first_bytes_decide_about_the_kind_of_an_image(tmp_path: Path) -> None:
    (tmp_path / "photograph.jpg").write_bytes(PNG)
    assert read_image("photograph.jpg", tmp_path) == PNG
    assert mime_of(PNG) == "image/png"
    assert read_image("data:image/svg+xml;base64," + base64.b64encode(PNG).decode()) == PNG
    # As MIME and the command base64 write it.
    assert read_image("data:image/png;base64,\r\n " + base64.encodebytes(PNG).decode()) == PNG


def test_clients_name_no_files() -> None:
    with pytest.raises(DataError, match="only data sets may name files"):
        to_messages([{"role": "user", "content": "<image>", "images": ["a.png"]}], "a client's task")

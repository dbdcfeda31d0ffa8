"""Images of conversations: from the forms in which data sets and clients give them to the bytes that a message carries.

A message with images has their bytes in ``images``, and MARK in its content where each of them stands, in order. So
its content is still one text, which templates of data sets, rewards and viewers can read. Chat templates get parts.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_async.picture_decoder import MOST_BYTES

# Unicode's object replacement character, which stands for an object in a text.
MARK = "\ufffc"
# verl's mark in a prompt.
TEXT_MARK = "<image>"
# A conversation may have so many images, with MOST_BYTES in all.
MOST_IMAGES = 64
# Beginnings of the formats that are read, and their MIME types.
_FORMATS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
_DATA_URL = re.compile(r"data:([\w.+/-]*)((?:;[\w.+=-]+)*),(.*)", re.DOTALL)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
# Types of content parts that hold text, and keys under which those of an image may have it.
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = {"image_url": ("image_url",), "input_image": ("image_url",), "image": ("image", "url", "path", "source")}


def mime_of(data: bytes) -> str:
    """Return the MIME type of an image by its first bytes. Raises ValueError for a format that is not read."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    for beginning, mime in _FORMATS.items():
        if data.startswith(beginning):
            return mime
    raise ValueError(f"not an image in PNG, JPEG, WebP or GIF: it begins with {bytes(data[:8])!r}")


def read_image(value: Any, folder: Path | None = None) -> bytes:
    """Return the bytes of an image: given as such, as a data URL, or as a file in ``folder``, perhaps in a mapping.

    Mappings are verl's ``{"bytes", "path"}``, OpenAI's ``{"url"}`` and Anthropic's ``{"media_type", "data"}``. Without
    a ``folder``, no file is read. Raises ValueError, saying why, for anything else and for too many bytes.
    """
    if isinstance(value, Mapping):
        given = {key: part for key, part in value.items() if part}
        if isinstance(given.get("data"), str) and given.get("type", "base64") == "base64":
            return _checked(_from_base64(given["data"]))
        found = next((given[key] for key in ("bytes", "url", "path", "image") if key in given), None)
        if found is None or isinstance(found, Mapping):
            raise ValueError(f"an image as a mapping needs bytes, url or path, got {', '.join(given) or 'nothing'}")
        return read_image(found, folder)
    if isinstance(value, bytes | bytearray | memoryview):
        return _checked(bytes(value))
    if not isinstance(value, str):
        raise ValueError(f"an image is bytes, a data URL or a path, got {type(value).__name__}")
    if match := _DATA_URL.fullmatch(value):
        if ";base64" not in match[2]:
            raise ValueError("a data URL of an image needs base64: data:image/png;base64,...")
        return _checked(_from_base64(match[3]))
    if _SCHEME.match(value):
        raise ValueError(f"{value[:80]!r} is not fetched; send the image as a data URL (data:image/png;base64,...)")
    return _checked(_from_file(value, folder))


def _from_base64(text: str) -> bytes:
    # Base64 takes 4 bytes for 3, and line breaks some more.
    if len(text) > MOST_BYTES * 3 // 2:
        raise ValueError(f"an image of more than {MOST_BYTES >> 20} MiB; make it smaller")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"an image that is not base64: {error}") from error


def _from_file(name: str, folder: Path | None) -> bytes:
    if folder is None:
        raise ValueError(f"{name[:80]!r} is a file, and only data sets may name files; send a data URL")
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise ValueError(f"{name[:80]!r} is outside the data set's folder {folder}; move the image into it")
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"{name[:80]!r} has more than {MOST_BYTES >> 20} MiB; make it smaller")
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"image {name[:80]!r} in {folder}: {error.strerror}") from error


def _checked(data: bytes) -> bytes:
    if len(data) > MOST_BYTES:
        raise ValueError(f"an image of more than {MOST_BYTES >> 20} MiB; make it smaller")
    mime_of(data)
    return data


def folder_of(path: str) -> Path:
    """Return the folder to which a data set's paths of images are relative: its own, or that of its files."""
    return Path(path) if Path(path).is_dir() else Path(path).parent


def read_parts(content: Sequence[Any], folder: Path | None = None) -> tuple[str, list[bytes]]:
    """Return the text of a content in parts, with MARK for each image, and the images.

    Texts follow one another without a separator, as chat templates print them. A part ``{"type": "image"}`` without an
    image becomes TEXT_MARK: the row's column has the image. Raises ValueError, naming the part.
    """
    text, images = "", list[bytes]()
    for number, part in enumerate(content):
        kind = part.get("type", "text" if "text" in part else None) if isinstance(part, Mapping) else None
        try:
            if kind in TEXT_PARTS:
                if not isinstance(part.get("text"), str):
                    raise ValueError("needs its text")
                text += _unmarked(part["text"])
            elif kind in IMAGE_PARTS:
                given = next((part[key] for key in IMAGE_PARTS[kind] if part.get(key) is not None), None)
                if given is None and kind == "image":
                    text += TEXT_MARK
                    continue
                images.append(read_image(given, folder))
                text += MARK
            else:
                known = ", ".join(["text", *IMAGE_PARTS])
                raise ValueError(f"of type {kind!r:.40} is not read; known: {known}; leave video and sound out")
        except ValueError as error:
            raise ValueError(f"content part {number}: {error}") from error
    return text, images


def _unmarked(text: str) -> str:
    if MARK in text:
        raise ValueError("has the character U+FFFC, which stands for an image here; take it out")
    return text


def placed(contents: Sequence[str], images: Sequence[bytes]) -> list[tuple[str, list[bytes]]]:
    """Put images at the TEXT_MARKs of the contents, in order; return each content with its own images.

    Raises ValueError unless there are as many marks as images.
    """
    marks = sum(content.count(TEXT_MARK) for content in contents)
    if marks != len(images):
        raise ValueError(
            f"{len(images)} images for {marks} marks; write {TEXT_MARK} in the messages once where each image stands"
        )
    left, found = list(images), list[tuple[str, list[bytes]]]()
    for content in contents:
        count = content.count(TEXT_MARK)
        if count:
            _unmarked(content)
        found.append((content.replace(TEXT_MARK, MARK), left[:count]))
        left = left[count:]
    return found


def canonical(message: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Return a message with a content in parts, or with ``images``, in the form that this module describes.

    Raises ValueError for a content that is neither a text nor parts, for images that do not go with its marks, and for
    those that ``read_image`` refuses.
    """
    content, given = message.get("content", ""), message.get("images") or []
    if not isinstance(content, str | list | tuple) or not isinstance(given, list | tuple):
        raise ValueError("needs its content as text or in parts, and its images as a list")
    content, images = (content, []) if isinstance(content, str) else read_parts(content, folder)
    if given and images:
        raise ValueError("has images in its content and beside it; leave one of them out")
    if given:
        images = [read_image(image, folder) for image in given]
        if content.count(MARK) != len(images):
            ((content, images),) = placed([content], images)
    plain = {key: value for key, value in message.items() if key != "images"} | {"content": content}
    return plain | {"images": images} if images else plain


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the images of messages in order."""
    return [image for message in messages for image in message.get("images", ())]


def images_by_hash(messages: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """Return the images of messages by their SHA-256, as rows refer to them.

    Messages may be a client's, which nothing has checked: values that are no bytes are left out.
    """
    given = [images for message in messages if isinstance(images := message.get("images"), list)]
    found = [image for images in given for image in images if isinstance(image, bytes)]
    return {hashlib.sha256(image).hexdigest(): image for image in found}


def bound_images(images: Sequence[bytes]) -> None:
    """Raise ValueError for more images, or more bytes of them, than a conversation takes."""
    if len(images) > MOST_IMAGES or sum(map(len, images)) > MOST_BYTES:
        raise ValueError(
            f"{len(images)} images of {sum(map(len, images)):,} bytes in all; a conversation takes {MOST_IMAGES} of "
            f"{MOST_BYTES >> 20} MiB in all, so leave some out or make them smaller"
        )


def as_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as chat templates take it: in parts if it has images, without their bytes."""
    plain = {key: value for key, value in message.items() if key != "images"}
    if not message.get("images"):
        return plain
    first, *rest = message["content"].split(MARK)
    parts = [{"type": "text", "text": first}]
    for text in rest:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return plain | {"content": [part for part in parts if part.get("text") != ""]}


def without_bytes(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the number of their images in place of the bytes, for logs and keys of caches."""
    return [{**m, "images": len(m["images"])} if m.get("images") else dict(m) for m in messages]


def shown(text: str, images: Sequence[bytes]) -> str:
    """Return a text with a description of each image in place of its MARK."""
    for image in images:
        text = text.replace(MARK, f"[{mime_of(image)}, {len(image):,} bytes]", 1)
    return text

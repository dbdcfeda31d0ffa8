"""Files that a decoder of images must refuse. ``python -m tests.support.hostile_images`` prints what each gets."""

import io
import struct
import time
import zlib
from typing import Any

from PIL import Image

from rl_async.errors import DataError
from rl_async.picture_decoder import Decoder, Want
from tests.support.tiny_models import drawing


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of grey pixels, whose header may lie about them."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(b"\0" * 9)), (b"IEND", b"")]
    body = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def text_bomb() -> bytes:
    return png(2, 2, (b"zTXt", b"a\0\0" + zlib.compress(b"0" * (80 << 20))))


def webp_bomb() -> bytes:
    """An animation of 16 x 16 pixels whose header tells of 16,000 x 16,000."""
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    data = bytearray(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]))
    assert data[12:16] == b"VP8X"
    data[24:30] = struct.pack("<I", 15_999)[:3] * 2
    return bytes(data)


# By name: the file, and a pattern of the reason.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "none of"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of"),
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "none of"),
    "PDF": (b"%PDF-1.7\n1 0 obj\n", "none of"),
    "BMP": (drawing(0, form="BMP"), "none of"),
    "TIFF": (drawing(0, form="TIFF"), "none of"),
    "bomb of 3.6 billion pixels": (png(60_000, 60_000), "60000 x 60000 pixels"),
    "64 million pixels": (png(8_000, 8_000), "8000 x 8000 pixels"),
    "WebP of 256 million pixels": (webp_bomb(), "16000 x 16000 pixels|memory|damaged"),
    "bomb of text": (text_bomb(), "damaged"),
    "no pixels": (png(0, 5), "damaged"),
}


def main() -> None:
    decoder = Decoder()
    for name, (data, _) in HOSTILE.items():
        began = time.perf_counter()
        try:
            width, height, _ = decoder.decode(data, Want.PIXELS)
            got = f"read, {width} x {height}"
        except DataError as error:
            got = str(error)
        print(f"{name:28}{time.perf_counter() - began:6.2f} s  {got}")
    decoder.close()


if __name__ == "__main__":
    main()

"""Decodes image files from strangers in a process of its own, with limits on its memory and time.

``Decoder`` is the client. It starts this module as a program when the first image comes, and again after the program
died, so a file that crashes a codec, exhausts its memory or keeps it busy costs the caller a DataError. The program
ends with the connection, which it reads as its standard input; it loads neither torch nor numpy.

A request is a byte that says how much is wanted (``Want``), the size of the file, and the file. A reply is a byte, 0 if
the image was refused, the size of the rest, and the rest: width and height, perhaps with pixels, or the reason.
"""

import atexit
import contextlib
import enum
import io
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from typing import NamedTuple

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from rl_async.errors import DataError, UserError
from rl_async.process.allocation import give_back_freed_memory

# Limits of one image: its file, and its pixels once decoded, which take four bytes each.
MOST_BYTES = 20 << 20
MOST_PIXELS = 50_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Address space of the program. The largest image that is allowed takes 1.2 GiB.
MEMORY_BYTES = 1536 << 20
# The largest images take three seconds on an idle machine.
DEADLINE_S = 60.0
START_S = 120.0
# These keywords in a PNG precede an orientation, which may stand behind the pixels.
_PNG_ORIENTATIONS = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
# Pillow's decoders raise these for damaged files.
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, EOFError, OverflowError, LookupError, TypeError),
    *(struct.error, zlib.error),
)
# Values of EXIF's orientation that swap width and height.
_SIDEWAYS = (5, 6, 7, 8)
# Precedes every request and reply.
_HEAD, _SIZE = struct.Struct(">BQ"), struct.Struct(">II")


class Want(enum.IntEnum):
    """How much of an image to decode: the size that its header tells, the size once all is decoded, or its pixels."""

    HEADER = 0
    SIZE = 1
    PIXELS = 2


class Decoded(NamedTuple):
    """The size of an image turned as its orientation says, and its RGB bytes if they are wanted."""

    width: int
    height: int
    pixels: bytearray


# --- The client


class Decoder:
    """Decodes images in another process, one at a time. Its methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._program: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def decode(self, data: bytes, want: Want, within_s: float = DEADLINE_S) -> Decoded:
        """Decode a PNG, JPEG, WebP or GIF, of which the first frame counts.

        Transparent pixels are blended with white, and 16-bit grey levels keep their upper byte. Raises DataError for
        other formats, damaged files, images above MOST_BYTES, MOST_PIXELS or MEMORY_BYTES, and late ones; UserError if
        the program does not start.
        """
        if len(data) > MOST_BYTES:
            raise DataError(f"an image has {len(data):,} bytes, more than {MOST_BYTES:,}; shrink it")
        with self._lock:
            process, peer = self._running()
            try:
                deadline = time.monotonic() + within_s
                peer.settimeout(within_s)
                peer.sendall(_HEAD.pack(want, len(data)) + data)
                accepted, size = _HEAD.unpack(_receive(peer, _HEAD.size, deadline))
                body = _receive(peer, size, deadline)
            except TimeoutError:
                self._end()
                raise DataError(f"an image of {len(data)} bytes was not decoded within {within_s:g} s") from None
            except (ConnectionError, EOFError):
                self._end()
                code = process.returncode
                raise DataError(f"an image of {len(data)} bytes ended its decoder with exit code {code}") from None
        if not accepted:
            raise DataError(body.decode())
        width, height = _SIZE.unpack_from(body)
        del body[: _SIZE.size]
        return Decoded(width, height, body)

    def close(self) -> None:
        """End the program; another image would start it again."""
        with self._lock:
            self._end()

    def _running(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._program is not None and self._program[0].poll() is not None:
            self._end()
        if self._program is None:
            mine, its = socket.socketpair()
            with its:
                command = [sys.executable, "-P", "-m", "rl_async.picture_decoder"]
                self._program = subprocess.Popen(command, stdin=its.fileno(), stdout=subprocess.DEVNULL), mine
            try:
                _receive(mine, 1, time.monotonic() + START_S)
            except (TimeoutError, ConnectionError, EOFError):
                self._end()
                raise UserError(f"the decoder of images does not start: {' '.join(command)}") from None
        return self._program

    def _end(self) -> None:
        if self._program is not None:
            process, peer = self._program
            self._program = None
            # It may have died by itself, and then its own exit code is told.
            with contextlib.suppress(subprocess.TimeoutExpired):
                peer.close()
                process.wait(timeout=0.2)
            process.kill()
            process.wait()


def _receive(peer: socket.socket, size: int, deadline: float) -> bytearray:
    """Receive ``size`` bytes. Raises TimeoutError after the deadline, and EOFError if the peer has gone."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        peer.settimeout(max(deadline - time.monotonic(), 1e-3))
        if not (count := peer.recv_into(rest)):
            raise EOFError
        rest = rest[count:]
    return data


DECODER = Decoder()
atexit.register(DECODER.close)


# --- The program


def main() -> None:
    """Answer requests until the client has gone."""
    # An interrupt from the terminal is meant for the client, whose end ends this program.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # MOST_PIXELS is stricter, and Pillow's own limit would warn first.
    Image.MAX_IMAGE_PIXELS = None
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=sys.stdin.fileno()) as peer, peer.makefile("rb") as requests:
        peer.sendall(b"\1")
        while head := requests.read(_HEAD.size):
            want, size = _HEAD.unpack(head)
            accepted, body = _answer(requests.read(size), want)
            peer.sendall(_HEAD.pack(accepted, len(body)))
            peer.sendall(body)
            del body
            give_back_freed_memory()


def _answer(data: bytes, want: int) -> tuple[bool, bytes]:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise DataError(f"an image has {width} x {height} pixels, more than {MOST_PIXELS:,}; shrink it")
            # Pillow reads a PNG to its end to find the orientation.
            if want == Want.HEADER and (image.format != "PNG" or not any(word in data for word in _PNG_ORIENTATIONS)):
                if image.format != "PNG" and image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS:
                    width, height = height, width
                return True, _SIZE.pack(width, height)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            picture = _rgb(image)
            return True, _SIZE.pack(*picture.size) + (picture.tobytes() if want == Want.PIXELS else b"")
    except DataError as error:
        reason = str(error)
    except MemoryError:
        reason = f"an image of {len(data)} bytes takes more than {MEMORY_BYTES >> 20} MiB to decode; shrink it"
    except UnidentifiedImageError:
        # Pillow's text names an object of its own.
        known = ", ".join(FORMATS)
        reason = f"an image of {len(data)} bytes is none of {known}, or damaged at its beginning, {data[:8]!r}"
    except _DAMAGED as error:
        reason = f"an image of {len(data)} bytes is damaged, or none of {', '.join(FORMATS)}: {error}"
    return False, reason.encode(errors="replace")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda level: level * (1 / 256)).convert("L")
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


if __name__ == "__main__":
    main()

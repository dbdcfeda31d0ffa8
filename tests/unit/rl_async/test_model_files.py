"""Damaged and hostile files of weights, and indexes that name files elsewhere."""

import json
from pathlib import Path

import pytest

from rl_async.model_files import INDEX, indexed_files, read_header, weight_files

HEADER = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}


def stored(header: bytes, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def test_a_header_tells_the_tensors(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(stored(json.dumps(HEADER).encode()))
    (tensor,) = read_header(tmp_path / "m.safetensors").values()
    assert (tensor.dtype, tensor.shape) == ("F32", [2])


def entries(*tensors: tuple[str, list[int], tuple[int, int]]) -> bytes:
    """A header of tensors of these types, shapes and places."""
    return json.dumps(
        {str(n): dict(zip(("dtype", "shape", "data_offsets"), each, strict=True)) for n, each in enumerate(tensors)}
    ).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\0",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
        stored(json.dumps(HEADER).encode(), length=2**63),
        stored(json.dumps(HEADER).encode(), length=1 << 40),
        stored(json.dumps(HEADER).encode(), length=3),
        stored(json.dumps(HEADER).encode(), data=b"\0" * 7),
        stored(b"[]"),
        stored(b"{" * 100_000),
        stored(b'{"a": ' * 100_000),
        stored(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}'),
        stored(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}'),
        stored(b'{"a": {"dtype": 1}}'),
        stored(b"\xff\xfe"),
        stored(json.dumps(HEADER).encode(), data=b"\0" * 64),
        stored(entries(("F32", [2], (0, 8)), ("F32", [2], (0, 8)))),
        stored(entries(("F32", [2], (0, 8)), ("F32", [2], (4, 12))), data=b"\0" * 12),
        stored(entries(("F32", [2], (8, 16))), data=b"\0" * 16),
        stored(entries(("F32", [3], (0, 8)))),
        stored(entries(("F32", [-1, -2], (0, 8)))),
        stored(entries(("F32", [1 << 62, 8], (0, 8)))),
        stored(entries(("F33", [2], (0, 8)))),
        stored(b'{"a": {"dtype": "F32", "dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}'),
        stored(b'{"__metadata__": {"format": 1}}', data=b""),
    ],
)
def test_what_is_no_file_of_weights_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"m\.safetensors"):
        read_header(tmp_path / "m.safetensors")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", "", "..", "a/b.safetensors"])
def test_an_index_that_names_something_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": name}}))
    with pytest.raises(ValueError, match=r"index\.json"):
        indexed_files(index)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_what_is_no_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json"):
        indexed_files(tmp_path / "index.json")


def test_an_index_names_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"a": "2.st", "b": "1.st", "c": "2.st"}}))
    assert indexed_files(tmp_path / "index.json") == ["1.st", "2.st"]


def test_weights_that_a_folder_has_twice_are_those_of_the_index(tmp_path: Path) -> None:
    """As Mistral's folders have them, under other names in a file of their own."""
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    for name in ("model-1", "model-2", "consolidated"):
        (tmp_path / f"{name}.safetensors").touch()
    assert {file.name for file in weight_files(tmp_path)} == {"model-1.safetensors", "model-2.safetensors"}

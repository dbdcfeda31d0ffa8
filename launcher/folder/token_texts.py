"""The text of a run's tokens, by its tokenizer, without importing transformers."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

TOKENIZER = "tokenizer.json"
Decode = Callable[[Sequence[int]], str]


class TokenTexts(NamedTuple):
    """How to turn token ids into text; without ``decode``, ``problem`` says why that cannot be done."""

    decode: Decode | None
    problem: str = ""


def tokenizer_of(run: Path, model: str) -> TokenTexts:
    """Return the tokenizer of a run: of a checkpoint, else in the folder ``model`` of its config.

    A relative ``model`` is looked for here, and in the folders that hold the run.
    """
    folders = sorted(run.glob("checkpoints/*/model"), reverse=True)
    if model:
        folders += [folder / model for folder in (Path(), *run.absolute().parents)]
    file = next((folder / TOKENIZER for folder in folders if (folder / TOKENIZER).is_file()), None)
    if file is None:
        return TokenTexts(
            None, f"token texts: there is no {TOKENIZER} in {run}/checkpoints/*/model or {model or 'a model'}"
        )
    try:
        return TokenTexts(_decode_of(file, file.stat().st_mtime_ns))
    except Exception as error:  # the library raises nothing more specific
        return TokenTexts(None, f"token texts: {file} cannot be read: {error}")


@lru_cache(maxsize=4)
def _decode_of(file: Path, changed: int) -> Decode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))

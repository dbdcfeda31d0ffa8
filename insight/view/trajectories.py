"""Reads recorded trajectories for the page: lines of files in ``trajectories/``, and all properties of each token.

Tokens are decoded with the run's tokenizer, without importing transformers.
"""

import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl_async.files import undamaged
from rl_async.insight.recorded_evaluations import number_of, prompt_of
from rl_async.messages import Activity, Explanation, Media, Sampling, Turn, VersionRun
from rl_async.recording import PARTIAL

TOKENIZER = "tokenizer.json"
Decode = Callable[[Sequence[int]], str]


class TokenTexts(NamedTuple):
    """A function that decodes token ids, or the ``problem`` that prevents it."""

    decode: Decode | None
    problem: str = ""


def tokenizer_of(run: Path, model: str) -> TokenTexts:
    """Return the tokenizer of a run, from its newest checkpoint or else from the folder ``model`` of its config.

    A relative ``model`` is looked up in the working directory, and in the folders above the run.
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
        stat = file.stat()
        return TokenTexts(_decode_of(file, (stat.st_mtime_ns, stat.st_size)))
    # The library raises nothing more specific.
    except Exception as error:
        return TokenTexts(None, f"token texts: {file} cannot be read: {error}")


@lru_cache(maxsize=4)
def _decode_of(file: Path, changed: tuple[int, int]) -> Decode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


# A limit of several times the bytes of the longest rows.
MOST_LINE = 1 << 27


class RecordedRow(msgspec.Struct, dict=True):
    """The part of a line that is shown; other fields are skipped. Older files lack some fields with defaults."""

    task_id: str
    group_id: int
    sample: int
    reward: float
    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    versions: list[VersionRun]
    sampling: Sampling
    constrained: list[tuple[int, int]] = []
    turns: list[Turn] = []
    segment: int = 0
    role: str = ""
    attempt: int = 0
    episode_id: str = ""
    reward_parts: dict[str, float] = {}
    reward_reasons: dict[str, str] = {}
    scored: bool = True
    baseline: bool = False
    finish_reason: str = ""
    error: str = ""
    timings: dict[str, float] = {}
    ground_truth: str = ""
    data_source: str = ""
    correction: Explanation | None = None
    activities: list[Activity] = []
    media: list[Media] = []

    @cached_property
    def sampled(self) -> list[int]:
        """The places of the sampled tokens."""
        return [*compress(range(len(self.loss_mask)), self.loss_mask)]

    @cached_property
    def constrained_places(self) -> set[int]:
        """The places of the tokens that were sampled under a grammar's mask."""
        return {place for start, end in self.constrained for place in self.sampled[start:end]}

    @property
    def explained(self) -> list[int]:
        """The places of the tokens that ``correction`` covers: the sampled ones except a row's first, which has no
        prediction."""
        return self.sampled[1:] if self.sampled[:1] == [0] else self.sampled

    @property
    def turn_reward(self) -> float:
        """The sum of the turns' own rewards."""
        return sum(turn.reward or 0.0 for turn in self.turns)

    @property
    def staleness_base(self) -> int | None:
        """The step of the oldest version that sampled a token, or None if nothing was sampled."""
        return min((run.version.step for run in self.versions), default=None)

    def text(self) -> str:
        """Return the text to be searched: turns, errors, calls and results."""
        calls = [
            f"{call.name}\n{call.arguments}\n{call.result}\n{call.error}"
            for turn in self.turns
            for call in turn.tool_calls
        ]
        said = [turn.text for turn in self.turns]
        return "\n".join([self.error, *said, *calls, *self.reward_reasons.values(), self.ground_truth])

    def asked(self) -> int:
        """Return the checksum of the prompt, all turns before the policy's first."""
        return number_of(prompt_of(self.turns))

    def said_last(self, role: str) -> str:
        """Return the last turn of a role, or an empty string."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == role), "")


class RecordedFile(NamedTuple):
    """The parts of the name of a file in ``trajectories/``, such as ``step-000012-lineage0-rank0.jsonl.gz``."""

    name: str
    # ``train`` or ``eval``.
    partition: str
    # The step that trained the rows, or the version that was evaluated.
    step: int
    # Evaluations have no lineage in their names, and get 0.
    lineage: int

    @classmethod
    def of(cls, name: str) -> "RecordedFile | None":
        """Parse a name, or return None for a file of another kind."""
        if not name.endswith(".jsonl.gz"):
            return None
        kind, *parts = name.removesuffix(".jsonl.gz").split("-")
        if kind == "eval" and parts and parts[0].isdigit() and parts[1:] in ([], [PARTIAL]):
            return cls(name, "eval", int(parts[0]), 0)
        if kind == "step" and len(parts) == 3 and parts[0].isdigit() and parts[1].removeprefix("lineage").isdigit():
            return cls(name, "train", int(parts[0]), int(parts[1].removeprefix("lineage")))
        return None


def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line of a file with its offset in the decompressed text.

    Raises ValueError for a line of more than MOST_LINE bytes.
    """
    place = 0
    with gzip.open(file, "rb") as opened:
        while line := opened.readline(MOST_LINE + 1):
            if len(line) > MOST_LINE:
                raise ValueError(f"a line at {place} has more than {MOST_LINE} bytes")
            yield place, line
            place += len(line)


def row_at(file: Path, place: int) -> RecordedRow:
    """Read the row whose line begins at offset ``place`` of the decompressed text."""
    (row,) = rows_at(file, [place])
    return row


def rows_at(file: Path, places: Iterable[int]) -> list[RecordedRow]:
    """Read several rows of a file in one pass, in the order of their offsets, with lines bounded as in ``lines``.

    Raises UserError, naming the file, if it is damaged.
    """
    with undamaged(file), gzip.open(file, "rb") as opened:
        rows = []
        for place in sorted(places):
            opened.seek(place)
            rows.append(msgspec.json.decode(opened.readline(MOST_LINE + 1), type=RecordedRow))
        return rows


def rows_in(folder: Path, places: Sequence[tuple[str, int]]) -> list[RecordedRow]:
    """Read rows by file and offset, each file once; return them in the given order."""
    found: dict[tuple[str, int], RecordedRow] = {}
    for file in {file for file, _ in places}:
        there = sorted({place for name, place in places if name == file})
        found.update(zip(((file, place) for place in there), rows_at(folder / file, there), strict=True))
    return [found[place] for place in places]


# When more tokens than this share a character, their text is shown incomplete.
WINDOW = 8
# Decoders put this in place of an incomplete character.
REPLACEMENT = "\ufffd"


def story(row: RecordedRow, step: int | None, decode: Decode | None) -> dict[str, Any]:
    """Return all recorded properties of a row; ``step``, which trained it, is None for a held-out one.

    ``tokens`` has a list for each property, with one entry for each token, null where a token lacks it:
    ``id``, ``text``, ``logprob`` (the engine's), ``trained_logprob`` (the trainer's), ``version`` that sampled it as
    [lineage, step], ``staleness``, ``weight``, ``rule`` that masked it, ``advantage``; ``constrained``, whether a
    grammar restricted the sampling, so that ``logprob`` is of another distribution than ``trained_logprob``; and
    ``turn``, the number of its turn, or of the last one if several share the token.
    """
    count = len(row.token_ids)
    tokens: dict[str, list[Any]] = {
        "id": row.token_ids,
        "text": token_texts(row.token_ids, decode) if decode else [None] * count,
        "logprob": [value if sampled else None for value, sampled in zip(row.logprobs, row.loss_mask, strict=True)],
    }
    for name in ("trained_logprob", "version", "staleness", "weight", "rule", "advantage", "turn"):
        tokens[name] = [None] * count
    for run in row.versions:
        for place in row.sampled[run.start : run.end]:
            tokens["version"][place] = [run.version.lineage, run.version.step]
            tokens["staleness"][place] = None if step is None else step - run.version.step
    tokens["constrained"] = [place in row.constrained_places for place in range(count)]
    for number, turn in enumerate(row.turns):
        tokens["turn"][turn.start : turn.end] = [number] * len(tokens["turn"][turn.start : turn.end])
    _add_correction(row, tokens)
    about = msgspec.to_builtins(row)
    for name in ("token_ids", "loss_mask", "logprobs", "versions", "constrained", "correction"):
        del about[name]
    return {**about, "explained": row.correction is not None, "tokens": tokens}


def _add_correction(row: RecordedRow, tokens: Mapping[str, list[Any]]) -> None:
    if row.correction is None:
        return
    places, found = row.explained, row.correction
    advantages = found.advantages * len(places) if len(found.advantages) == 1 else found.advantages
    for name, values in (("weight", found.weights), ("trained_logprob", found.logprobs), ("advantage", advantages)):
        # Older runs only recorded weights, so the other lists may be empty.
        for place, value in zip(places, values, strict=False):
            tokens[name][place] = value
    for run in found.rules:
        for place in places[run.start : run.end]:
            tokens["rule"][place] = run.rule


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds to its predecessors.

    Of several tokens that make up a character, the last one gets its text, and the others get none.
    """
    texts: list[str] = []
    # Decoding starts at ``begin``, since the text of a token may depend on its predecessor.
    begin = shown = 0
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[begin:shown]), decode(ids[begin:end])
        if now.endswith(REPLACEMENT) and end - shown < WINDOW and end < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :] if now.startswith(before) else decode(ids[shown:end]))
        begin, shown = shown, end
    return texts

"""One trajectory as the page shows it: its conversation, and the whole story of each token."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rl_async.launcher.folder.token_texts import Decode
from rl_async.launcher.view.recorded import RecordedRow

WINDOW = 8  # tokens that may share a character before their text is given as far as it goes
PARTIAL = "\ufffd"  # stands for bytes that are no whole character


def story(row: RecordedRow, step: int | None, decode: Decode | None) -> dict[str, Any]:
    """Return everything that was recorded of a row; ``step``, which trained it, is None for a held-out one.

    ``tokens`` has a list for each property, with one entry for each token, null where a token has none:
    ``id``, ``text``, ``logprob`` (the engine's) and ``trained_logprob`` (the trainer's), ``version`` that sampled it as
    [lineage, step], ``staleness``, ``weight``, ``rule`` that masked it and ``advantage``; ``constrained``, whether a
    grammar restricted what could be sampled, so that ``logprob`` is of another distribution than ``trained_logprob``;
    and ``turn``, the number of its turn, of messages that have their tokens in common the last.
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
        for place, value in zip(places, values, strict=False):  # older runs recorded weights alone
            tokens[name][place] = value
    for run in found.rules:
        for place in places[run.start : run.end]:
            tokens["rule"][place] = run.rule


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds to those before it.

    Of the tokens that share a character, the last has its text and the others have none.
    """
    texts: list[str] = []
    begin = shown = 0  # decoding starts at ``begin``, as the text of a token may depend on the one before it
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[begin:shown]), decode(ids[begin:end])
        if now.endswith(PARTIAL) and end - shown < WINDOW and end < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :] if now.startswith(before) else decode(ids[shown:end]))
        begin, shown = shown, end
    return texts

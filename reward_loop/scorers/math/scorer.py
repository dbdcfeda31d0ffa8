"""The scorer `math`: finds what an answer and its ground truth state, and compares it."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain

from rl_async.errors import DataError
from rl_async.extraction import LONGEST, answer_tag, boxed
from rl_async.reward_loop.api import Conversation
from rl_async.reward_loop.scorers.math.answers import Form, equal
from rl_async.reward_loop.scorers.math.reading import read
from rl_async.reward_loop.scorers.math.units import changes_number, is_unit_word
from rl_async.reward_loop.scorers.math.values import Unreadable

_FORMULA = re.compile(
    r"\$\$(?P<a>(?:\\\$|[^$])+)\$\$|(?<!\\)\$(?P<b>(?:\\\$|[^$])+)(?<!\\)\$"
    r"|\\\((?P<c>(?:(?!\\[()]).)+)\\\)|\\\[(?P<d>(?:(?!\\[\[\]]).)+)\\\]",
    re.DOTALL,
)
# What may stand between several formulas: $1$ or $2$.
_JOINING = re.compile(r"(?:[\s,;]|and|or)*")
_BOLD = re.compile(r"(?<![\w*)\]}^])(\*\*|__|`)(?!\s|\1)([^*`\n]{1,200}?)(?<!\s)\1(?![\w*(])")
_MARKED = re.compile(r"\b(?:answer|option|choice)\s*(?:(?:is|=|:)(?!\w)\s*)+(?P<answer>[^\s:=][^\n]*)", re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_SENTENCE = re.compile(r"\s*[A-Z][a-z]+\b")
# A word of prose that belongs to a formula: it has a digit, a command or an operator, or is one letter or a bracket.
_MATHEMATICAL = re.compile(
    r".*[0-9\\=<>^+*/|√π].*|-?[B-HJ-Zb-hj-z∞]|[-(\[{]+[A-Za-z][)\]}]+|-|[()\[\]{},]+|pi|and|or", re.DOTALL
)
# Words before a number in prose that make another number of it.
_CHANGES = re.compile(
    r"minus|negative|not|\w+n't|never|no|than|plus|times|by|over|under|above|below|least|most|twice|double|half|quarter"
    r"|between|from|base|modulo|hundred|thousand|million|square|root|log|ln|sin|cos|tan|exp"
    r"|(?:root|square|cube|half|third|quarter|logarithm|log|power|multiple|factor|factorial|reciprocal)s? of"
)


def score(conversation: Conversation) -> float:
    """Return 1 if the answer equals the ground truth, else 0. Raises DataError for a ground truth without a meaning."""
    truth = conversation.ground_truth
    try:
        gold = read(_marked(_boxed(truth)))
    except Unreadable as error:
        raise DataError(f"{conversation.place} {truth!r:.80} {error}, so the scorer math cannot read it") from None
    said = _said(conversation.solution_str)
    return float(said is not None and equal(gold, said))


def _said(answer: str) -> Sequence[Form] | None:
    """Return what an answer states, or else its last formula; None if neither has a meaning."""
    text = _boxed(answer)
    for candidate in chain([_marked(text)], _in_prose(text)):
        try:
            return read(candidate)
        except Unreadable:
            continue
    return None


def _boxed(text: str) -> str:
    """Return the end of a text that counts: in its last box, answer tags, or behind ####; all of it without these."""
    text = text[-LONGEST:].strip()
    while (inner := boxed(text)) is not None:
        text = inner
    # TeX also boxes a single token without braces.
    text = re.sub(r"\\f?boxed(?![A-Za-z]|\s*\{)", "", text)
    if (inner := answer_tag(text)) is not None:
        text = inner
    if hashes := _HASHES.findall(text):
        text = hashes[-1]
    return _BOLD.sub(r"\2", text.strip())


def _marked(text: str) -> str:
    """Return the expression that a text calls its answer, or all of it, without dollars around its formulas."""
    if marked := list(_MARKED.finditer(text)):
        text = marked[-1]["answer"]
    text = text.strip().removesuffix(".")
    formulas_alone = _JOINING.fullmatch(_FORMULA.sub("", text))
    return _FORMULA.sub(lambda formula: f" {_content(formula)} ", text).strip() if formulas_alone else text


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


def _in_prose(text: str) -> Iterator[str]:
    """Return the last formula between dollars, and the last words of prose that look like a formula."""
    if _FORMULA.fullmatch(text):
        return
    if formulas := list(_FORMULA.finditer(text)):
        yield _content(formulas[-1])
    # A dollar that encloses nothing is a currency sign.
    bare = re.sub(r"\\[()\[\]]|\$(?!\s*\d)", " ", text)
    if not (formulas or "\n" in text or len(_WORD.findall(bare)) > 2 or _SENTENCE.match(bare)):
        return
    words = bare.split()
    last = next((n for n in reversed(range(len(words))) if _is_kernel(words[n])), None)
    if last is None:
        return
    first = last
    while first and _MATHEMATICAL.fullmatch(words[first - 1]) and words[first - 1][-1] not in ".:;?!":
        first -= 1
    while words[first] in ("and", "or"):
        first += 1
    before, after = _plain_words(words[max(first - 2, 0) : first]), _plain_words(words[last + 1 : last + 2])
    ends = words[last][-1] in ".,;:?!"
    if _CHANGES.fullmatch(before) or _CHANGES.fullmatch(before.split(" ")[-1]) or (not ends and changes_number(after)):
        return
    found = " ".join(words[first : last + 1]).rstrip(".,:;!?")
    yield f"{found} {after}" if is_unit_word(after) else found


def _plain_words(words: Sequence[str]) -> str:
    return " ".join(word.casefold().strip(".,:;!?") for word in words)


def _is_kernel(word: str) -> bool:
    return word not in ("and", "or", "-") and bool(re.search(r"\w", word)) and bool(_MATHEMATICAL.fullmatch(word))

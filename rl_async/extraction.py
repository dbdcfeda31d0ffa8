"""Finds the answer in what a model said, before a scorer compares it: steps of a chain, each a rule of its own.

``reward.functions[].extract`` holds a chain: every step works on the text that the step before found, and a step of
several names takes the first that finds something. To add a rule, write its function here and add it to `RULES`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

import regex

Extraction = tuple[str | tuple[str, ...], ...]

# A regular expression follows.
REGEX = "regex:"
# A rule looks at so many characters, from the end.
LONGEST = 20_000
# For a user's pattern, which may take exponentially long on a model's text.
PATTERN_S = 2.0

_NUMBER = re.compile(
    # U+2212 is the minus sign of typeset text.
    r"(?:(?<![\w)])[-\u2212])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
    # Numbers are written out, so an exponent of more digits would make a text without end.
    r"(?:[eE][+-]?\d{1,3}(?!\w))?"
)
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
# TeX also boxes a single token; models mean the word by it.
_UNBRACED = re.compile(r"\\(?:boxed|fbox)\s+([^\s\\{}$]+?)[.,]?(?=[\s$]|\Z)")


class Found(NamedTuple):
    """One step: the rule that found a text, or all that were tried, and the text, or None."""

    rule: str
    text: str | None


def last_number(text: str) -> str | None:
    """Return the last number, written out: without thousands separators, exponent and zeros that say nothing."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    number = format(Decimal(found[-1].replace(",", "").replace("\u2212", "-")), "f")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return "0" if number == "-0" else number


def boxed(text: str) -> str | None:
    r"""Return what stands in the last ``\boxed{...}`` or ``\fbox{...}`` whose braces are closed, or behind
    ``\boxed`` without braces."""
    opened: list[re.Match[str]] = []
    start, end = -1, -1
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (opening := opened.pop())[0] != "{" and opening.end() > start:
            start, end = opening.end(), brace.start()
    if start < 0:
        found = _UNBRACED.findall(text)
        return found[-1] if found else None
    return text[start:end].strip()


def answer_tag(text: str) -> str | None:
    """Return what stands in the last pair of ``<answer>`` tags."""
    found = _TAG.findall(text)
    return found[-1].strip() if found else None


# Around reasoning, as models write it; templates may write the opening of the first four. Beside DeepSeek's and Qwen's
# tags: Seed-OSS, Magistral, Kimi-VL, EXAONE Deep, Sky-T1, common instructions, Granite 3 and Apriel.
_REASONING = (
    *(("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷")),
    *(("<thought>", "</thought>"), ("<|begin_of_thought|>", "<|end_of_thought|>"), ("<thinking>", "</thinking>")),
    *(("<reasoning>", "</reasoning>"), ("Here is my thought process:", "Here is my response:")),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)


def behind_reasoning(text: str) -> tuple[str, str]:
    """Split what a model said into its reasoning and its answer, at the last ``</think>``.

    Reasoning that was opened and not ended has no answer. The opening tag may be missing: templates write it. Other
    marks than these count where the text begins with them, or has the end of what a template opened.
    """
    begun = next((marks for marks in _REASONING if text.lstrip().startswith(marks[0])), None)
    ended = next((marks for marks in _REASONING[:4] if marks[1] in text), _REASONING[0])
    opening, closing = begun or ended
    reasoning, closed, answer = text.rpartition(closing)
    before, opened, unfinished = answer.partition(opening)
    if opened:
        return f"{reasoning}{closed}{before}{opened}{unfinished}", ""
    return (reasoning.replace(opening, "", 1).strip(), answer.lstrip()) if closed else ("", text)


def compiled(rule: str) -> "regex.Pattern[str]":
    """Return the pattern of a rule ``regex:PATTERN``. Raises regex.error if it is none."""
    return regex.compile(rule.removeprefix(REGEX), regex.DOTALL | regex.MULTILINE)


def _pattern(rule: str) -> Callable[[str], str | None]:
    """Return the rule of a regular expression: the last match's first group that matched, or the whole match.

    It raises TimeoutError beyond ``PATTERN_S``, and lets other threads run meanwhile.
    """
    pattern = compiled(rule)

    def find(text: str) -> str | None:
        try:
            matches = list(pattern.finditer(text, timeout=PATTERN_S, concurrent=True))
        except TimeoutError:
            raise TimeoutError(f"{rule} did not end within {PATTERN_S:g} s") from None
        if not matches:
            return None
        groups = [group for group in matches[-1].groups() if group is not None]
        return (groups[0] if groups else matches[-1][0]).strip()

    return find


RULES: Mapping[str, Callable[[str], str | None]] = {
    "last_number": last_number,
    "boxed": boxed,
    "answer_tag": answer_tag,
}


def trace(text: str, chain: Extraction) -> list[Found]:
    """Apply a chain to a text; return every step until one finds nothing. Raises TimeoutError for a slow pattern."""
    steps: list[Found] = []
    for step in chain:
        names = (step,) if isinstance(step, str) else step
        steps.append(_first(names, text[-LONGEST:]))
        if (found := steps[-1].text) is None:
            break
        text = found
    return steps


def extract(text: str, chain: Extraction) -> str | None:
    """Return what a chain finds in a text; None if a step finds nothing. An empty chain finds the whole text.

    Raises TimeoutError for a pattern that takes too long; call it beside the event loop.
    """
    return trace(text, chain)[-1].text if chain else text


def _first(names: Sequence[str], text: str) -> Found:
    for name in names:
        rule = _pattern(name) if name.startswith(REGEX) else RULES[name]
        if (found := rule(text)) is not None:
            return Found(name, found)
    return Found(" or ".join(names), None)

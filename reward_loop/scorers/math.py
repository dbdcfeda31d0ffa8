"""The scorer `math`: whether an answer means the same as the ground truth. docs/reference/math.md decides the forms.

Both sides are reduced in the same way to the expression that they state. Lists, sets, tuples and intervals are compared
by their elements; numbers exactly, with units and percent; words as text; everything else by math-verify.
"""

import re
import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from rl_async.errors import DataError
from rl_async.extraction import LONGEST, boxed
from rl_async.reward_loop.api import Conversation

CLOSE = Fraction(1, 10**6)  # relative, between numbers that are not both whole
DEEPEST = 8  # lists within lists
LONGEST_NUMBER = 1000  # characters; Python itself reads no integer of more than 4300 digits
MOST_EXPONENT = 4000  # a number with a larger one would be written out without end

_SPACE = re.compile(r"(?<!\\)\\[,;:! ]|\\quad|~|\s+")
_DROPPED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\(?:bigg?|Bigg?)[lr]?(?![a-zA-Z])")
_CURRENCY = re.compile(r"\\\$|[$€£¥₹]|\\(?:pounds|euro)\b")
_WHOLE = re.compile(r"\$\$?(?P<a>[^$]+)\$?\$|\\\((?P<b>.+?)\\\)|\\\[(?P<c>.+?)\\\]", re.DOTALL)
_ASSIGNED = re.compile(
    r"(?P<name>[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?)\s*(?:=|\\in(?![a-z]))\s*(?P<value>[^=<>]+)", re.DOTALL
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|textrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?:"
    rf"(?P<whole>\d+)?\s*\\frac\{{(?P<over>-?\d+)\}}\{{(?P<under>\d+)\}}"
    rf"|(?:(?P<whole2>\d+)\s+)?(?P<over2>\d+)\s*/\s*(?P<under2>\d+)"
    rf"|(?:(?P<factor>{_DECIMAL})\s*(?:\\times|\\cdot|\*|×|x)\s*)?10\s*\^\s*(?:\{{(?P<power>[-+]?\d+)\}}|(?P<power2>[-+]?\d+))"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?\d+))?)"
    rf"\s*(?P<percent>\\?%|percent\b)?(?P<unit>.*)",
    re.DOTALL,
)
_UNIT = re.compile(
    r"(?:\^?\{?\\circ\}?|°)?[A-Za-zµ°/ .*]*(?:\^?\{?-?[1-4]\}?|[²³])?(?:/[A-Za-z]+(?:\^?\{?-?[1-4]\}?|[²³])?)?"
)
_PAIRS = {"(": ")", "[": "]", "{": "}"}


_NAMES = {
    **dict.fromkeys(("meter", "metre"), "m"),
    **dict.fromkeys(("kilometer", "kilometre"), "km"),
    **dict.fromkeys(("centimeter", "centimetre"), "cm"),
    **dict.fromkeys(("liter", "litre"), "l"),
    **dict(zip(["second", "minute", "hour", "day", "year"], ["s", "min", "h", "d", "y"])),
    **dict(zip(["gram", "kilogram", "inch", "foot", "mile", "pound"], ["g", "kg", "in", "ft", "mi", "lb"])),
}
_UNITS = {
    **dict.fromkeys(("degree", "degrees", "deg"), "°"),
    **dict.fromkeys(("dollar", "dollars", "usd"), ""),
    **{f"{name}{end}": short for name, short in _NAMES.items() for end in ("", "s")},
    "feet": "ft",
    "inches": "in",
}


class Number(NamedTuple):
    """A number as it is written: its value without the percent sign, and the unit, which may be empty."""

    value: Fraction
    percent: bool
    unit: str


def score(conversation: Conversation) -> float:
    """Return 1 if the answer equals the ground truth, else 0. Raises DataError for a ground truth without a meaning.

    math-verify's own timeouts are off: they use the alarm signal, and the service has a deadline.
    """
    truth = conversation.ground_truth
    gold = stated(truth)
    if gold is None:
        gold = _last_in_prose(truth)
    if not gold or not _is_understood(gold):
        place = f"{conversation.data_source or 'data'}, row {conversation.extra_info.get('index', '?')}: ground_truth"
        raise DataError(f"{place} {truth!r:.80} is no expression that the scorer math can read")
    answer = conversation.solution_str[-LONGEST:]
    said = stated(answer)
    if said is None:
        said = _last_in_prose(answer)
    return float(bool(said) and equal(gold, said))


def stated(text: str) -> str | None:
    """Return the expression that a text states: its last box, or itself if it is one; None for prose."""
    found = boxed(text)
    while found is not None and (inner := boxed(found)) is not None:
        found = inner
    if found is not None:
        return found.strip()
    text = text.strip().rstrip(".")
    if whole := _WHOLE.fullmatch(text):
        return next(group for group in whole.groups() if group is not None).strip()
    bare = _TEXT.sub("", text)
    if "\n" in text or re.search(r"(?<!\\)\$|\\\(|\\\[", bare) or len(_PROSE.findall(bare)) > 2:
        return None
    return text


def _last_in_prose(text: str) -> str:
    """Return the last formula of prose, or else its last number; empty if it has neither."""
    formulas = [next(g for g in m.groups() if g is not None) for m in _WHOLE.finditer(text.replace("\\$", ""))]
    if formulas:
        return formulas[-1].strip()
    numbers = re.findall(rf"-?{_DECIMAL}(?:,\d{{3}})*(?:\.\d+)?(?:\s*/\s*\d+|[eE][-+]?\d+)?\s*%?", text)
    return numbers[-1].strip() if numbers else ""


def normal(text: str) -> str:
    """Return an expression with one spelling for spaces, fractions, signs, brackets, currency and separators."""
    text = _CURRENCY.sub("", _DROPPED.sub("", text)).replace("\u2212", "-").replace("\u2013", "-")
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(?:\{\s*([^{}]*?)\s*\}|(\d))\s*(?:\{\s*([^{}]*?)\s*\}|(\d))", _fraction, text)
    text = re.sub(r"(?<![\d,.])(\d{1,3})((?:(?:\{,\}|\\!?,|,\\!|,|\\ )\d{3})+)(?![\d,])", _joined, text)
    return _SPACE.sub(" ", text).strip().rstrip(".").strip()


def _fraction(match: re.Match[str]) -> str:
    over, under = match[1] if match[1] is not None else match[2], match[3] if match[3] is not None else match[4]
    return f"\\frac{{{over}}}{{{under}}}"


def _joined(match: re.Match[str]) -> str:
    return match[1] + re.sub(r"\D", "", match[2])


def as_number(text: str) -> Number | None:
    """Return an expression as a number with percent and unit; None if it is none."""
    if len(text) > LONGEST_NUMBER:
        return None
    plain = _TEXT.sub(r" \1", text)
    match = _NUMBER.fullmatch(plain.strip())
    if match is None:
        return None
    unit = match["unit"].strip()
    if unit and not _UNIT.fullmatch(unit):
        return None
    # One letter is a variable, unless it was set as text.
    if re.fullmatch(r"[A-Za-z](?:\^.*)?", unit) and not _TEXT.search(text):
        return None
    over, under = match["over"] or match["over2"], match["under"] or match["under2"]
    power = match["power"] or match["power2"] or match["exponent"] or "0"
    if (under is not None and int(under) == 0) or len(power) > 6 or abs(int(power)) > MOST_EXPONENT:
        return None
    if over is not None:
        assert under is not None
        value = int(match["whole"] or match["whole2"] or 0) + Fraction(int(over), int(under))
    else:
        value = Fraction(match["factor"] or match["decimal"] or 1) * Fraction(10) ** int(power)
    unit = re.sub(r"\^?\{?\\circ\}?", "°", unit)
    unit = re.sub(r"[\s{}^.]", "", unit).replace("²", "2").replace("³", "3").lower()
    return Number(-value if match["sign"] == "-" else value, bool(match["percent"]), _UNITS.get(unit, unit))


def equal(truth: str, answer: str, depth: int = 0) -> bool:
    """Whether two expressions mean the same."""
    one, other = normal(truth), normal(answer)
    if not one or not other:
        return False
    names = [_ASSIGNED.fullmatch(side) for side in (one, other)]
    if names[0] and names[1] and names[0]["name"] != names[1]["name"]:
        return False
    if names[1]:
        other = names[1]["value"].strip()
        one = names[0]["value"].strip() if names[0] else one
    elif names[0]:
        one = names[0]["value"].strip()
    if _squeezed(one) == _squeezed(other):
        return True
    if depth < DEEPEST:
        lists = [_elements(side) for side in (one, other)]
        if lists[0] is not None or lists[1] is not None:
            return lists[0] is not None and lists[1] is not None and _same_elements(lists[0], lists[1], depth)
    numbers = [as_number(side) for side in (one, other)]
    if numbers[0] is not None and numbers[1] is not None:
        return _same_number(numbers[0], numbers[1])
    if _is_words(one) or _is_words(other):
        return _words(one) == _words(other)
    return _verified(one, other)


def _squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def _same_number(truth: Number, answer: Number) -> bool:
    if truth.unit and answer.unit and truth.unit != answer.unit:
        return False
    one, other = truth.value, answer.value
    if truth.percent != answer.percent and not _close(one, other):
        # One side has the sign: 50% is 0.5.
        one, other = (one / 100, other) if truth.percent else (one, other / 100)
    return _close(one, other)


def _close(one: Fraction, other: Fraction) -> bool:
    if one.denominator == other.denominator == 1:
        return one == other
    return abs(one - other) <= CLOSE * abs(one)


def _is_words(text: str) -> bool:
    """Whether an expression is words: set as text, or of three letters and more in a row without an operator."""
    if re.search(r"[0-9=<>+*/^_{}\\]", _TEXT.sub("", text)):
        return False
    return (
        bool(_TEXT.search(text)) or bool(re.search(r"[A-Za-z]{3}", text)) or bool(re.fullmatch(r"\(?[A-Za-z]\)?", text))
    )


def _words(text: str) -> str:
    plain = _TEXT.sub(r"\1", text)
    return " ".join(re.sub(r"[^\w\s]", " ", plain).casefold().split())


class _List(NamedTuple):
    opening: str
    closing: str
    parts: list[str]


def _elements(text: str) -> _List | None:
    r"""Split a set, tuple, interval, list, or a union of them, whose parts are then its elements; None for others."""
    text = text.replace("\\{", "{").replace("\\}", "}") if text.startswith("\\{") and text.endswith("\\}") else text
    if len(union := _split(text, ("\\cup", "∪"))) > 1:
        return _List("∪", "∪", union)
    if len(parts := _split(re.sub(r"\\text\s*\{\s*(?:and|or)\s*\}|\s(?:and|or)\s", ",", text), (",", ";"))) > 1:
        return _List("", "", parts)
    if len(text) > 2 and text[0] in _PAIRS and text[-1] in ")]}" and (text[0] != "(" or text[-1] != "}"):
        inner = _split(text[1:-1], (",", ";"))
        if len(inner) > 1 or text[0] == "{":
            return _List(text[0], text[-1], inner)
    return None


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """Split at marks outside all brackets."""
    depth, start, parts, at = 0, 0, list[str](), 0
    while at < len(text):
        mark = next((m for m in marks if text.startswith(m, at)), None) if depth == 0 else None
        if mark:
            parts.append(text[start:at].strip())
            start = at = at + len(mark)
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
    return [part for part in (*parts, text[start:].strip()) if part]


def _same_elements(truth: _List, answer: _List, depth: int) -> bool:
    kinds = [(side.opening, side.closing) for side in (truth, answer)]
    if len(truth.parts) != len(answer.parts) or (kinds[0] != kinds[1] and ("", "") not in kinds):
        return False
    if not {"{", "∪"} & {truth.opening, answer.opening} and kinds != [("", ""), ("", "")]:
        return all(equal(a, b, depth + 1) for a, b in zip(truth.parts, answer.parts))
    left = list(answer.parts)
    for part in truth.parts:
        found = next((n for n, other in enumerate(left) if equal(part, other, depth + 1)), None)
        if found is None:
            return False
        del left[found]
    return True


def _parsed(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    with warnings.catch_warnings(action="ignore"):
        found = parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return list(found)


def _verified(truth: str, answer: str) -> bool:
    from math_verify import verify

    gold, said = _parsed(truth), _parsed(answer)
    return bool(gold and said) and bool(verify(gold, said, timeout_seconds=None))


def _is_understood(truth: str) -> bool:
    """Whether a ground truth has a meaning here: a list, a number, words, or what math-verify parses."""
    text = normal(truth)
    if not text:
        return False
    if _elements(text) is not None or as_number(text) is not None or _is_words(text):
        return True
    return bool(_parsed(text))

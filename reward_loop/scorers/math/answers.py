"""The kinds of answers, and when two answers mean the same. Answers of different kinds differ, but for few pairs."""

from collections.abc import Sequence
from typing import NamedTuple

from rl_async.reward_loop.scorers.math.expressions import Value, proportional, same_value
from rl_async.reward_loop.scorers.math.units import Unit


class Quantity(NamedTuple):
    """An expression with a percent sign and a unit, which may be empty.

    ``product`` is set if the unit is one letter that may as well be a factor, as in 5 m: the expression with it.
    """

    value: Value
    percent: bool = False
    unit: Unit = ()
    product: Value | None = None


class Words(NamedTuple):
    """Words, or a single letter; ``product`` is set if they may be an expression, as x or pi."""

    text: str
    product: Value | None = None


class Choice(NamedTuple):
    """The letter of a choice with the text of the choice."""

    letter: str
    text: str


class Many(NamedTuple):
    """Parts between two brackets; ``kind`` is the brackets, empty for a bare list, or an operator between the parts."""

    kind: str
    parts: tuple["Form", ...]


class Named(NamedTuple):
    """A value, or an interval, with the name that it has in an equation, inequality or membership.

    ``difference`` is set for a curve such as y = 2x + 1: its sides subtracted.
    """

    name: str
    value: "Form"
    difference: Value | None = None


class Relation(NamedTuple):
    """An equation, or a chain of inequalities, that gives no name a value: its sides subtracted, pair by pair."""

    signs: tuple[str, ...]
    differences: tuple[Value, ...]


Form = Quantity | Words | Choice | Many | Named | Relation

UNORDERED = ("", "{}", "∪", "∩")
# An interval that cannot be a pair, from an inequality or a membership.
OPEN = "open"


def equal(truth: Sequence[Form], answer: Sequence[Form]) -> bool:
    """Whether two answers mean the same, both with or both without thousands separators."""
    return any(same(one, other) for one, other in ((truth[0], answer[0]), (truth[-1], answer[-1])))


def same(truth: Form, answer: Form) -> bool:
    """Whether two answers mean the same."""
    if isinstance(truth, Named) or isinstance(answer, Named):
        return _same_named(truth, answer)
    if isinstance(truth, Choice) or isinstance(answer, Choice):
        return _same_choice(_as_choice(truth), _as_choice(answer))
    if isinstance(truth, Words) and isinstance(answer, Many):
        return _same_letters(truth, answer)
    if isinstance(answer, Words) and isinstance(truth, Many):
        return _same_letters(answer, truth)
    if isinstance(truth, Many) or isinstance(answer, Many):
        return _same_parts(_as_many(truth), _as_many(answer))
    if isinstance(truth, Relation) or isinstance(answer, Relation):
        return isinstance(truth, Relation) and isinstance(answer, Relation) and _same_relation(truth, answer)
    one, other = _as_quantity(truth), _as_quantity(answer)
    if isinstance(truth, Words) and isinstance(answer, Words):
        if truth.text == answer.text:
            return True
        # Two words are not compared as products of letters: "was" is not "saw".
        if one is None or one.value.variables:
            return False
    return one is not None and other is not None and _same_quantity(one, other)


def _same_named(truth: Form, answer: Form) -> bool:
    if isinstance(truth, Relation) and isinstance(answer, Named):
        # The equation of a curve, solved for a variable.
        difference = answer.difference
        return difference is not None and _same_relation(truth, Relation(("=",), (difference,)))
    one, other = _by_name(truth), _by_name(answer)
    if one is not None and other is not None:
        return _same_parts(one, other)
    names = [side.name for side in (truth, answer) if isinstance(side, Named)]
    values = [side.value if isinstance(side, Named) else side for side in (truth, answer)]
    return len(set(names)) == 1 and not _has_names(values) and same(values[0], values[1])


def _by_name(form: Form) -> Many | None:
    """Return values with several names, as x = 1, y = 2 or (x, y) = (1, 2), as a list of them; None for others."""
    if isinstance(form, Many):
        return form if _has_names(form.parts) else None
    if not isinstance(form, Named) or not isinstance(form.value, Many) or not form.name.startswith("("):
        return None
    names = form.name[1:-1].split(",")
    if form.value.kind != "()" or len(names) != len(form.value.parts):
        return None
    return Many("", tuple(map(Named, names, form.value.parts)))


def _has_names(forms: Sequence[Form]) -> bool:
    return any(isinstance(form, Named) or (isinstance(form, Many) and _has_names(form.parts)) for form in forms)


def _same_relation(truth: Relation, answer: Relation) -> bool:
    ordered = "=" not in truth.signs and "≠" not in truth.signs
    return truth.signs == answer.signs and all(
        proportional(one, other, positive=ordered)
        for one, other in zip(truth.differences, answer.differences, strict=True)
    )


def _as_choice(form: Form) -> Choice | None:
    if isinstance(form, Words) and len(form.text) == 1:
        return Choice(form.text.upper(), "")
    return form if isinstance(form, Choice) else None


def _same_choice(truth: Choice | None, answer: Choice | None) -> bool:
    if truth is None or answer is None or truth.letter != answer.letter:
        return False
    return truth.text == answer.text or not (truth.text and answer.text)


def _same_letters(word: Words, letters: Many) -> bool:
    """Whether several choices are the same, written together or as a list; a word equals a list of itself alone."""
    parts = [part.text for part in letters.parts if isinstance(part, Words)]
    if len(parts) == len(letters.parts) > 1:
        return letters.kind == "" and max(map(len, parts)) == 1 and "".join(parts) == word.text
    return _same_parts(_as_many(word), letters)


def _as_quantity(form: Form) -> Quantity | None:
    if isinstance(form, Words):
        return Quantity(form.product) if form.product is not None else None
    return form if isinstance(form, Quantity) else None


def _as_many(form: Form) -> Many:
    return form if isinstance(form, Many) else Many("", (form,))


def _same_quantity(truth: Quantity, answer: Quantity) -> bool:
    if (truth.percent and answer.unit) or (answer.percent and truth.unit):
        return False
    if truth.unit and answer.unit:
        if truth.unit != answer.unit:
            return False
    elif truth.product is not None or answer.product is not None:
        return same_value(truth.product or truth.value, answer.product or answer.value)
    elif any(name.startswith("base") for name, _ in (*truth.unit, *answer.unit)):
        return False
    if same_value(truth.value, answer.value):
        return True
    if truth.percent == answer.percent or truth.value.variables or answer.value.variables:
        return False
    # One side has the sign: 50% is 0.5.
    hundredth = [_hundredth(side.value) if side.percent else side.value for side in (truth, answer)]
    return same_value(hundredth[0], hundredth[1])


def _hundredth(value: Value) -> Value:
    return value._replace(points=tuple(point / 100 for point in value.points))


def _same_parts(truth: Many, answer: Many) -> bool:
    kinds = {truth.kind, answer.kind}
    if kinds == {"()", OPEN}:
        kinds = {OPEN}
    if len(kinds) == 2 and ("" not in kinds or not kinds & {"{}", "()", "[]"}):
        return False
    if kinds == {"", "[]"} and len(truth.parts) == 2:
        # An interval is not its two ends.
        return False
    one, other = list(truth.parts), list(answer.parts)
    if kinds == {"{}"}:
        one, other = _distinct(one), _distinct(other)
    if len(one) != len(other):
        return False
    names = [[part.name for part in parts if isinstance(part, Named)] for parts in (one, other)]
    if kinds <= set(UNORDERED) and bool(names[0]) == bool(names[1]):
        return _same_in_any_order(one, other)
    # x = 1, y = 2 gives bare values their order; so do brackets.
    return all(map(same, one, other))


def _distinct(parts: Sequence[Form]) -> list[Form]:
    found = list[Form]()
    for part in parts:
        if not any(same(part, other) for other in found):
            found.append(part)
    return found


def _same_in_any_order(one: Sequence[Form], other: Sequence[Form]) -> bool:
    left = list(other)
    for part in one:
        at = next((n for n, candidate in enumerate(left) if same(part, candidate)), None)
        if at is None:
            return False
        del left[at]
    return True

"""Reads the kind of answer that tokens are: from lists, over relations and brackets, down to a quantity or words."""

import re
from collections.abc import Container, Sequence
from fractions import Fraction
from itertools import pairwise

from rl_async.reward_loop.scorers.math.answers import OPEN, Choice, Form, Many, Named, Quantity, Relation, Words, same
from rl_async.reward_loop.scorers.math.expressions import (
    CLOSING,
    GREEK,
    OPENING,
    Token,
    Value,
    constant,
    evaluate,
    is_function,
    tokens,
)
from rl_async.reward_loop.scorers.math.spelling import date, joined, plain, squeezed
from rl_async.reward_loop.scorers.math.units import CURRENCIES, MULTIPLIERS, Unit, may_be_product, read_unit
from rl_async.reward_loop.scorers.math.values import Unreadable, multiply

LONGEST = 1000
MOST_PARTS = 100
MOST_WORDS = 8
DEEPEST = 8

_INTERVALS = ("()", "[]", "(]", "[)")
_SEPARATORS = (",", ";", "and", "or")
_NEAR = ("\\approx", "\\simeq")
_UNEQUAL = ("\\ne", "\\neq", "!=")
_LESS = {"<": "<", "\\lt": "<", "<=": "≤", "\\le": "≤", "\\leq": "≤", "\\leqslant": "≤"}
_MORE = {">": "<", "\\gt": "<", ">=": "≤", "\\ge": "≤", "\\geq": "≤", "\\geqslant": "≤"}
_RELATIONS = ("=", "\\in", *_NEAR, *_UNEQUAL, *_LESS, *_MORE)
_OPERATIONS = {"\\cup": "∪", "\\cap": "∩", "\\setminus": "∖", "\\backslash": "∖"}
_HIGHEST = Quantity(evaluate(tokens("\\infty")))
_LOWEST = Quantity(evaluate(tokens("-\\infty")))
_CHOICE = re.compile(
    r"(?:\(([A-J])\)\s*[.:]?\s*|([A-J])\)\s*|([A-J])[.:]\s+)(?![-+*/^=<>_(!,|&\s]|\\(?:cup|cap|cdot|times|in|le|ge))(.+)",
    re.DOTALL,
)
# Behind the letter of a choice: further choices.
_NO_CHOICE = re.compile(r"^(?:\\text\{)?(?:or|and)\b|\b[A-J][).:]|^[A-J](?:\W+[A-J])*$")


def read(text: str) -> list[Form]:
    """Return what an answer says; it has two readings if commas may separate thousands or parts. Raises Unreadable."""
    if len(text) > LONGEST or len(text := plain(text)) > LONGEST:
        raise Unreadable(f"has more than {LONGEST} characters")
    if not text:
        raise Unreadable("is empty")
    if (day := date(text)) is not None:
        return [Words(day)]
    if re.fullmatch(r"[A-J]\)", text):
        return [Words(text[0].casefold())]
    if (choice := _CHOICE.fullmatch(text)) and not _NO_CHOICE.search(choice[4]):
        return [Choice(choice[1] or choice[2] or choice[3], squeezed(choice[4]))]
    text = re.sub(r"(?<=[A-Za-z])\.(?=\s|\})", "", text)
    forms = list[Form]()
    for spelling in dict.fromkeys((joined(text), text)):
        try:
            forms.append(_form(tokens(spelling)))
        except Unreadable:
            if spelling == text and not forms:
                raise
    return forms


def _form(part: Sequence[Token], depth: int = 0) -> Form:
    """Return what the tokens of one answer, or of one part of it, say."""
    if not part:
        raise Unreadable("has an empty part")
    if depth > DEEPEST:
        raise Unreadable("is nested too deeply")
    if (listed := _list(part, depth)) is not None:
        return listed
    sides, signs = _split(part, _RELATIONS)
    if signs:
        return _relation(signs, sides, depth)
    operands, marks = _split(part, _OPERATIONS)
    if marks:
        return _operation({_OPERATIONS[mark] for mark in marks}, [_form(operand, depth + 1) for operand in operands])
    if [token.kind for token in part] in (["\\emptyset"], ["\\varnothing"], ["\\{", "\\}"]):
        return Many("{}", ())
    if [token.kind for token in part] == ["\\bbR"]:
        return Many("()", (_LOWEST, _HIGHEST))
    if part[-1].kind.startswith("\\end"):
        return _matrix(part, depth)
    if (bracketed := _bracketed(part, depth)) is not None:
        return bracketed
    parts, colons = _split(part, (":",))
    if colons:
        return Many(":", tuple(_form(piece, depth + 1) for piece in parts))
    if any(token.kind in ("\\pm", "\\mp") for token in part):
        if sum(token.kind in ("\\pm", "\\mp") for token in part) > 1:
            raise Unreadable("has several signs of plus or minus")
        return Many("", (Quantity(evaluate(part)), Quantity(evaluate(part, -1))))
    return _words(part) or _quantity(part)


def _outside(part: Sequence[Token]) -> list[Token]:
    """Return the tokens outside all brackets."""
    depth, found = 0, list[Token]()
    for token in part:
        depth -= token.kind in CLOSING or token.kind.startswith("\\end")
        if depth == 0:
            found.append(token)
        depth += token.kind in OPENING or token.kind.startswith("\\begin")
        if depth < 0:
            raise Unreadable("has a bracket that is not opened")
    if depth:
        raise Unreadable("has a bracket that is not closed")
    return found


def _split(part: Sequence[Token], kinds: Container[str]) -> tuple[list[list[Token]], list[str]]:
    """Split tokens at those of some kinds outside all brackets; return the parts and the kinds between them."""
    marks = [token for token in _outside(part) if token.kind in kinds]
    found: list[list[Token]] = [[]]
    left = iter(marks)
    mark = next(left, None)
    for token in part:
        if token is mark:
            found.append([])
            mark = next(left, None)
        else:
            found[-1].append(token)
    return found, [mark.kind for mark in marks]


def _list(part: Sequence[Token], depth: int) -> Form | None:
    """Return a bare list; None if the tokens are none."""
    parts, marks = _split(part, _SEPARATORS)
    if not marks:
        return None
    # A comma before a conjunction belongs to it.
    parts = [piece for n, piece in enumerate(parts) if piece or marks[n - 1 : n + 1] not in ([",", "and"], [",", "or"])]
    forms = _forms(parts, depth)
    names = {form.name if isinstance(form, Named) and not form.difference else "" for form in forms[:1]}
    names |= {form.name for form in forms if isinstance(form, Named)}
    if len(names) != 1 or names == {""}:
        return Many("", _flat(forms))
    # One name for all values: x = 1 or x = 2; x = 1, 2.
    values = [form.value if isinstance(form, Named) else form for form in forms]
    ranges = all(isinstance(value, Many) and value.kind in (OPEN, *_INTERVALS) for value in values)
    return Named(names.pop(), Many("∪" if ranges and "or" in marks else "", _flat(values)))


def _forms(parts: Sequence[Sequence[Token]], depth: int) -> list[Form]:
    if len(parts) > MOST_PARTS:
        raise Unreadable(f"has more than {MOST_PARTS} parts")
    if any(len(part) == 1 and re.match("0[0-9]", part[0].text) for part in parts):
        raise Unreadable("has a part that begins with a zero")
    return [_form(piece, depth + 1) for piece in parts]


def _flat(forms: Sequence[Form]) -> tuple[Form, ...]:
    """Return the parts of a bare list, with those of a bare list within it, as of a plus or minus."""
    return tuple(
        inner for form in forms for inner in (form.parts if isinstance(form, Many) and form.kind == "" else (form,))
    )


def _operation(kinds: set[str], operands: Sequence[Form]) -> Form:
    if len(kinds) > 1:
        raise Unreadable("has several set operations without brackets")
    if kinds == {"∪"} and all(isinstance(form, Many) and form.kind == "{}" for form in operands):
        return Many("{}", tuple(inner for form in operands if isinstance(form, Many) for inner in form.parts))
    return Many(kinds.pop(), tuple(operands))


def _bracketed(part: Sequence[Token], depth: int) -> Form | None:
    """Return a set, tuple or interval, or what a pair of brackets around everything holds; None for others."""
    opening, closing = part[0].kind, part[-1].kind
    if opening not in ("(", "[", "{", "\\{", "\\langle") or closing not in CLOSING or len(_outside(part)) > 2:
        return None
    pieces, _ = _split(part[1:-1], (",", ";"))
    kind = {"\\{": "{", "\\langle": "("}.get(opening, opening) + {"\\}": "}", "\\rangle": ")"}.get(closing, closing)
    if kind not in (*_INTERVALS, "{}"):
        raise Unreadable("has brackets of different kinds")
    if len(pieces) == 1 and opening != "\\{":
        if kind not in ("()", "[]", "{}"):
            raise Unreadable("has an interval without two ends")
        return _form(part[1:-1], depth + 1)
    if len(pieces) != 2 and kind in ("(]", "[)"):
        raise Unreadable("has an interval without two ends")
    forms = _forms(pieces, depth)
    return Many(kind, _flat(forms) if kind == "{}" else tuple(forms))


def _matrix(part: Sequence[Token], depth: int) -> Form:
    """Return a matrix, multiplied by a factor before it."""
    start = next(n for n, token in enumerate(part) if token.kind.startswith("\\begin"))
    if (
        part[start].kind[6:] != part[-1].kind[4:]
        or "vmatrix" in part[-1].kind.lower()
        or len(_outside(part[start:])) != 2
    ):
        raise Unreadable("has a matrix that is not understood")
    factor = list(part[:start])
    if factor and factor[-1].kind in ("\\cdot", "\\times", "*"):
        factor.pop()
    if factor and factor[-1].kind == "-":
        factor.append(Token("number", "1"))
    rows, _ = _split(part[start + 1 : -1], ("\\\\",))
    cells = [_split(row, ("&",))[0] for row in rows if row]
    if len({len(row) for row in cells}) != 1 or len(cells) * len(cells[0]) > MOST_PARTS:
        raise Unreadable("has a matrix that is not understood")
    if factor:
        wrap = [Token("(", "("), *factor, Token(")", ")"), Token("*", "*"), Token("(", "(")]
        cells = [[[*wrap, *cell, Token(")", ")")] for cell in row] for row in cells]
    return Many("matrix", tuple(Many("row", tuple(_forms(row, depth))) for row in cells))


def _relation(signs: list[str], sides: list[list[Token]], depth: int) -> Form:
    """Return a value with its name, an interval with its name, or a relation between expressions."""
    if not sides[0] and signs[0] in _NEAR and all(sides[1:]):
        return _form(sides[1], depth + 1) if len(sides) == 2 else _relation(signs[1:], sides[1:], depth)
    if not all(sides):
        raise Unreadable("lacks one side of a relation")
    if any(sign in _NEAR for sign in signs):
        # What follows is an approximation of what stands before, or the only value of a name.
        at = next(n for n, sign in enumerate(signs) if sign in _NEAR)
        cut = at + 1 if at or _name(sides[0]) is None else at + 2
        sides = sides[:cut]
        return _form(sides[0], depth + 1) if len(sides) == 1 else _equation(sides, depth)
    if set(signs) == {"="}:
        return _equation(sides, depth)
    if signs == ["\\in"]:
        if (name := _name(sides[0])) is None:
            raise Unreadable("has a membership of what is no name")
        return Named(name, _interval(_form(sides[1], depth + 1)))
    if len(signs) == 1 and signs[0] in _UNEQUAL:
        return Relation(("≠",), _differences(sides))
    if set(signs) <= set(_MORE):
        signs, sides = [_MORE[sign] for sign in reversed(signs)], sides[::-1]
    elif set(signs) <= set(_LESS):
        signs = [_LESS[sign] for sign in signs]
    else:
        raise Unreadable("has signs of relation that do not make a chain")
    return _range(signs, sides) or Relation(tuple(signs), _differences(sides))


def _differences(sides: Sequence[Sequence[Token]]) -> tuple[Value, ...]:
    found = tuple(_difference(one, other) for one, other in pairwise(sides))
    if not all(difference.variables for difference in found):
        raise Unreadable("compares numbers with numbers")
    return found


def _difference(one: Sequence[Token], other: Sequence[Token]) -> Value:
    minus = [Token(")", ")"), Token("-", "-"), Token("(", "(")]
    return evaluate([Token("(", "("), *other, *minus, *one, Token(")", ")")])


def _range(signs: Sequence[str], sides: Sequence[Sequence[Token]]) -> Named | None:
    """Return an inequality of a name and numbers as the interval that it is; None for others."""
    names = [_name(side) for side in sides]
    at = next((n for n, name in enumerate(names) if name is not None), None)
    if at is None or len(sides) > 3 or (len(sides) == 3 and at != 1):
        return None
    bounds = [evaluate(side) for n, side in enumerate(sides) if n != at]
    if any(bound.variables for bound in bounds):
        return None
    ends = [Quantity(bound) for bound in bounds]
    low, high = ends if len(ends) == 2 else (_LOWEST, ends[0]) if at == 0 else (ends[0], _HIGHEST)
    left = "[" if at > 0 and signs[at - 1] == "≤" else "("
    right = "]" if at < len(signs) and signs[at] == "≤" else ")"
    return Named(str(names[at]), _interval(Many(left + right, (low, high))))


def _interval(form: Form) -> Form:
    """Return what may be a pair as an open interval."""
    return Many(OPEN, form.parts) if isinstance(form, Many) and form.kind == "()" and len(form.parts) == 2 else form


# x, x_1, f(x), f^{-1}(x), P(A), AB, |AB|, \overline{AB}, \angle A, (x, y), a Greek letter, words.
_NAME = re.compile(
    r"(?:m?\\angle|\\triangle)?(?:[A-Z]{3}|[A-Za-z]'*(?:_(?:\w|\{[\w,+-]+\}))?(?:\^(?:-1|\{-1\}))?(?:\(-?[A-Za-z0-9,]+\))?)"
    r"|\|[A-Z]\||\|?[A-Z]{2,3}\|?|\\overline\{[A-Z]{2}\}|[A-Za-z ]{3,}|\([A-Za-z](?:,[A-Za-z])+\)"
    rf"|{GREEK.pattern}(?:_(?:\w|\{{\w+\}}))?"
)


def _name(side: Sequence[Token]) -> str | None:
    """Return the name on one side of an equation, in one spelling; None if it is an expression."""
    words = all(token.kind in ("word", "text") for token in side)
    text = (" " if words else "").join(token.text for token in side)
    if len(text) > 40 or not _NAME.fullmatch(text) or text in ("e", "i"):
        return None
    return re.sub(r"[{}|]", "", text)


def _equation(sides: list[list[Token]], depth: int) -> Form:
    """Return a value with its name, the value of equal numbers, or an equation."""
    if _name(sides[0]) is None and _name(sides[-1]) is not None:
        sides = sides[::-1]
    names = list[str]()
    while len(sides) > 1 and (name := _name(sides[0])) is not None:
        names.append(name)
        sides = sides[1:]
    forms = [_form(side, depth + 1) for side in sides] if names or len(sides) > 2 or not _has_variables(sides) else []
    if not forms:
        return Relation(("=",), _differences(sides))
    if not all(same(forms[0], form) for form in forms[1:]):
        raise Unreadable("has an equation that does not hold")
    value = forms[-1]
    if not names:
        return value
    curve = isinstance(value, Quantity) and len(sides) == len(names) == len(names[0]) == 1 and value.value.variables
    if not curve:
        return Named("=".join(names), value)
    if names[0] in curve:
        return Relation(("=",), _differences([[Token("word", names[0])], sides[0]]))
    return Named(names[0], value, _difference([Token("word", names[0])], sides[0]))


def _has_variables(sides: Sequence[Sequence[Token]]) -> bool:
    """Whether one side is an expression of variables; sides that are no expressions have none."""
    try:
        return any(evaluate(side).variables for side in sides)
    except Unreadable:
        return False


def _words(part: Sequence[Token]) -> Words | None:
    """Return words, or a letter, that may be an expression as well; None if there is anything else."""
    if not all(token.kind in ("word", "text") for token in part):
        return None
    if len(part) > MOST_WORDS:
        raise Unreadable("is prose")
    try:
        product = evaluate(part)
    except Unreadable:
        product = None
    if product is not None and len(part) > 1 and all(len(token.text) == 1 for token in part):
        return None
    return Words(" ".join(" ".join(token.text.casefold().split()) for token in part), product)


def _quantity(part: Sequence[Token]) -> Quantity:
    """Return an expression with its currency, percent sign, unit and words such as million."""
    body, currency, tail = list(part), Unit(), list[Token]()
    at = 1 if body[0].kind in ("-", "+") else 0
    if len(body) > at and body[at].kind in CURRENCIES:
        currency = CURRENCIES[body.pop(at).kind]
    elif body[-1].kind in CURRENCIES:
        currency = CURRENCIES[body.pop().kind]
    if (angle := _degrees(body)) is not None:
        return angle
    percent = bool(body) and body[-1].kind == "%"
    if percent:
        body.pop()
    elif start := next((n for n in range(1, len(body)) if _may_be_unit(body[:n], body[n:])), 0):
        body, tail = body[:start], body[start:]
    unit = read_unit(tail) or currency
    if currency and unit != currency:
        raise Unreadable("has two units")
    factor = Fraction(1)
    while len(body) > 1 and body[-1].text.casefold() in MULTIPLIERS:
        factor *= MULTIPLIERS[body.pop().text.casefold()]
    if (based := _based(body)) is not None:
        return based
    value = evaluate(body)
    value = value._replace(points=tuple(multiply(point, factor) for point in value.points))
    product = evaluate([*body, *tail]) if tail and not currency and may_be_product(tail) else None
    return Quantity(value, percent, unit, product)


def _may_be_unit(number: Sequence[Token], tail: Sequence[Token]) -> bool:
    """Whether a unit follows a number. An angle in a function is its argument; variables are followed by texts only."""
    last = number[-1]
    if not read_unit(tail):
        return False
    if tail[0].kind == "\\degree":
        return not any(map(is_function, number))
    if last.kind in ("number", "!", "\\pi", *CLOSING) or last.text.casefold() in MULTIPLIERS:
        return True
    return tail[0].kind == "text" and (last.kind == "word" or bool(GREEK.fullmatch(last.kind)))


def _based(body: Sequence[Token]) -> Quantity | None:
    """Return a whole number that is written in a base, as 101_2; the base takes the place of a unit."""
    match = re.fullmatch(r"([0-9A-F]+)_\{?([0-9]{1,2})\}?", "".join(token.text for token in body))
    if match is None or body[0].kind not in ("number", "word"):
        return None
    base = int(match[2])
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in match[1]):
        raise Unreadable("has a digit that its base does not have")
    return Quantity(constant(Fraction(int(match[1], base))), unit=((f"base {base}", 1),))


def _degrees(body: Sequence[Token]) -> Quantity | None:
    """Return an angle in degrees and minutes."""
    match = re.fullmatch(r"([0-9]+)\\degree([0-9]+)'(?:([0-9]+)'')?", "".join(token.text for token in body))
    if match is None:
        return None
    value = Fraction(int(match[1])) + Fraction(int(match[2]), 60) + Fraction(int(match[3] or 0), 3600)
    return Quantity(constant(value), unit=read_unit(tokens("\\degree")) or ())

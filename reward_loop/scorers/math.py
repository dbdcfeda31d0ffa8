"""The scorer `math`: whether an answer means the same as the ground truth; docs/reference/math.md decides the forms.

``score`` finds what both texts state. An answer is brought into one spelling, split into tokens, read by kind (from
lists, over relations and brackets, down to a quantity or words) and compared by kind. To add a unit, add it to the
table of units: a closed table, with plural nouns for counted things; none is converted.
"""

import re
import unicodedata
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain, pairwise
from typing import NamedTuple

from rl_async.errors import DataError
from rl_async.extraction import LONGEST as LONGEST_ANSWER
from rl_async.extraction import answer_tag, boxed
from rl_async.reward_loop.api import Conversation
from rl_async.reward_loop.scorers.math_expressions import (
    CLOSING,
    FUNCTIONS,
    GREEK,
    OPENING,
    Token,
    Unreadable,
    Value,
    constant,
    evaluate,
    is_function,
    multiply,
    proportional,
    same_value,
    tokens,
)

# Names with their powers, in the order of their names; empty for a bare number.
Unit = tuple[tuple[str, int], ...]

# The first word of each group is the name that the others mean as well; words of four letters and more have a plural.
_TABLE = """
m meter metre; km kilometer kilometre; cm centimeter centimetre; mm millimeter millimetre
in inch inches; ft foot feet; yd yard; mi mile; acre; hectare; rad radian; deg degree; unit
L l liter litre; mL ml milliliter millilitre; gal gallon; quart; pint; cup cups; tablespoon tbsp; teaspoon tsp
g gram gm; kg kilogram; mg milligram; t ton tons tonne; oz ounce; pound lb lbs; mol mole
s sec secs second; min mins minute; h hr hrs hour; d day days; week; month; y yr yrs year; am; pm; time
N newton; J joule; kJ; W watt; kW kilowatt; kWh; V volt; A ampere amp; K kelvin; C celsius; F fahrenheit
Pa pascal; kPa; MPa; atm atmosphere; bar; Hz hertz; kHz; MHz; GHz; ohm; T tesla; eV; keV; MeV; GeV; kN; MJ; MW; cal
nm nanometer nanometre; mA; mV; kV; dB decibel; kcal; rpm; pH
dollar usd; euro eur; cent; yen; yuan; rupee; penny pennies pence
way ways; page; point; piece; person people; child children; man men; woman women; mouse mice; fish; sheep; deer
"""
_NAMES: Mapping[str, str] = {
    spelling: words[0]
    for words in (group.split() for group in re.split(r"[;\n]", _TABLE.strip()))
    for word in words
    for spelling in ((word, f"{word}s") if len(word) > 3 else (word,))
}
_RATES: Mapping[str, Unit] = {
    "mph": (("h", -1), ("mi", 1)),
    "kph": (("h", -1), ("km", 1)),
    "kmh": (("h", -1), ("km", 1)),
}
CURRENCIES: Mapping[str, Unit] = {
    "$": (("dollar", 1),),
    "€": (("euro", 1),),
    "£": (("pound", 1),),
    "¥": (("yen", 1),),
    "₹": (("rupee", 1),),
}
MULTIPLIERS = {
    "hundred": Fraction(10**2),
    "thousand": Fraction(10**3),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
    "dozen": Fraction(12),
}
# Words behind a number that make another number of it, or say something about it: no units, though some end with an s.
_CHANGES = re.compile(
    r"plus|minus|over|divided|multiplied|modulo?|squared?|squares|cubed?|cubes|roots?|factorials?|radicals|equals|divides"
    r"|tens|ones|(?:hundred|thousand|million|billion|trillion|dozen|score|pair|couple|percent)s|halves|quarters"
    r"|thirds?|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|hundred|thousand|million)ths?"
    r"|and|or|to|more|less|this|thus|unless|always|perhaps"
)


def changes_number(word: str) -> bool:
    """Whether a word behind a number makes another number of it."""
    return bool(_CHANGES.fullmatch(word))


def may_be_product(tail: Sequence[Token]) -> bool:
    """Whether a unit may as well be variables: a letter that is not marked as text, or a weight m g."""
    return tail[0].kind == "word" and (len(tail[0].text) == 1 or tail[0].text in ("mg", "ml"))


def read_unit(tail: Sequence[Token]) -> Unit | None:
    r"""Return the unit that tokens name, as m/s^2, \text{square feet} or degrees; None if they name none."""
    if not tail:
        return None
    if tail[0].kind == "\\degree":
        scale = "".join(token.text for token in tail[1:]).strip()
        return (("deg", 1),) if not scale else ((scale, 1),) if scale in ("C", "F") else None
    if tail[0].kind not in ("word", "text"):
        return None
    powers = dict[str, int]()
    sign, power = 1, 1
    text = " ".join(token.text for token in tail)
    pieces = re.findall(r"\^ (?:\{ -? ?[0-9] \}|-? ?[0-9])(?![0-9])|\\cdot|[A-Za-z]+|\S", text)
    last = ""
    for piece in pieces:
        if piece in ("/", "per"):
            if not last:
                return None
            sign = -1
        elif piece in ("square", "sq", "cubic", "cu"):
            power = 2 if piece.startswith("sq") else 3
        elif piece in ("\\cdot", "*"):
            continue
        elif piece[0] == "^":
            if not last or piece == "^":
                return None
            powers[last] *= int(re.sub(r"[^-0-9]", "", piece))
        elif piece in _RATES and len(pieces) == 1:
            return _RATES[piece]
        elif (name := _named(piece, alone=len(pieces) == 1)) is not None and name not in powers:
            powers[name] = sign * power
            last, sign, power = name, 1, 1
        else:
            return None
    return tuple(sorted(powers.items())) if last and (sign, power) == (1, 1) else None


def _named(word: str, *, alone: bool) -> str | None:
    """Return the name of a unit, or of a counted thing if it stands alone."""
    if (name := _NAMES.get(word)) is not None or (len(word) > 1 and (name := _NAMES.get(word.lower())) is not None):
        return name
    lower = word.lower()
    plural = alone and len(word) > 3 and re.fullmatch(r"[a-z]+[^s]s", lower)
    return lower[:-1] if plural and not changes_number(lower) else None


def is_unit_word(word: str) -> bool:
    """Whether a word of prose is a unit, a multiplier, or the percent sign in words; letters and "in" are not."""
    return word == "percent" or word in MULTIPLIERS or (len(word) > 1 and word in _NAMES and word != "in")


_SYMBOLS = {
    "×": "\\times", "·": "\\cdot", "⋅": "\\cdot", "∙": "\\cdot", "÷": "\\div", "≤": "\\le", "≥": "\\ge", "≠": "\\ne",
    "≈": "\\approx", "±": "\\pm", "∓": "\\mp", "∪": "\\cup", "∩": "\\cap", "∖": "\\setminus", "∈": "\\in",
    "∞": "\\infty", "√": "sqrt", "∅": "\\emptyset", "°": "\\degree", "ℝ": "\\bbR", "¢": "cents",
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "μ": "mu",
    "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "ω": "omega", "Δ": "Delta", "Ω": "Omega",
}  # fmt: skip
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\u2010\u2011", "-"),
        **dict.fromkeys("’′", "'"),
        "\u2044": "/",
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
        **{character: f" {spelling} " for character, spelling in _SYMBOLS.items()},
        **{character: f"\\{name} " for character, name in _GREEK.items()},
        **{
            character: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", character).split("\u2044"))
            for character in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
        },
    }
)
_TEXT = (
    r"\\(?P<command>text(?:bf|it|rm|sf|tt)?|mbox|math(?:rm|bf|it|sf|cal)|boldsymbol|bm|operatorname\*?)"
    r"\s*\{(?P<inner>[^{}]*)\}"
)
_WORDS = re.compile(r"[^\W\d_]+(?:[ /-]+[^\W\d_]+)*")


def _superscript(match: re.Match[str]) -> str:
    return f"^{{{unicodedata.normalize('NFKC', match[0]).replace(chr(0x2212), '-')}}}"


def _subscript(match: re.Match[str]) -> str:
    return f"_{{{unicodedata.normalize('NFKC', match[0])}}}"


def _text(match: re.Match[str]) -> str:
    """Return the content of a text; words stay marked as a text, but for a letter in a typeface of variables."""
    command, inner = match["command"], match["inner"]
    # The period behind an abbreviation, not behind the letter of a choice.
    inner = re.sub(r"(?<!\b[A-J])(?<=[A-Za-z])\.(?=[ )]|$)", "", re.sub(r"~|\\[,;: ]", " ", inner)).strip()
    if command.startswith("operatorname") and inner.isalpha():
        return f"\\{inner} "
    variable = len(inner) == 1 and command in ("mathbf", "mathit", "mathcal", "boldsymbol", "bm")
    # Words that are joined make a list, as they do outside a text.
    marked = _WORDS.fullmatch(inner) and not variable and not re.search(r" (?:and|or) ", inner)
    return f"\\text{{{inner}}}" if marked else f" {inner} "


_RULES: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]] = (
    ("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", _superscript),
    ("[₀₁₂₃₄₅₆₇₈₉]+", _subscript),
    # Sizes and styles, and the escapes of signs.
    (r"\\(?:left|right)(?![a-zA-Z])\s*\.?|\\(?:displaystyle|limits|[lL]arge|LARGE|[hH]uge)\b", ""),
    (r"\\[bB]igg?[lr]?(?![a-zA-Z])", ""),
    (r"\\underline(?![a-z])|\\(?:text)?color\s*\{[a-zA-Z]+\}|\\[hv]space\*?\s*\{[^{}]*\}", " "),
    (r"\\([$%#])", r"\1"),
    (r"\\pounds\b", "£"),
    (r"\\euro\b", "€"),
    (r"\\mathbb\s*\{?\s*([A-Z])\s*\}?", r"\\bb\1 "),
    (_TEXT, _text),
    (r"\\(?:[dtcs]|nice)(frac|binom)(?![a-z])", r"\\\1"),
    (r"\^\s*(?:\\prime(?![a-z])|\{\s*\\prime\s*\})", "'"),
    # A fraction of units.
    (r"\\frac\s*\{\s*\\text\{(\w+)\}\s*\}\s*\{\s*\\text\{(\w+)\}\s*(\^\s*\{?[23]\}?)?\s*\}", r"\\text{\1}/\2\3"),
    # Separators of thousands that no list has, then spaces.
    (r"(\d)\s*(?:\{,\}|\\!,|,\s*\\!|\\,)\s*(?=\d{3}(?!\d))", r"\1"),
    (r"(?<!\\)\\!", ""),
    (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|~|\s+", " "),
    (r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z])|\\degree)|\\degree(?![a-z])", r" \\degree "),
    # Scientific notation with the letter x, and a.m. and p.m.
    (r"(?<=[\d.])\s*[xX]\s*(?=10\s*\^)", r" \\times "),
    (r"\b([ap])\.\s?m\b\.?", r"\1m"),
    (" +", " "),
    (r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    # The word before the letter of a choice, and matrices as arrays in brackets.
    (r"^(\\text\{)?(?:option|Option|choice|Choice) (?=\(?[A-J]\)?(?:[.:)} ]|$))", r"\1"),
    (r"\(\s*\\begin\{array\}\s*\{[lcr| ]*\}(.*?)\\end\{array\}\s*\)", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    # A period at the end, but no ellipsis, and the first half of a space whose second half was stripped.
    (r"^ |(?: |(?<![\\.])\.|(?<!\\)\\)+$", ""),
    (r"""^(["'])(.+)\1$""", r"\2"),
)


def plain(text: str) -> str:
    """Return a text in one spelling."""
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def joined(text: str) -> str:
    """Return a text without separators of thousands. Alone in brackets, 1,234 is a pair, though 1,000 is not."""

    def join(match: re.Match[str]) -> str:
        before, after = text[: match.start()].rstrip(), text[match.end() :].lstrip()
        alone = before.endswith(("(", "[", "\\{")) and after.startswith((")", "]", "\\}"))
        return match[0] if alone and ",0" not in match[0] else match[0].replace(",", "")

    text = re.sub(r"(?<![\d,.])\d{1,3}(?: \d{3})+(?![\d,]| ?/| \d)", lambda match: match[0].replace(" ", ""), text)
    return re.sub(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d|,\d)", join, text)


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = rf"({'|'.join(_MONTHS)})(?:[a-z]{{1,6}})?\.?"
_DATES = (
    # The groups are year, month, day.
    re.compile(rf"(?P<m>{_MONTH}) (?P<d>\d\d?)(?:st|nd|rd|th)?(?:,? (?P<y>\d{{4}}))?"),
    re.compile(rf"(?P<d>\d\d?)(?:st|nd|rd|th)? (?P<m>{_MONTH})(?:,? (?P<y>\d{{4}}))?"),
    re.compile(r"(?P<y>\d{4})-(?P<m>\d\d)-(?P<d>\d\d)"),
)


def date(text: str) -> str | None:
    """Return a date, of a year or of any, as numbers; None if a text is none."""
    lower = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).casefold()
    match = next((match for pattern in _DATES if (match := pattern.fullmatch(lower))), None)
    if match is None:
        return None
    month = match["m"][:3]
    number = int(month) if month.isdigit() else _MONTHS.index(month) + 1
    return f"{match['y'] or ''}-{number:02}-{int(match['d']):02}"


def squeezed(text: str) -> str:
    """Return the words of a text, without case, punctuation and brackets."""
    return " ".join(re.sub(r"\\text|[^\w\s\\+*/^=<>-]", " ", text).casefold().split())


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
    differ = isinstance(truth, Named) and isinstance(answer, Named) and truth.name != answer.name
    if differ or isinstance(truth, Relation) or isinstance(answer, Relation):
        # The equation of a curve, solved for a variable on one side, or for another on each.
        one, other = (
            Relation(("=",), (side.difference,)) if isinstance(side, Named) and side.difference is not None else side
            for side in (truth, answer)
        )
        return isinstance(one, Relation) and isinstance(other, Relation) and _same_relation(one, other)
    named, also = _by_name(truth), _by_name(answer)
    if named is not None and also is not None:
        return _same_parts(named, also)
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
    one, other = (
        side.value._replace(points=tuple(point / 100 for point in side.value.points)) if side.percent else side.value
        for side in (truth, answer)
    )
    return same_value(one, other)


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
    curves = [isinstance(form, Named) and form.difference and not isinstance(form.value, Words) for form in forms[:1]]
    names = {form.name if isinstance(form, Named) and not curves[0] else "" for form in forms[:1]}
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
    """Read a set, tuple or interval, or the content of brackets around everything; None for other forms."""
    opening, closing = part[0].kind, part[-1].kind
    if opening not in ("(", "[", "{", "\\{", "\\langle") or closing not in CLOSING or len(_outside(part)) > 2:
        return None
    if opening == "\\{" and (allowed := _allowed(part[1:-1], depth)) is not None:
        return allowed
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


def _allowed(inner: Sequence[Token], depth: int) -> Form | None:
    r"""Return the values that the condition of a set allows, as in \{x \mid x > 2\}; None for other sets."""
    at = 3 if [token.kind for token in inner[1:3]] == ["\\in", "\\bbR"] else 1
    if len(inner) <= at or inner[0].kind != "word" or inner[at].kind not in ("|", "\\mid", "\\vert", ":"):
        return None
    found = _form(inner[at + 1 :], depth + 1)
    if isinstance(found, Named) and found.name == inner[0].text:
        value = found.value
        if isinstance(value, Many) and value.kind in (OPEN, "∪", *_INTERVALS):
            return value
        parts = value.parts if isinstance(value, Many) and value.kind == "" else (value,)
        if not any(isinstance(part, Many) for part in parts):
            return Many("{}", parts)
    raise Unreadable("has a set whose condition is not understood")


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
        # The right side is an approximation of the left one, or the only value of a name.
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


# x, x_1, f(x), f^{-1}(x), P(A), P(A|B), E[X], AB, |AB|, \overline{AB}, \angle A, (x, y), a Greek letter, \sin A, words.
_NAME = re.compile(
    r"(?:m?\\angle|\\triangle)?(?:[A-Z]{3}|[A-Za-z]'*(?:_(?:\w|\{[\w,+-]+\}))?(?:\^(?:-1|\{-1\}))?(?:\(-?[A-Za-z0-9,]+\))?)"
    r"|\|[A-Zz]\||\|?[A-Z]{2,3}\|?|\\overline\{[A-Z]{2}\}|[A-Za-z ]{3,}|\([A-Za-z](?:,[A-Za-z])+\)"
    r"|(?:\\bb)?E\[[A-Z]\]|(?:\\bb)?P\([A-Z](?:[=|]|\\cup|\\cap)[A-Z0-9]\)|\\(?:sin|cos|tan|cot)[A-Z]"
    rf"|(?:\\(?:sin|cos|tan|cot))?{GREEK.pattern}(?:_(?:\w|\{{\w+\}}))?"
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
    names, first = list[str](), sides[0]
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
    side = _as_quantity(value)
    curve = len(sides) == len(names) == len(names[0]) == 1 and side is not None and side.value.variables
    if not curve:
        # The sine of a letter is a name, and an expression as well.
        expression = len(names) == 1 and first[0].kind in (*FUNCTIONS, "|") and isinstance(value, Quantity)
        return Named("=".join(names), value, _difference(first, sides[0]) if expression else None)
    if names[0] in curve:
        return Relation(("=",), _differences([[Token("word", names[0])], sides[0]]))
    return Named(names[0], value, _difference([Token("word", names[0])], sides[0]))


def _has_variables(sides: Sequence[Sequence[Token]]) -> bool:
    """Whether a side is an expression with variables."""
    try:
        return any(evaluate(side).variables for side in sides)
    except Unreadable:
        return False


def _words(part: Sequence[Token]) -> Words | None:
    """Return words, or a letter, that may be an expression as well; None if other tokens are among them."""
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


_FORMULA = re.compile(
    r"\$\$(?P<a>(?:\\\$|[^$])+)\$\$|(?<!\\)\$(?P<b>(?:\\\$|[^$])+)(?<!\\)\$"
    r"|\\\((?P<c>(?:(?!\\[()]).)+)\\\)|\\\[(?P<d>(?:(?!\\[\[\]]).)+)\\\]",
    re.DOTALL,
)
# What may stand between several formulas: $1$ or $2$.
_JOINING = re.compile(r"(?:[\s,;]|and|or)*")
_BOLD = re.compile(r"(?<![\w*)\]}^])(\*\*|__|`)(?!\s|\1)([^*`\n]{1,200}?)(?<!\s)\1(?![\w*(])")
_MARKED = re.compile(r"\b(?:answer|option|choice)\s*(?:(?:is|=|:)(?!\w)\s*)+(?P<answer>[^\s:=][^\n]*)", re.IGNORECASE)
# Words at the beginning of a sentence that say nothing of its formula.
_THEREFORE = re.compile(r"(?:therefore|thus|hence|so|then|finally)(?:,\s*|\s+)(?=\S)", re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_SENTENCE = re.compile(r"\s*[A-Z][a-z]+\b")
# A word of prose that belongs to a formula: it has a digit, a command or an operator, or is one letter or a bracket.
_MATHEMATICAL = re.compile(
    r".*[0-9\\=<>^+*/|√π].*|-?[B-HJ-Zb-hj-z∞]|[-(\[{]+[A-Za-z][)\]}]+|-|[()\[\]{},]+|pi|and|or", re.DOTALL
)
# Words before a number in prose that make another number of it.
_CHANGES_MEANING = re.compile(
    r"minus|negative|not|\w+n't|never|no|than|plus|times|by|over|under|above|below|least|most|twice|double|half|quarter"
    r"|between|from|base|modulo|hundred|thousand|million|square|root|log|ln|sin|cos|tan|exp"
    r"|(?:root|square|cube|half|third|quarter|logarithm|log|power|multiple|factor|factorial|reciprocal)s? of"
)


# Data sets write these, such as NuminaMath in its rows of proofs, where a problem has no final answer.
_NO_ANSWER = ("proof", "notfound", "not found", "nan", "null", "n/a")


def score(conversation: Conversation) -> float:
    """Return 1 if the answer equals the ground truth, else 0. Raises DataError for a ground truth without a meaning."""
    truth = conversation.ground_truth
    if truth.strip().casefold() in _NO_ANSWER:
        raise DataError(f"{conversation.place} {truth!r:.80} says that the problem has no answer to compare with")
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
    text = text[-LONGEST_ANSWER:].strip()
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
    if begun := _THEREFORE.match(text):
        text = text[begun.end() :]
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
    if (
        _CHANGES_MEANING.fullmatch(before)
        or _CHANGES_MEANING.fullmatch(before.split(" ")[-1])
        or (not ends and changes_number(after))
    ):
        return
    found = " ".join(words[first : last + 1]).rstrip(".,:;!?")
    yield f"{found} {after}" if is_unit_word(after) else found


def _plain_words(words: Sequence[str]) -> str:
    return " ".join(word.casefold().strip(".,:;!?") for word in words)


def _is_kernel(word: str) -> bool:
    return word not in ("and", "or", "-") and bool(re.search(r"\w", word)) and bool(_MATHEMATICAL.fullmatch(word))

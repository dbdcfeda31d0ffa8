"""The units that the scorer `math` knows: a closed table, and plural nouns for what is counted. None is converted."""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from rl_async.reward_loop.scorers.math.expressions import Token

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

"""Reads mathematical expressions, in LaTeX or as people type them, and evaluates them while it reads.

An expression becomes its values: one if it has no variables, else one at each of a few fixed points, so that two
expressions are equal if their values are (polynomial identity testing). Arithmetic is bounded. Values are exact while
they are rational, and have `DIGITS` digits otherwise. Text without a meaning, with two meanings, or beyond a bound is
``Unreadable``. To add a function, add it to the tables of functions.
"""

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath

DIGITS = 60
# Relative: far above the rounding of DIGITS digits, far below the distance of different answers.
CLOSE = 1e-40
# A sum that is this small relative to its terms is zero up to rounding.
LOST = 1e-50
# Relative tolerance between numbers if one of them is written as a decimal that is not whole.
CLOSE_DECIMAL = Fraction(1, 10**6)
# Of numerator, denominator, or a binary exponent.
MOST_BITS = 20_000
# Of an argument of a function such as the sine.
MOST_ARGUMENT_BITS = 512
LARGEST_FACTORIAL = 2500

# A context of our own: other users of mpmath set the precision of the one that they share.
MP = mpmath.MPContext()
MP.dps = DIGITS


class Unreadable(ValueError):
    """An expression without a single meaning; its text completes the sentence that begins with the expression."""


def close(one: Any, other: Any, *, loose: bool = False) -> bool:
    """Whether two values are equal: exactly if both are whole, or rational and not ``loose``."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        if not loose or one.denominator == other.denominator == 1:
            return one == other
        return abs(one - other) <= CLOSE_DECIMAL * abs(one)
    one, other = real(one), real(other)
    if MP.isinf(one) or MP.isinf(other):
        return bool(one == other)
    size = real(CLOSE_DECIMAL) * abs(one) if loose else CLOSE * max(abs(one), abs(other))
    return bool(abs(one - other) <= size)


def real(value: Any) -> Any:
    """Return a value as a number of mpmath."""
    return MP.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def bits(value: Any) -> int:
    """Return the size of a value in bits. Raises Unreadable if it is too large, infinite or not a number."""
    if isinstance(value, Fraction):
        size = max(value.numerator.bit_length(), value.denominator.bit_length())
    elif not MP.isfinite(value):
        raise Unreadable("has no value")
    else:
        size = abs(int(MP.mag(value))) if value else 0
    if size > MOST_BITS:
        raise Unreadable("is too large to be evaluated")
    return size


def is_whole(value: Any) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def add(one: Any, other: Any) -> Any:
    """Return a sum, exact if both values are."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one + other
    one, other = real(one), real(other)
    total = one + other
    lost = MP.isfinite(total) and abs(total) <= LOST * max(abs(one), abs(other))
    return Fraction(0) if lost else total


def multiply(one: Any, other: Any) -> Any:
    """Return a product, exact if both values are."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one * other
    return real(one) * real(other)


def divide(one: Any, other: Any) -> Any:
    """Return a quotient, exact if both values are. Raises Unreadable for a division by zero."""
    if close(other, Fraction(0)):
        raise Unreadable("divides by zero")
    if MP.isinf(real(other)):
        raise Unreadable("divides by infinity")
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one / other
    return real(one) / real(other)


def power(base: Any, exponent: Any) -> Any:
    """Return a power: real for an odd root of a negative number, else the principal value."""
    if base == 0:
        if not isinstance(exponent, Fraction) or exponent <= 0:
            raise Unreadable("has a power of zero without a value")
        return Fraction(0)
    if base == 1 or exponent == 0:
        return Fraction(1)
    if isinstance(base, Fraction) and is_whole(exponent):
        if abs(exponent.numerator) * max(bits(base) - 1, 1) > MOST_BITS and base != -1:
            raise Unreadable("has a power that is too large to be evaluated")
        return base**exponent.numerator if base != -1 else Fraction(-1 if exponent.numerator % 2 else 1)
    if isinstance(base, Fraction) and base < 0 and isinstance(exponent, Fraction) and exponent.denominator % 2:
        root = power(-base, exponent)
        return -root if exponent.numerator % 2 else root
    size = MP.log(real(base)) * real(exponent)
    if not MP.isfinite(size) or abs(size) > MOST_BITS:
        raise Unreadable("has a power that is too large to be evaluated")
    return MP.exp(size)


def factorial(value: Any) -> Any:
    """Return a factorial, by the gamma function where the value is not whole."""
    if abs(value) > LARGEST_FACTORIAL:
        raise Unreadable("has a factorial that is too large to be evaluated")
    if is_whole(value):
        if value < 0:
            raise Unreadable("has a factorial of a negative number")
        return Fraction(math.factorial(value.numerator))
    return by_mpmath("gamma")(real(value) + 1)


def binomial(above: Any, below: Any) -> Any:
    if is_whole(above) and is_whole(below) and above >= 0 and below >= 0:
        below = min(below, above - below) if below <= above else below
        if below > LARGEST_FACTORIAL or below * bits(above) > MOST_BITS:
            raise Unreadable("has a binomial coefficient that is too large to be evaluated")
        return Fraction(math.comb(above.numerator, below.numerator))
    return divide(factorial(above), multiply(factorial(below), factorial(add(above, -below))))


def by_mpmath(name: str) -> Callable[[Any], Any]:
    def apply(value: Any) -> Any:
        value = real(value)
        if MP.isinf(value) or (value and MP.mag(value) > MOST_ARGUMENT_BITS):
            raise Unreadable("has a function of a number that is too large")
        if (name == "exp" or name.endswith("h")) and abs(value) > MOST_BITS:
            raise Unreadable("has a power that is too large to be evaluated")
        if abs(MP.im(value)) > MOST_BITS:
            raise Unreadable("has a function of a number that is too large")
        try:
            result = getattr(MP, name)(value)
        except (ValueError, ZeroDivisionError):
            raise Unreadable("has no value") from None
        # The sine of pi, or the logarithm of one.
        lost = name != "exp" and abs(result) <= LOST < abs(value)
        return Fraction(0) if lost else result

    return apply


def floor(value: Any) -> Any:
    if not isinstance(value, Fraction):
        if MP.im(value) or MP.mag(value) > MOST_ARGUMENT_BITS:
            raise Unreadable("rounds a number that has no whole part")
        return Fraction(int(MP.floor(MP.re(value))))
    return Fraction(math.floor(value))


def whole_numbers(function: Callable[..., int]) -> Callable[..., Any]:
    def apply(*values: Any) -> Any:
        if not all(map(is_whole, values)):
            raise Unreadable("has a divisor or multiple of numbers that are not whole")
        return Fraction(function(*(value.numerator for value in values)))

    return apply


def extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*values: Any) -> Any:
        if any(MP.im(real(value)) for value in values):
            raise Unreadable("has an extreme of numbers that are not real")
        return function(values, key=real)

    return apply


# Two at which all variables are positive, and five for their signs.
POINTS = 7
DEEPEST = 25
# Operations for one expression, each weighted with the size of its result.
MOST_WORK = 3_000


class Token(NamedTuple):
    """A piece of an expression: a number, a word, a text, or the symbol or command itself as its kind."""

    kind: str
    text: str


class Value(NamedTuple):
    """What an expression evaluates to: once, or at each point if it has variables."""

    points: tuple[Any, ...]
    decimal: bool
    variables: frozenset[str]


_TOKEN = re.compile(
    r"(?P<number>[0-9]*\.[0-9]*\\(?:overline|bar)\s*\{?[0-9]+\}?"
    r"|(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+(?![A-Za-z.]))?)"
    r"|(?P<text>\\text\{[^{}]*\}|[^\W\d_]{4,}-[^\W\d_]{2,}|[^\W\d_]{2,3}-[^\W\d_]{4,})"
    r"|(?P<symbol>\\(?:begin|end)\{[pbvBV]?matrix\}|\\[A-Za-z]+|\\[{}|\\]"
    r"|\*\*|<=|>=|!=|==|[-+*/^_(){}\[\]|,;:=<>!%$€£¥₹'&])"
    r"|(?P<word>[^\W\d_]+)"
    r"|(?P<space>\s+)"
)
_SAME_SYMBOL = {"**": "^", "==": "=", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[", "\\rbrack": "]"}
_AS_SYMBOL = {"and": "and", "or": "or", "percent": "%", "inf": "\\infty", "infinity": "\\infty"}
OPENING = ("(", "[", "{", "\\{", "\\lfloor", "\\lceil", "\\lvert", "\\langle")
CLOSING = (")", "]", "}", "\\}", "\\rfloor", "\\rceil", "\\rvert", "\\rangle")
GREEK = re.compile(
    r"\\(?:(?:var)?(?:epsilon|theta|phi|rho)|alpha|beta|gamma|delta|zeta|eta|iota|kappa|lambda|mu|nu|xi|sigma|tau|upsilon"
    r"|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|ell)"
)
# Words that mean the command without a backslash.
_TYPED = re.compile(r"sqrt|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|pi|gcd|lcm|max|min")


def tokens(text: str) -> list[Token]:
    """Split an expression into tokens. Raises Unreadable at a character that has no place in one."""
    found, at = list[Token](), 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Unreadable(f"has {text[at]!r}, which is not understood there")
        at = match.end()
        kind, piece = str(match.lastgroup), match[0]
        if kind == "symbol":
            symbol = _SAME_SYMBOL.get(piece, piece)
            found.append(Token(symbol, symbol))
        elif kind != "space":
            piece = piece.removeprefix("\\text{").removesuffix("}").strip() if kind == "text" else piece
            found.append(Token(_AS_SYMBOL.get(piece, kind), piece))
    return found


def is_function(token: Token) -> bool:
    """Whether a token is the name of a function of one argument, with or without a backslash."""
    return f"\\{token.text.removeprefix(chr(92))}" in (*FUNCTIONS, "\\log")


def constant(value: Fraction) -> Value:
    """Return a number as what an expression evaluates to."""
    return Value((value,), False, frozenset())


def evaluate(expression: Sequence[Token], sign: int = 1) -> Value:
    r"""Evaluate an expression, reading ``\pm`` as a plus, or as a minus if ``sign`` is -1. Raises Unreadable."""
    first = _Reader(expression, 0, sign)
    values = [first.read()]
    if first.variables:
        values += [_Reader(expression, point, sign).read() for point in range(1, POINTS)]
    return Value(tuple(values), first.decimal, frozenset(first.variables))


def same_value(truth: Value, answer: Value) -> bool:
    """Whether two expressions are equal, up to a millionth where one of them is written as a decimal."""
    loose = truth.decimal or answer.decimal
    count = max(len(truth.points), len(answer.points))
    pairs = zip(_at_points(truth, count), _at_points(answer, count), strict=True)
    return all(close(one, other, loose=loose) for one, other in pairs)


def proportional(one: Value, other: Value, *, positive: bool = False) -> bool:
    """Whether one expression is the other times a constant other than zero."""
    count = max(len(one.points), len(other.points))
    pairs = list(zip(_at_points(one, count), _at_points(other, count), strict=True))
    if any(close(value, Fraction(0)) for pair in pairs for value in pair):
        return False
    ratios = [divide(a, b) for a, b in pairs]
    if positive and not (MP.im(real(ratios[0])) == 0 and MP.re(real(ratios[0])) > 0):
        return False
    return all(close(ratios[0], ratio) for ratio in ratios)


def _at_points(value: Value, count: int) -> Sequence[Any]:
    return value.points if len(value.points) == count else value.points * count


_CIRCULAR = ("sin", "cos", "tan", "cot", "sec", "csc")
_HYPERBOLIC = tuple(f"{name}h" for name in _CIRCULAR)
FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    **{f"\\{name}": by_mpmath(name) for name in (*_CIRCULAR, *_HYPERBOLIC, "ln", "exp")},
    # As they are written in Russian and German.
    **{f"\\{name}": by_mpmath(of) for name, of in {"lg": "log10", "tg": "tan", "ctg": "cot", "arctg": "atan"}.items()},
    **{f"\\{prefix}{name}": by_mpmath(f"a{name}") for name in _CIRCULAR for prefix in ("arc", "a")},
    **{f"\\{prefix}{name}": by_mpmath(f"a{name}") for name in _HYPERBOLIC for prefix in ("arc", "ar", "a")},
}
_INVERSE = {f"\\{name}": f"\\a{name}" for name in (*_CIRCULAR, *_HYPERBOLIC)}
_OF_SEVERAL = {
    "\\gcd": whole_numbers(math.gcd),
    "\\lcm": whole_numbers(math.lcm),
    "\\max": extreme(max),
    "\\min": extreme(min),
}
_AROUND = {"|": "|", "\\lvert": "\\rvert", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_TIMES = ("*", "\\cdot", "\\times")
_NO_FACTOR = (*CLOSING, *_TIMES, *"+-/^_!',", "", "number", "\\pm", "\\mp", "\\div", "\\choose")


class _Reader:
    """A recursive-descent parser that evaluates at one point."""

    def __init__(self, expression: Sequence[Token], point: int, sign: int) -> None:
        self._left = [letter for token in reversed(expression) for letter in reversed(_letters(token))]
        self._point = point
        self._sign = sign
        self._depth = 0
        self._bars = 0
        self._work = 0
        self.variables = set[str]()
        self.decimal = False

    def read(self) -> Any:
        value = self._sum_or_choose()
        if self._left:
            raise Unreadable(f"has {self._left[-1].text!r}, which is not understood there")
        return value

    def _next(self) -> str:
        return self._left[-1].kind if self._left else ""

    def _take(self, *kinds: str) -> Token | None:
        return self._left.pop() if self._left and self._left[-1].kind in kinds else None

    def _expect(self, kind: str) -> None:
        if not self._take(kind):
            raise Unreadable(f"lacks {kind!r}")

    def _checked(self, value: Any) -> Any:
        self._work += 1 + bits(value) // 500 + 5 * (not isinstance(value, Fraction))
        if self._work > MOST_WORK:
            raise Unreadable("is too large to be evaluated")
        return value

    def _sum(self) -> Any:
        value = self._product()
        while mark := self._take("+", "-", "\\pm", "\\mp"):
            value = self._checked(add(value, self._signed(mark.kind, self._product())))
        return value

    def _sum_or_choose(self) -> Any:
        value = self._sum()
        return self._checked(binomial(value, self._sum())) if self._take("\\choose") else value

    def _signed(self, mark: str, value: Any) -> Any:
        sign = {"+": 1, "-": -1, "\\pm": self._sign, "\\mp": -self._sign}[mark]
        return value if sign == 1 else -value

    def _product(self) -> Any:
        value = self._unary()
        divided = False
        while True:
            if self._take(*_TIMES):
                value, divided = multiply(value, self._unary()), False
            elif self._take("/", "\\div"):
                value, divided = divide(value, self._unary()), True
            elif self._starts_factor():
                if divided:
                    raise Unreadable("may have the last factor above or below the fraction bar")
                value = multiply(value, self._factor())
            else:
                return value
            self._checked(value)

    def _starts_factor(self) -> bool:
        return self._next() not in _NO_FACTOR and not (self._next() == "|" and self._bars)

    def _unary(self) -> Any:
        marks = list[str]()
        while mark := self._take("+", "-", "\\pm", "\\mp"):
            marks.append(mark.kind)
        value = self._factor()
        for kind in marks:
            value = self._signed(kind, value)
        return value

    def _factor(self) -> Any:
        """Read a power, a factorial or an angle in degrees."""
        value = self._primary()
        while True:
            if self._take("!"):
                value = factorial(value)
                if self._next() == "!":
                    raise Unreadable("has a double factorial")
            elif self._take("\\degree"):
                value = multiply(value, MP.pi / 180)
            elif self._take("^"):
                return self._checked(power(value, self._exponent()))
            else:
                return value
            self._checked(value)

    def _exponent(self) -> Any:
        mark = self._take("-", "+")
        value = self._primary()
        if self._take("^"):
            self._depth += 1
            value = power(value, self._exponent())
            self._depth -= 1
        return self._signed(mark.kind, value) if mark else value

    def _primary(self) -> Any:
        self._depth += 1
        if self._depth > DEEPEST:
            raise Unreadable("is nested too deeply")
        value = self._unnested_primary()
        self._depth -= 1
        return value

    def _unnested_primary(self) -> Any:
        if not self._left:
            raise Unreadable("ends too early")
        kind, text = self._left.pop()
        if kind == "number":
            return self._mixed(self._number(text))
        if kind in ("(", "[", "{"):
            return self._group(CLOSING[OPENING.index(kind)])
        if kind in _AROUND:
            self._bars += kind == "|"
            value = self._sum()
            self._expect(_AROUND[kind])
            self._bars -= kind == "|"
            return abs(value) if kind in ("|", "\\lvert") else floor(value) if kind == "\\lfloor" else -floor(-value)
        if kind in ("\\frac", "\\binom"):
            above = self._argument()
            return self._checked((divide if kind == "\\frac" else binomial)(above, self._argument()))
        if kind == "\\sqrt":
            return self._root(typed=text == "sqrt")
        if kind in FUNCTIONS or kind == "\\log":
            return self._function(kind)
        if kind in _OF_SEVERAL:
            return self._function_of_several(kind)
        if kind == "\\infty":
            return MP.inf
        if kind == "\\pi":
            return +MP.pi
        if GREEK.fullmatch(kind) or kind == "letter" or kind.startswith("\\bb"):
            return self._symbol(text)
        raise Unreadable(f"has {text!r}, which is not understood there")

    def _group(self, closing: str) -> Any:
        value = self._sum_or_choose()
        self._expect(closing)
        return value

    def _number(self, text: str) -> Any:
        # TeX takes the first character alone for an argument without braces, as of the base in \log_.5.
        if text == ".":
            raise Unreadable("has a point without digits")
        if repeating := re.fullmatch(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{?(\d+)\}?", text):
            whole, start, period = repeating.groups()
            tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(start))
            return Fraction(f"{whole or 0}.{start or 0}") + tail
        exponent = text.lower().partition("e")[2]
        if len(exponent) > 5 or abs(int(exponent or 0)) > MOST_BITS // 4:
            raise Unreadable("is too large to be evaluated")
        value = Fraction(text)
        self.decimal |= value.denominator != 1
        return value

    def _mixed(self, whole: Any) -> Any:
        """Read the fraction of a mixed number: 2 1/2. An improper one, as in 2 3/2, might be a factor."""
        if self._next() == "\\frac":
            ahead = [token.text for token in self._left[-2:-8:-1]]
            match = re.match(r"\{(\d+)\}\{(\d+)\}|(\d)(\d)(?!\d)|(\d)\{(\d+)\}|\{(\d+)\}(\d)(?!\d)", "".join(ahead))
            if match is None:
                return whole
        elif self._next() == "number" and len(self._left) > 2 and self._left[-2].kind == "/":
            match = re.fullmatch(r"(\d+)/(\d+)", "".join(token.text for token in self._left[-1:-4:-1]))
        else:
            return whole
        above, below = [int(group) for group in match.groups() if group] if match else (1, 1)
        if not is_whole(whole) or not 0 < above < below:
            raise Unreadable("has a number beside a number")
        if self._take("\\frac"):
            self._argument(), self._argument()
        else:
            del self._left[-3:]
        return whole + Fraction(above, below)

    def _argument(self) -> Any:
        """Read the argument of a command: a group, or a single digit or symbol, as TeX does."""
        if self._next() == "number" and len(self._left[-1].text) > 1:
            text = self._left.pop().text
            self._left += [Token("number", text[1:]), Token("number", text[0])]
            return Fraction(int(self._left.pop().text)) if text[0].isdigit() else self._number(text)
        if self._next() == "number":
            return self._number(self._left.pop().text)
        if self._next() not in ("{", "letter", "\\pi", "\\sqrt", "\\frac", "\\binom") and not GREEK.fullmatch(
            self._next()
        ):
            raise Unreadable("has a command without its argument")
        return self._primary()

    def _root(self, *, typed: bool) -> Any:
        degree = Fraction(2)
        if self._take("["):
            degree = self._group("]")
        radicand = self._primary() if typed or self._next() == "(" else self._argument()
        return self._checked(power(radicand, divide(Fraction(1), degree)))

    def _function(self, name: str) -> Any:
        base: Any = None
        exponent: Any = None
        while mark := self._take("^", "_"):
            if mark.kind == "^" and exponent is None:
                exponent = self._exponent()
            elif name == "\\log" and base is None:
                base = self._argument()
            else:
                raise Unreadable(f"has a subscript or a second exponent of {name}")
        if exponent == -1:
            if name not in _INVERSE:
                raise Unreadable(f"has an inverse of {name}")
            name, exponent = _INVERSE[name], None
        if self._next() in ("(", "{", "["):
            argument = self._primary()
        else:
            argument = self._unary()
            while self._starts_factor() and self._next() not in ("(", "\\log") and self._next() not in FUNCTIONS:
                argument = multiply(argument, self._factor())
        if name == "\\log":
            # Without a base, the logarithm is to a base that nobody knows.
            ln = FUNCTIONS["\\ln"]
            value = divide(ln(argument), ln(base) if base is not None else real(_point("\\log", 0)))
        else:
            value = FUNCTIONS[name](argument)
        self._work += 20
        return self._checked(value if exponent is None else power(value, exponent))

    def _function_of_several(self, name: str) -> Any:
        self._expect("(")
        values = [self._sum()]
        while self._take(","):
            values.append(self._sum())
        self._expect(")")
        return _OF_SEVERAL[name](*values)

    def _symbol(self, name: str) -> Any:
        while self._take("'"):
            name += "'"
        if self._take("_"):
            name += "_" + self._subscript()
        if (number := name[2:]).isdigit() and name[:2] in ("C_", "A_") and int(number) > 2 and self._take("^"):
            # The combinations, or the arrangements, of so many things, as they are written in Chinese.
            of, chosen = Fraction(int(number)), self._exponent()
            ways = binomial(of, chosen)
            return self._checked(ways if name[0] == "C" else multiply(ways, factorial(chosen)))
        if name == "e":
            return +MP.e
        if name == "i":
            return MP.mpc(0, 1)
        self.variables.add(name)
        return _point(name, self._point)

    def _subscript(self) -> str:
        if not self._take("{"):
            if self._next() not in ("number", "letter"):
                raise Unreadable("has a subscript that is not understood")
            return self._left.pop().text
        text = ""
        while self._left and (token := self._left.pop()).kind != "}":
            if token.kind not in ("number", "letter", "text", "+", "-", ","):
                raise Unreadable("has a subscript that is not understood")
            text += token.text
        return text


def _point(name: str, point: int) -> Any:
    """Return the value of a variable at a point: small and large, with an odd denominator, so that odd roots are real.

    All variables are positive at the first two points; at the others the signs of different letters differ.
    """
    draw = random.Random(f"{name}/{point}")
    value = Fraction(draw.randrange(20, 90) if point % 2 else draw.randrange(120, 250), 101)
    negative = (sum(map(ord, name)) % 31 + 1) >> (point - 2) & 1 if point >= 2 else 0
    return -value if negative else value


def _letters(token: Token) -> list[Token]:
    """Split a word into the variables whose product it is, unless it is the name of a function or constant."""
    if token.kind == "word" and _TYPED.fullmatch(token.text):
        return [Token(f"\\{token.text}", token.text)]
    if token.kind == "word" and len(token.text) <= 3 and token.text.isascii():
        return [Token("letter", letter) for letter in token.text]
    if token.kind == "text" and len(token.text) == 1 and token.text.isascii():
        return [Token("letter", token.text)]
    if token.kind in ("word", "text"):
        raise Unreadable(f"has {token.text!r}, which is not understood there")
    return [token]

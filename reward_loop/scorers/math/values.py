"""Arithmetic on the values of expressions: exact while they are rational, else with `DIGITS` digits, and bounded."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

DIGITS = 60
# Relative: far above the rounding of DIGITS digits, far below the distance of different answers.
CLOSE = 1e-40
# Relative to its terms, a sum that is as small is what rounding has left of zero.
LOST = 1e-50
# Relative, between numbers of which one is written as a decimal that is not whole.
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

"""Whole-number arithmetic for the calculator tool: no names, no calls, no powers, bounded length."""

import ast
import operator
import re
from collections.abc import Callable

_ALLOWED = re.compile(r"[0-9+\-*() ]{1,24}")
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def evaluate(expression: str) -> int:
    """Evaluate ``expression``. Raises ValueError("bad expression") for anything but + - * ( ) and digits."""
    if not _ALLOWED.fullmatch(expression):
        raise ValueError("bad expression")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError("bad expression") from error


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case _:
            raise ValueError("bad expression")

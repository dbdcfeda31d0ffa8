"""Formulas of built pages as MathML."""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert

_LOG, _SPACED_LOG = "<mi>log</mi>", '<mi>log</mi><mspace width="0.17em"/>'  # as TeX sets it
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def to_mathml(page: str, path: Path) -> str:
    """Replace every formula of a page. Raises ValueError, naming page and formula, for one that cannot be read."""

    def mathml(match: re.Match[str]) -> str:
        latex = html.unescape(match[3]).strip()
        try:
            return convert(latex, display="block" if match[2] == "[" else "inline").replace(_LOG, _SPACED_LOG)
        except Exception as error:
            raise ValueError(f"{path}: {latex}: {type(error).__name__}: {error}") from error

    return _FORMULA.sub(mathml, page)

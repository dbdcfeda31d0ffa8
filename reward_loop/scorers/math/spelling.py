"""Brings an answer into one spelling before it is split into tokens: characters, spaces, texts, separators, dates."""

import re
import unicodedata
from collections.abc import Callable, Sequence

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
    return f"\\text{{{inner}}}" if _WORDS.fullmatch(inner) and not variable else f" {inner} "


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
    # A period at the end, but no ellipsis, and what is left of a space whose second half was stripped.
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

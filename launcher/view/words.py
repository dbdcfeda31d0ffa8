"""What counts as a word in a search: what SQLite's unicode61 takes for one, and each sign of a script without spaces.

``launcher/view/web/src/embedded.ts`` does the same where a report has no server.
"""

import re

from rl_async.errors import RequestRefused

MOST_TERMS = 64  # of a search, each of which is looked up
# Han, kana, and the marks that stand among them.
_SIGN = re.compile(
    "[\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)


def searchable(text: str) -> str:
    """Return the text with spaces around signs of Chinese and Japanese, which make each a word."""
    return text if text.isascii() else _SIGN.sub(r" \g<0> ", text)


def words(text: str) -> str:
    """Return the full-text query for rows that contain each of these words, the last also as a beginning.

    What stands in quotes, what has punctuation inside such as ``total_price``, and signs that follow one another must
    occur in that order. Nothing of it is an operator. Raises RequestRefused for a text without a letter or digit, or of
    too many words.
    """
    parts = text.replace("\0", " ").split('"')  # SQLite's query would end there
    quoted = [part.strip() for part in parts[1::2]]
    plain = [word for part in parts[::2] for word in part.split()]
    terms = [term for term in (*quoted, *plain) if any(character.isalnum() for character in term)]
    if not terms:
        raise RequestRefused("text: give a word with letters or digits", code="no_words", param="text")
    if len(terms) > MOST_TERMS:
        raise RequestRefused(f"text: give at most {MOST_TERMS} words", code="too_many_words", param="text")
    prefix = "*" if plain and terms[-1] == plain[-1] and terms[-1][-1].isalnum() else ""
    return " AND ".join(f'"{searchable(term).strip()}"' for term in terms) + prefix

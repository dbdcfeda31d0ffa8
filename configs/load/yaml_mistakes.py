"""Says in one line where YAML is not valid, why, and what to change."""

import yaml
from yaml.reader import ReaderError

_REMEDIES = {  # by what PyYAML says; the first that it contains counts
    r"character '\t'": "indent with spaces, not with tabs",
    "found character": "put text that begins with this character in quotes",
    "mapping values are not allowed": "put text with a colon in quotes; else fix this line's indentation, or the line "
    "before, where the space behind a colon may be missing",
    "could not find expected ':'": "write KEY: VALUE or - ITEM, with the space",
    "expected <block end>": "indent all keys of a section alike",
    "expected the node content": "give a value, or close the bracket",
    "expected ',' or": "close the bracket, or put a comma between its items",
    "end of stream": "close the quotes",
    "unknown escape character": "use single quotes, in which a backslash stands for itself",
    "found unhashable key": "put text with braces in quotes",
    "found undefined alias": "put text that begins with * in quotes",
    "expected alphabetic or numeric": "put text that begins with * or & in quotes",
    "found duplicate anchor": "give one of them another name",
    "could not determine a constructor for the tag": "put text that begins with ! in quotes",
    "found another document": "remove the line ---",
    "is no value": "put it in quotes if it is text",
    "unacceptable character": "remove it, or write it as an escape in double quotes",
}


def explain_mistake(error: yaml.MarkedYAMLError | ReaderError, text: str, origin: str) -> str:
    """Describe the mistake in ``text``, which is from ``origin``, as ORIGIN:LINE:COLUMN, both counted from 1."""
    if isinstance(error, ReaderError):
        line, column = text.count("\n", 0, error.position), error.position - text.rfind("\n", 0, error.position) - 1
        what = f"unacceptable character U+{error.character:04X}"
    else:
        mark = error.problem_mark
        assert mark is not None, "all errors of reading have a place"
        line, column = mark.line, mark.column
        what = str(error.problem).removeprefix("but ")
        before = error.context_mark
        if error.context and error.context.startswith("found duplicate anchor") and before:
            what = f"{error.context.partition(';')[0]}, which is on line {before.line + 1} too"
        elif error.context and before and before.line < line and "while" in error.context:
            what += f" {error.context} that begins on line {before.line + 1}"
    remedy = next((f"; {remedy}" for said, remedy in _REMEDIES.items() if said in what), "")
    return f"{origin}:{line + 1}:{column + 1}: not valid YAML: {what}{remedy}"

"""Works out the commands of a shell script without running any: variables, arrays, branches, arithmetic.

Users keep the settings of verl, slime and TRL in scripts that assemble a command from such parts. A value that only a
running machine could tell (``$HOME``, ``$(nproc)``) stays as it is written, so that its dollar sign marks it.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rl_async.errors import ConfigError

# A script may have so many characters, a condition so many words, a loop so many rounds; a word, and all words
# together, so many characters with the values of variables.
MOST_SCRIPT = 1 << 17
MOST_TEST = 200
MOST_WORD = 1 << 16
MOST_CHARACTERS = 1 << 22
MOST_ROUNDS = 64

Command = list[str]
# Whether a condition holds, or a command succeeds; None if only a running machine could tell.
Status = bool | None


@dataclass
class Script:
    """The commands that a script would run, its arrays, and the values that it is assumed to choose."""

    commands: list[Command] = field(default_factory=list)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)


def read_script(text: str, origin: str) -> Script:
    """Work out the commands of a script. Raises ConfigError, naming ``origin``, if it or its words exceed bounds."""
    if len(text) > MOST_SCRIPT:
        raise ConfigError(f"{origin}: more than {MOST_SCRIPT} characters are no script of settings")
    evaluation = _Evaluation(origin)
    evaluation.run(_Parser(list(_tokens(text.replace("\r\n", "\n")))).whole())
    return Script(evaluation.commands, evaluation.arrays, evaluation.assumed)


_UNKNOWN = re.compile(r"\$[\w({@*#?!]|`")


def is_unknown(text: str) -> bool:
    """Whether a part of the text could be filled in by a running shell only."""
    return _UNKNOWN.search(text) is not None


# Tokens: words as they are written, and operators.

_OPERATOR = re.compile(r"\n|;;&|;;|;&|;|&&|\|\||\|&|\||&|\(|\)")
_REDIRECTION = re.compile(r"(?:\d+|&)?(<<<|<<-?|>>|>&|<&|>\||<>|>|<)[ \t]*")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")


def _tokens(text: str) -> Iterator[str]:
    """Yield the tokens of a script without comments, redirections and here-documents."""
    at = 0
    delimiters: list[str] = []
    while at < len(text):
        char = text[at]
        if char in " \t":
            at += 1
        elif text.startswith("\\\n", at):
            at += 2
        elif char == "#":
            at = _find(text, "\n", at)
        elif char == "\n" and delimiters:
            for delimiter in delimiters:
                closing = re.compile(rf"^\t*{re.escape(delimiter)}$", re.MULTILINE).search(text, at + 1)
                at = closing.end() if closing else len(text)
            delimiters = []
            yield "\n"
        elif match := _REDIRECTION.match(text, at):
            at = max(_word_end(text, match.end()), match.end())
            if match[1] in ("<<", "<<-"):
                delimiters.append(text[match.end() : at].strip("\"'\\"))
        elif text.startswith("((", at):
            end = _nested_end(text, at)
            yield text[at:end]
            at = end
        elif match := _OPERATOR.match(text, at):
            yield match[0]
            at = match.end()
        else:
            end = _word_end(text, at)
            yield text[at:end]
            at = end


def _find(text: str, what: str, at: int) -> int:
    found = text.find(what, at)
    return len(text) if found < 0 else found


def _word_end(text: str, at: int) -> int:
    """Return where the word ends that begins at ``at``. An array's value, in brackets, belongs to its word."""
    start = at
    while at < len(text):
        char = text[at]
        if text.startswith("\\\n", at) and at == start:
            break
        if char == "\\":
            at += 2
        elif char in "'`":
            at = _find(text, char, at + 1) + 1
        elif char == '"':
            at = _quotation_end(text, at)
        elif char == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = _nested_end(text, at + 1)
        elif char == "(" and _ARRAY.fullmatch(text, start, at):
            at = _nested_end(text, at)
        elif char in " \t\n;&|()<>":
            break
        else:
            at += 1
    return min(at, len(text))


def _quotation_end(text: str, at: int) -> int:
    at += 1
    while at < len(text) and text[at] != '"':
        if text[at] == "\\":
            at += 2
        elif text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = _nested_end(text, at + 1)
        else:
            at += 1
    return min(at + 1, len(text))


def _nested_end(text: str, at: int) -> int:
    """Return the place behind the bracket that closes the one at ``at``."""
    opening = text[at]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "'" and opening == "(":
            at = _find(text, "'", at + 1)
        elif char == '"':
            at = _quotation_end(text, at) - 1
        elif char == "#" and opening == "(" and text[at - 1] in " \t\n":
            at = _find(text, "\n", at)
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return len(text)


# The grammar, as far as it decides which commands run.


@dataclass
class _Simple:
    words: list[str]


@dataclass
class _Sequence:
    """Commands, each with the operator that joins it to the one before: ``;``, ``&&`` or ``||``."""

    items: list[tuple[str, Any]]


@dataclass
class _Pipe:
    parts: list[Any]


@dataclass
class _Not:
    command: Any


@dataclass
class _If:
    branches: list[tuple[Any, Any]]
    otherwise: Any


@dataclass
class _Case:
    word: str
    branches: list[tuple[list[str], Any]]


@dataclass
class _For:
    name: str
    words: list[str]
    body: Any


_NOTHING = _Sequence([])


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at = tokens, 0

    def whole(self) -> _Sequence:
        items: list[tuple[str, Any]] = []
        while self._at < len(self._tokens):
            items.append((";", self._sequence(())))
            # Something closes here that nothing opened.
            self._at += 1
        return _Sequence(items)

    def _peek(self, ahead: int = 0) -> str:
        place = self._at + ahead
        return self._tokens[place] if place < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def _skip_lines(self) -> None:
        while self._peek() in ("\n", ";"):
            self._at += 1

    def _sequence(self, until: tuple[str, ...]) -> _Sequence:
        """Parse commands up to a closing word, which stays."""
        items: list[tuple[str, Any]] = []
        join = ";"
        while self._at < len(self._tokens) and self._peek() not in until:
            if self._peek() in ("\n", ";", "&"):
                self._at += 1
            elif self._peek() in ("&&", "||"):
                join = self._take()
            elif self._peek() in (")", "}", ";;", "fi", "done", "esac", "then", "do", "else", "elif"):
                break
            else:
                items.append((join, self._pipeline()))
                join = ";"
        return _Sequence(items)

    def _pipeline(self) -> Any:
        if self._peek() == "!":
            self._at += 1
            return _Not(self._pipeline())
        parts = [self._command()]
        while self._peek() in ("|", "|&"):
            self._at += 1
            self._skip_lines()
            parts.append(self._command())
        return parts[0] if len(parts) == 1 else _Pipe(parts)

    def _command(self) -> Any:
        word = self._peek()
        if word in ("{", "("):
            self._at += 1
            body = self._sequence(("}",) if word == "{" else (")",))
            self._at += 1
            return body
        if word == "function" or (self._peek(1), self._peek(2)) == ("(", ")"):
            return self._function(word)
        parse = {"if": self._if, "case": self._case, "for": self._for, "while": self._while, "until": self._while}
        return parse[word]() if word in parse else self._simple()

    def _function(self, word: str) -> Any:
        self._at += 2 if word == "function" else 1
        if self._peek() == "(":
            self._at += 2
        self._skip_lines()
        self._command()
        return _NOTHING

    def _if(self) -> _If:
        branches, otherwise = [], _NOTHING
        while self._peek() in ("if", "elif"):
            self._at += 1
            condition = self._sequence(("then",))
            self._at += 1
            branches.append((condition, self._sequence(("elif", "else", "fi"))))
        if self._peek() == "else":
            self._at += 1
            otherwise = self._sequence(("fi",))
        self._at += 1
        return _If(branches, otherwise)

    def _case(self) -> _Case:
        self._at += 1
        word = self._take()
        self._skip_lines()
        self._at += 1
        branches = []
        self._skip_lines()
        while self._at < len(self._tokens) and self._peek() != "esac":
            patterns = []
            while self._at < len(self._tokens) and (token := self._take()) != ")":
                if token not in ("(", "|"):
                    patterns.append(token)
            branches.append((patterns, self._sequence((";;", "esac"))))
            while self._peek() in (";;", ";&", ";;&", "\n", ";"):
                self._at += 1
        self._at += 1
        return _Case(word, branches)

    def _for(self) -> _For:
        self._at += 1
        name = self._take()
        words: list[str] = []
        if self._peek() == "in":
            self._at += 1
            while self._peek() not in ("\n", ";", ""):
                words.append(self._take())
        self._skip_lines()
        self._at += 1
        body = self._sequence(("done",))
        self._at += 1
        return _For(name, words, body)

    def _while(self) -> Any:
        self._at += 1
        self._sequence(("do",))
        self._at += 1
        self._sequence(("done",))
        self._at += 1
        return _NOTHING

    def _simple(self) -> _Simple:
        words: list[str] = []
        if self._peek() == "[[":
            while self._at < len(self._tokens) and (not words or words[-1] != "]]"):
                words.append(self._take())
            return _Simple(words)
        while self._peek() and not _OPERATOR.fullmatch(self._peek()):
            words.append(self._take())
        if not words:
            self._at += 1
        return _Simple(words)


# What the commands are, with the script's own variables.

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_TESTS = ("[", "[[", "test")
# A flag or a setting of Hydra's, where a command would begin.
_NO_PROGRAM = re.compile(r"--[a-z]|[+~]{0,2}[A-Za-z_]\w*\.[\w.]+=")
_PROBE = re.compile(r"\|\|\s*echo\s+([\w.-]+)\s*$")
_PARAMETER = re.compile(
    r"(#?)([A-Za-z_]\w*|\d+|[@*#?$-])(\[[^\]]*\])?(:[-=+?]|[-=+?]|##?|%%?|//?|,,?|\^\^?|:)?(.*)", re.DOTALL
)
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
# Set on every machine, to a value of its own.
_OF_THE_MACHINE = ("HOME", "PWD", "USER", "HOSTNAME", "BASH_SOURCE", "RANDOM")


class _Evaluation:
    """Follows a script. In a branch whose condition is unknown, only unknown variables get a value."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._variables: dict[str, str] = {}
        self._characters = 0
        self.arrays: dict[str, list[str]] = {}
        self.commands: list[Command] = []
        self.assumed: list[str] = []

    def run(self, node: Any, sure: bool = True) -> Status:
        """Run a part of the script; ``sure``: it is known that the script comes here."""
        match node:
            case _Simple(words):
                return self._simple(words, sure)
            case _Not(command):
                status = self.run(command, sure)
                return None if status is None else not status
            case _Pipe(parts):
                for part in parts:
                    self.run(part, sure)
                return None
            case _Sequence(items):
                return self._sequence(items, sure)
            case _If(branches, otherwise):
                return self._if(branches, otherwise, sure)
            case _Case(word, branches):
                return self._case(word, branches, sure)
            case _For(name, words, body):
                for value in [part for word in words for part in self.expand(word)][:MOST_ROUNDS]:
                    self._assign(name, value, sure)
                    self.run(body, sure)
        return None

    def _sequence(self, items: list[tuple[str, Any]], sure: bool) -> Status:
        status: Status = True
        tested = False
        for join, node in items:
            if (join == "&&" and status is False) or (join == "||" and status is True):
                continue
            if join == "||" and status is None and not tested:
                # A command is taken to succeed.
                continue
            before = status
            status = self.run(node, sure and not (join != ";" and before is None and tested))
            if (join == "&&" and before is None and status is True) or (join == "||" and before is None and not status):
                status = None
            tested = _is_test(node)
        return status

    def _if(self, branches: list[tuple[Any, Any]], otherwise: Any, sure: bool) -> Status:
        for condition, body in branches:
            status = self.run(condition, sure)
            if status is not False:
                self.run(body, sure and status is True)
            if status is True:
                return True
            sure = sure and status is False
        self.run(otherwise, sure)
        return True

    def _case(self, word: str, branches: list[tuple[list[str], Any]], sure: bool) -> Status:
        value = "".join(self.expand(word, unset=""))
        unknown = is_unknown(value)
        for patterns, body in branches:
            if unknown:
                self.run(body, False)
            elif any(fnmatch.fnmatchcase(value, "".join(self.expand(pattern))) for pattern in patterns):
                self.run(body, sure)
                break
        return True

    def _simple(self, words: list[str], sure: bool) -> Status:
        if words and words[0].startswith("(("):
            try:
                return self._arithmetic(words[0][2:-2]) != 0
            except (ValueError, SyntaxError, ArithmeticError):
                return None
        if words and words[0] in _TESTS:
            return self._test([word for word in words[1:] if word not in ("]", "]]")], words[0] == "[[")
        if words and words[0] in _DECLARING:
            words = words[1:]
            for word in words:
                if match := _ASSIGNMENT.fullmatch(word):
                    self._set(match, sure)
            return True
        at = 0
        while at < len(words) and _ASSIGNMENT.fullmatch(words[at]):
            at += 1
        if at == len(words):
            for word in words:
                self._set(_ASSIGNMENT.fullmatch(word), sure)
            return True
        command = [part for word in words[at:] for part in self.expand(word)]
        if not command:
            return True
        if command[0] in ("true", ":", "false"):
            return command[0] != "false"
        if self.commands and _NO_PROGRAM.match(command[0]):
            # A backslash is missing at the end of the line before, or a comment stands between.
            self.commands[-1] += command
            self.assumed.append(f"{command[0]} ...: taken for the command above, to which no backslash joins it")
            return None
        # An `exit` complains of a variable that the user has yet to set, and ends nothing here.
        self.commands.append(command)
        return None

    def _set(self, match: re.Match[str] | None, sure: bool) -> None:
        assert match is not None
        name, adds, text = match[1], bool(match[2]), match[3]
        if text.startswith("("):
            if not sure and (name in self.arrays or adds):
                return
            values = [part for word in _tokens(text[1:-1]) if word != "\n" for part in self.expand(word)]
            self.arrays[name] = [*self.arrays.get(name, []), *values] if adds else values
            return
        value = " ".join(self.expand(text, splits=False))
        self._assign(name, self._variables.get(name, "") + value if adds else value, sure)

    def _assign(self, name: str, value: str, sure: bool) -> None:
        if not sure:
            if name in self._variables and not is_unknown(self._variables[name]):
                return
            if not is_unknown(value):
                self.assumed.append(f"{name}={value}: set under a condition that only the machine of the script knows")
        self._variables[name] = value

    def _test(self, words: list[str], patterns: bool) -> Status:
        if len(words) > MOST_TEST:
            return None
        for join in ("||", "-o"):
            if join in words:
                at = words.index(join)
                return _either(self._test(words[:at], patterns), self._test(words[at + 1 :], patterns))
        for join in ("&&", "-a"):
            if join in words:
                at = words.index(join)
                before, after = self._test(words[:at], patterns), self._test(words[at + 1 :], patterns)
                return _negated(_either(_negated(before), _negated(after)))
        if words and words[0] == "!":
            return _negated(self._test(words[1:], patterns))
        values = ["".join(self.expand(word, splits=False, unset="")) for word in words]
        if len(values) == 2 and values[0] == "-v":
            return values[1] in self._variables or values[1] in self.arrays
        if any(map(is_unknown, values)):
            return None
        match values:
            case [value] | ["-n", value]:
                return value != ""
            case ["-z", value]:
                return value == ""
            case [left, "=" | "==", right]:
                return fnmatch.fnmatchcase(left, right) if patterns else left == right
            case [left, "!=", right]:
                return not fnmatch.fnmatchcase(left, right) if patterns else left != right
            case [left, comparison, right] if comparison in _COMPARISONS:
                try:
                    return _COMPARISONS[comparison](int(left), int(right))
                except ValueError:
                    return None
        return None

    def expand(self, word: str, *, splits: bool = True, unset: str | None = None) -> list[str]:
        """Expand a word as it is written to the words that it becomes. ``unset``: the value of unset variables."""
        fields: list[str] = []
        current: list[str] = []
        # ``length``: characters of the word that is being made.
        begun, length = False, 0

        def add(value: str | list[str], quoted: bool) -> None:
            nonlocal begun, length
            if isinstance(value, list):
                parts = value if quoted else [word for part in value for word in _split(part) if word]
            else:
                parts = [value] if quoted or not splits else _split(value)
            for number, part in enumerate(parts):
                if number:
                    # Spaces at the beginning of an unquoted variable separate it from nothing.
                    if begun or length:
                        fields.append("".join(current))
                    current.clear()
                    begun, length = False, 0
                current.append(part)
                begun, length = begun or quoted or bool(part), length + len(part)
            self._count(sum(map(len, parts)) + len(parts), length)

        at, quoted = 0, False
        while at < len(word):
            char = word[at]
            if char == "\\" and (not quoted or word[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n")):
                add("" if word[at + 1 : at + 2] == "\n" else word[at + 1 : at + 2], True)
                at += 2
            elif char == '"':
                quoted = not quoted
                begun = True
                at += 1
            elif char == "'" and not quoted:
                end = _find(word, "'", at + 1)
                add(word[at + 1 : end], True)
                at = end + 1
            elif char == "`":
                end = _find(word, "`", at + 1)
                add(word[at : end + 1], True)
                at = end + 1
            elif char == "$":
                value, at = self._dollar(word, at, unset)
                # An empty array in quotes makes no word.
                if value == [] and quoted and not current and word[at:] == '"':
                    begun = False
                    at += 1
                    quoted = False
                    continue
                # A default in quotes is one word.
                add(value, quoted or (isinstance(value, str) and word.endswith('"}', 0, at)))
            else:
                end = at + 1
                while end < len(word) and word[end] not in "\\\"'`$":
                    end += 1
                add(word[at:end], True)
                at = end
        if begun or not splits:
            fields.append("".join(current))
        return fields

    def _count(self, characters: int, word: int) -> None:
        self._characters += characters
        if word > MOST_WORD or self._characters > MOST_CHARACTERS:
            raise ConfigError(f"{self._origin}: its variables stand for more characters than a script of settings has")

    def _dollar(self, word: str, at: int, unset: str | None) -> tuple[str | list[str], int]:
        """Return what stands for the ``$…`` at ``at``, and the place behind it."""
        if word.startswith("$((", at):
            end = _nested_end(word, at + 1)
            try:
                return str(self._arithmetic(word[at + 3 : end - 2])), end
            except (ValueError, SyntaxError, ArithmeticError):
                return word[at:end], end
        if word.startswith("$(", at):
            end = _nested_end(word, at + 1)
            # What a script prints if its probe of the machine fails, which is the usual machine.
            probe = _PROBE.search(word[at + 2 : end - 1])
            return probe[1] if probe else word[at:end], end
        if word.startswith("${", at):
            end = _nested_end(word, at + 1)
            value = self._parameter(word[at + 2 : end - 1], unset)
            return word[at:end] if value is None else value, end
        if match := re.compile(r"\$([A-Za-z_]\w*|[\d@*#?!$-])").match(word, at):
            value = self._parameter(match[1], unset)
            return match[0] if value is None else value, match.end()
        return "$", at + 1

    def _parameter(self, text: str, unset: str | None) -> str | list[str] | None:
        """Return the value of ``${text}``; None if only a running shell has it."""
        match = _PARAMETER.fullmatch(text)
        if match is None:
            return None
        length, name, index, does, operand = match.groups()
        if name in ("@", "*"):
            return []
        if index in ("[@]", "[*]"):
            values = self.arrays.get(name, [])
            return str(len(values)) if length else values if not does else None
        value = self._variables.get(name)
        if name in self.arrays:
            place = int(index[1:-1]) if index and index[1:-1].isdigit() else 0
            value = self.arrays[name][place] if place < len(self.arrays[name]) else ""
        if value is None and (name in _OF_THE_MACHINE or (not name[0].isalpha() and name[0] != "_")):
            return None if does not in (":-", "-") or name in _OF_THE_MACHINE else self._text(operand, unset)
        if does in (":-", ":=", "-", "="):
            if value or (value == "" and not does.startswith(":")):
                return value
            value = self._text(operand, unset)
            if does.endswith("="):
                self._variables[name] = value
            return value
        if does in (":+", "+"):
            return self._text(operand, unset) if value or (value == "" and does == "+") else ""
        if value is None:
            return unset
        if not does or does in (":?", "?"):
            return str(len(value)) if length else value
        if is_unknown(value):
            return None
        return _changed(value, does, self._text(operand, unset))

    def _text(self, text: str, unset: str | None) -> str:
        return " ".join(self.expand(text, splits=False, unset=unset))

    def _arithmetic(self, text: str) -> int:
        """Compute an integer. Raises ValueError, SyntaxError or ArithmeticError for text that it cannot compute."""
        text = self._text(text, None)
        tree = ast.parse(text.strip().replace("&&", " and ").replace("||", " or "), mode="eval")
        return self._number(tree.body)

    def _number(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return int(self._variables.get(name, "unset"))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self._number(left), self._number(right)
                # A shell cuts towards zero.
                sign = 1 if (a < 0) == (b < 0) else -1
                quotient = sign * (abs(a) // abs(b)) if isinstance(op, ast.Div | ast.Mod) else 0
                match op:
                    case ast.Add():
                        return a + b
                    case ast.Sub():
                        return a - b
                    case ast.Mult():
                        return a * b
                    case ast.Div():
                        return quotient
                    case ast.Mod():
                        return a - quotient * b
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                a, b = self._number(left), self._number(right)
                signs: dict[type[ast.cmpop], bool] = {
                    ast.Lt: a < b,
                    ast.LtE: a <= b,
                    ast.Gt: a > b,
                    ast.GtE: a >= b,
                    ast.Eq: a == b,
                    ast.NotEq: a != b,
                }
                return int(signs[type(op)])
        raise ValueError(f"{ast.dump(node)} is not computed")


def _either(left: Status, right: Status) -> Status:
    return True if left or right else None if left is None or right is None else False


def _negated(status: Status) -> Status:
    return None if status is None else not status


def _is_test(node: Any) -> bool:
    match node:
        case _Simple(words):
            return bool(words) and (words[0] in _TESTS or words[0].startswith("(("))
        case _Sequence(items):
            return any(_is_test(item) for _, item in items)
        case _Not(command):
            return _is_test(command)
    return False


def _split(value: str) -> list[str]:
    """Split the value of an unquoted variable at its spaces; those at its ends separate it from its neighbours."""
    if "$(" in value or "`" in value:
        return [value]
    parts = value.split()
    if not parts:
        return [""] if not value else ["", ""]
    return [*([""] if value[0].isspace() else []), *parts, *([""] if value[-1].isspace() else [])]


def _changed(value: str, does: str, operand: str) -> str | None:
    """Apply an operation of ``${name…}`` to a value; None for one that is not read."""
    match does:
        case "#" | "##":
            places = range(len(value) + 1) if does == "#" else range(len(value), -1, -1)
            return next((value[n:] for n in places if fnmatch.fnmatchcase(value[:n], operand)), value)
        case "%" | "%%":
            places = range(len(value), -1, -1) if does == "%" else range(len(value) + 1)
            return next((value[:n] for n in places if fnmatch.fnmatchcase(value[n:], operand)), value)
        case "/" | "//":
            old, _, new = operand.partition("/")
            return value.replace(old, new, -1 if does == "//" else 1) if old else value
        case "," | ",,":
            return value.lower() if does == ",," else value[:1].lower() + value[1:]
        case "^" | "^^":
            return value.upper() if does == "^^" else value[:1].upper() + value[1:]
    return None

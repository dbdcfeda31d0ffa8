"""Runs inside the sandbox: loads a program as the module `solution`, then calls a function of it or tests it.

The first line of standard input is a JSON object that says which. Results are written to standard output after `MARK`;
those of tests follow a secret. The text of this file is sent as a program, so it needs nothing but Python 3.10 and its
standard library.

Tests are rewritten by `code_tests`: a check tells how it ended by calling a method of `Judge`, which no exception
handler undoes. Where tests only call the program's functions (`main_apart`), the program runs in a process of its own:

    tests, Judge ── name or object, arguments ──> program
                 <── value, error, changed arguments ──

Other tests run in the program's process (`main`). They have builtins, modules and a unittest of their own, made before
the program is loaded, and compared values lose the program's classes, so that a program cannot change how it is judged
without searching the frames and objects of this process.
"""

import builtins

if __name__ == "__main__":
    # What the program changes in builtins must not change the functions below.
    globals()["__builtins__"] = dict(vars(builtins))

import __future__

import ast
import asyncio
import collections
import contextlib
import ctypes
import datetime
import decimal
import fractions
import hashlib
import importlib.util
import inspect
import json
import math
import operator
import os
import re
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

MARK = "\x00rl-async: "
MISSING = "missing "
# Reported if tests pass something to the program that cannot leave their process.
INSEPARABLE = "inseparable"
# Canonical values of more characters are sent as a hash.
LONGEST = 1000

# LeetCode, whose tasks have starter code, and the graders of LiveCodeBench and PRIME import these for the program.
PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""

# Modules whose functions compute values only: tests get copies, which the program cannot change.
COPIED = [
    "bisect",
    "cmath",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "re",
    "statistics",
    "string",
    "typing",
    "numpy",
    "numpy.testing",
]


class OutOfTime(BaseException):
    """The time of one check is over. Programs that catch Exception do not catch it."""


def main() -> None:
    given = json.loads(sys.stdin.readline())
    reports = os.fdopen(os.dup(1), "wb")

    def report(text: str) -> None:
        reports.write(f"\n{MARK}{text}\n".encode())
        reports.flush()

    # The program is not loaded yet, so that it has no say in this.
    if reports_missing(given, report):
        return
    module, loop = types.ModuleType("solution"), asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    space = module.__dict__
    tests = None if "name" in given else Tests(given, module, space, space.__setitem__, loop, report)
    sys.modules["solution"] = module
    if given["script"]:
        module.__name__ = "__main__"
    # The program must not find this module by its name. It stays alive, since its functions need its names.
    hidden, sys.modules["__main__"] = sys.modules["__main__"], module if given["script"] else types.ModuleType("main")
    load(given, module.__dict__)
    if tests is not None:
        tests.run()
    else:
        name, space = given["name"], module.__dict__
        function = space[name] if name in space else getattr(space["Solution"](), name)
        report(json.dumps(awaited(loop, function(*given["arguments"])), default=listed))
    sys.modules["__main__"] = hidden


def reports_missing(given: dict[str, Any], report: Callable[[str], None]) -> bool:
    """Report the first module of the tests that is not installed; return whether there is one."""
    missing = [name for name in given["modules"] if name != "pytest" and importlib.util.find_spec(name) is None]
    if missing:
        report(given["secret"] + MISSING + missing[0])
    return bool(missing)


def load(given: dict[str, Any], space: dict[str, Any]) -> None:
    """Run the program. Modules imported for it become builtins, so its own names come first and stay apart."""
    prelude: dict[str, Any] = {}
    exec(PRELUDE, prelude)
    for line in given["imports"]:
        if importlib.util.find_spec(line["module"]) is not None:
            exec(line["source"], prelude)
    for name, value in prelude.items():
        vars(builtins).setdefault(name, value)
    space["__builtins__"] = builtins
    program = given["program"]
    try:
        exec(compile(program, "solution.py", "exec"), space)
    except NameError:
        # Annotations may name classes that the tests define, as LeetCode's ListNode.
        exec(compile(program, "solution.py", "exec", __future__.annotations.compiler_flag), space)


def listed(value: Any) -> Any:
    """Return a NumPy array as a list, or a scalar as a number, for JSON."""
    return value.tolist()


def passes(check: Callable[[], object], seconds: float) -> bool:
    """Whether a check ends in time and raises nothing."""

    def out_of_time(*_: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        check()
    except BaseException:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return True


class Opaque(Exception):
    """A value has no canonical form."""


def canonical(value: Any) -> str:
    """Write a value so that equal values, as Python compares them, are written alike. Raises Opaque."""
    kind = type(value)
    if value is None:
        return "N"
    if kind in NUMBERS:
        return _number(value)
    if kind is str:
        return repr(value)
    if kind is bytes or kind is bytearray:
        return "b" + bytes(value).hex()
    if kind is list or kind is tuple or kind is collections.deque:
        return f"{kind.__name__}[{','.join(map(canonical, value))}]"
    if kind in SETS:
        return f"set[{','.join(sorted(map(canonical, value)))}]"
    if kind in MAPPINGS:
        pairs = sorted(f"{canonical(key)}:{canonical(item)}" for key, item in value.items())
        return f"dict[{','.join(pairs)}]"
    # NumPy's numbers have an empty shape.
    if getattr(value, "shape", None) == ():
        return canonical(value.item())
    raise Opaque


NUMBERS = (bool, int, float, complex, fractions.Fraction, decimal.Decimal)
MAPPINGS: tuple[type, ...] = (dict, collections.defaultdict, collections.OrderedDict, collections.Counter)
SETS: tuple[type, ...] = (set, frozenset, type({}.keys()), type({}.items()))


def _number(value: Any) -> str:
    if type(value) is complex:
        if value.imag:
            return f"c{_number(value.real)},{_number(value.imag)}"
        value = value.real
    try:
        over, under = value.as_integer_ratio() if type(value) is not bool else (int(value), 1)
    except (OverflowError, ValueError):
        # Infinities are equal to themselves, and a NaN to nothing.
        if value != value:
            raise Opaque from None
        return str(float(value))
    return f"{over:x}/{under:x}"


def shortened(text: str) -> str:
    """Return a canonical value, or the hash of a long one."""
    return text if len(text) <= LONGEST else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "sub": operator.sub,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "xor": operator.xor,
    "in": lambda item, container: item in container,
    "not in": lambda item, container: item not in container,
}
# Flags of types that were made at run time, and of types that cannot be changed.
HEAP, IMMUTABLE = 1 << 9, 1 << 8
_flags = type.__dict__["__flags__"].__get__
_class_name = type.__dict__["__name__"].__get__
_bases = type.__dict__["__mro__"].__get__
# Each returns a value of a built-in class from one of a class that is made from it.
PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    list: list.copy,
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    dict: dict.copy,
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}


class Judge:
    """The functions that checks are rewritten to. Reports of a check have the number of the statement or test."""

    def __init__(self, report: Callable[[str], None], mentioned: list[str]) -> None:
        self.part = -1
        self._report, self._mentioned = report, set(mentioned)
        self._told = set[str]()
        # Classes that are here before the program, with how their objects are compared.
        self._known = {kind: kind.__eq__ for kind in _classes()}

    def names(self) -> dict[str, Any]:
        """Return the functions by the names that rewritten tests call."""
        return {
            "__seen__": self.seen,
            "__same__": self.same,
            "__truth__": self.truth,
            "__guard__": self.guard,
            "__fail__": self.fail,
            "__ran__": self.ran,
            "__compare__": self.compare,
            "__arithmetic__": self.arithmetic,
        }

    def tell(self, *what: Any) -> None:
        """Report something of the current part, once."""
        # Written without json, which the program may have changed.
        text = repr([self.part, *what])
        if text not in self._told:
            self._told.add(text)
            self._report(text)

    def seen(self, number: int, value: Any) -> None:
        """Report a value that is compared outside."""
        value, foreign = self.cleaned(value)
        try:
            if foreign:
                raise Opaque
            found = [canonical(value)]
        except Opaque:
            found = self._single(value)
        self.tell("seen", number, list(map(shortened, found)))

    def _single(self, value: Any) -> list[str]:
        """A NumPy array of one element equals that element, and a list of it."""
        if getattr(value, "size", None) == 1 and (_flags(type(value)) & IMMUTABLE or not _flags(type(value)) & HEAP):
            try:
                return [canonical(value.item()), canonical(value.tolist())]
            except Opaque:
                return []
        return []

    def same(self, left: Any, right: Any) -> None:
        """Check that two values are equal."""
        self._check(self.compare(("eq",), left, right))

    def truth(self, value: Any) -> None:
        """Check that a value is true. Coroutines and generators always are, so they count as no check."""
        if is_lazy(value) or (isinstance(value, RemoteObject) and value._lazy):
            return
        self._check(value)

    def _check(self, value: Any) -> None:
        if not value:
            self.fail()
        self.tell("ok")

    def guard(self, value: Any) -> Any:
        """Count a condition that a test fails by, or an error that it waits for."""
        self.tell("ok")
        return value

    def fail(self) -> None:
        """Record a failed check, which counts also if the program catches the error."""
        self.tell("failed")
        raise AssertionError

    def ran(self, function: Any, *given: Any, **named: Any) -> Any:
        """Call a check of unittest, pytest or NumPy."""
        cleaned = [self.cleaned(value) for value in given]
        foreign = [found for _, found in cleaned]
        try:
            if len(given) > 1 and any(foreign) and not self._trusted(foreign[0], foreign[1]):
                raise AssertionError
            result = function(*(value for value, _ in cleaned), **named)
        except BaseException:
            self.tell("failed")
            raise
        self.tell("ok")
        return result

    def compare(self, operations: "tuple[str, ...]", *values: Any) -> Any:
        """Return the result of a chain of comparisons."""
        result: Any = True
        for name, left, right in zip(operations, values, values[1:]):
            result = self._compared(name, left, right)
            if len(operations) > 1 and not result:
                break
        return result

    def _compared(self, name: str, left: Any, right: Any) -> Any:
        (left, ours), (right, theirs) = self.cleaned(left), self.cleaned(right)
        if (ours or theirs) and not self._trusted(ours, theirs):
            if name in ("eq", "in"):
                return False
            if name not in ("ne", "not in"):
                self.fail()
            return True
        return OPERATIONS[name](left, right)

    def arithmetic(self, name: str, left: Any, right: Any) -> Any:
        """Return a difference or the like. If a value meets an object of the program, that must not decide it."""
        (left, ours), (right, theirs) = self.cleaned(left), self.cleaned(right)
        result = OPERATIONS[name](left, right)
        if (ours or theirs) and not self.cleaned(result)[1] and not self._trusted(ours, theirs):
            self.fail()
        return result

    def _trusted(self, ours: "list[Any]", theirs: "list[Any]") -> bool:
        """Whether the program's objects may decide a comparison: those of the same classes that do not equal all."""
        same = {type(value) for value in ours} == {type(value) for value in theirs}
        return same and all((value == _Stranger()) is not True for value in (*ours, *theirs))

    def cleaned(self, value: Any) -> "tuple[Any, list[Any]]":
        """Return a value with plain values instead of those of the program's classes, and the objects that are left."""
        foreign: list[Any] = []
        return self._cleaned(value, foreign, 0), foreign

    def _cleaned(self, value: Any, foreign: "list[Any]", depth: int) -> Any:
        if isinstance(value, RemoteObject) and value._plain is not None:
            value = value._plain
        kind = type(value)
        if depth > 100:
            foreign.append(value)
            return value
        if _flags(kind) & HEAP and not _flags(kind) & IMMUTABLE and self._known.get(kind) is not kind.__eq__:
            if _class_name(kind) in self._mentioned:
                if (value == _Stranger()) is True:
                    foreign.append(value)
                return value
            plain = next((PLAIN[base] for base in _bases(kind) if base in PLAIN), None)
            if plain is None:
                foreign.append(value)
                return value
            value = plain(value)
            kind = type(value)
        if kind is list or kind is tuple or kind is set or kind is frozenset or kind is collections.deque:
            items = [self._cleaned(item, foreign, depth + 1) for item in value]
            return kind(items) if any(new is not old for new, old in zip(items, value)) else value
        if kind in MAPPINGS:
            pairs = [
                (self._cleaned(key, foreign, depth + 1), self._cleaned(item, foreign, depth + 1))
                for key, item in value.items()
            ]
            changed = any(new is not old for pair, item in zip(pairs, value.items()) for new, old in zip(pair, item))
            return dict(pairs) if changed else value
        return value


def is_lazy(value: Any) -> bool:
    return inspect.iscoroutine(value) or inspect.isgenerator(value) or inspect.isasyncgen(value)


class _Stranger:
    """An object that equals no other."""


def _classes() -> Iterator[type]:
    """Yield all classes of this process."""
    found, left = set[type](), [object]
    while left:
        kind: type = left.pop()
        if kind not in found:
            found.add(kind)
            yield kind
            left += type.__subclasses__(kind)


class Space(dict[str, Any]):
    """The names of tests; those that they do not define are the program's, but for Python's own."""

    def __init__(self, program: dict[str, Any], own: set[str]) -> None:
        super().__init__()
        self._program, self._own = program, own

    def __missing__(self, name: str) -> Any:
        if name in self._own:
            raise KeyError(name)
        return self._program[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (name not in self._own and name in self._program)

    def filled(self) -> "list[str]":
        """Copy the program's names, for the bodies of classes, which look names up in plain mappings alone."""
        found = [
            name for name in self._program if name[:2] != "__" and name not in self._own and name not in self.keys()
        ]
        self.update({name: self._program[name] for name in found})
        return found


class Tests:
    """Tests that are code. Made before the program is loaded: modules and builtins are still as they should be."""

    def __init__(
        self,
        given: dict[str, Any],
        program: types.ModuleType,
        space: "dict[str, Any]",
        define: Callable[[str, Any], None],
        loop: Any,
        report: Callable[[str], None],
    ) -> None:
        """``space`` has the program's names; ``define`` gives it a name that the tests bind."""
        self._given, self._names, self._define, self._loop = given, space, define, loop
        secret = given["secret"]
        self._modules = {"solution": program, **own_modules(given["modules"], str(given["statements"]))}
        self._unittest = self._modules.get("unittest")
        self._judge = Judge(lambda text: report(secret + text), given["mentioned"])
        self._import = builtins.__import__
        prelude: dict[str, Any] = {}
        exec(PRELUDE, prelude)
        modules = {name: self._modules.get(name, value) for name, value in prelude.items() if inspect.ismodule(value)}
        typed = {name: value for name, value in prelude.items() if getattr(value, "__module__", "") == "typing"}
        own = {**vars(builtins), **self._judge.names(), "__import__": self._imported}
        self._space = Space(space, set(own) - set(given["required"]))
        own.update({name: value for name, value in {**typed, **modules}.items() if name not in own})
        # A class that is defined in tests names the module that it is defined in.
        self._module = sys.modules["hidden_tests"] = types.ModuleType("hidden_tests")
        self._statements = [(compiled(source), checked) for source, checked in given["statements"]]
        self._missing = unbound(given["program"])
        self._space.update({"__builtins__": own, "__name__": "hidden_tests"})

    def _imported(self, name: str, space: Any = None, names: Any = None, wanted: Any = (), level: int = 0) -> Any:
        found = self._modules.get(name if wanted else name.partition(".")[0])
        if found is None or level:
            return self._import(name, space, names, wanted, level)
        return found

    def run(self) -> None:
        """Run the statements in their order, then the test function. Consumes nothing; produces reports."""
        given, judge = self._given, self._judge
        if not all(name in self._names for name in given["required"]):
            return
        for number, (statement, checked) in enumerate(self._statements):
            if checked:
                judge.part = number
                if passes(lambda run=statement: self._execute(run), given["seconds"]):  # type: ignore[misc]
                    judge.tell("done")
                judge.part = -1
            else:
                self._execute(statement)
            for name in self._missing & dict.keys(self._space) - self._names.keys():
                self._define(name, self._space[name])
        if (test := given["test"]) is not None:
            judge.part = 0
            if self._run_test(test["group"], test["name"], test["unittest"]):
                judge.tell("done")

    def _execute(self, statement: "Statement") -> None:
        """Run a statement, which may await; an expression whose value is awaitable is awaited."""
        space = self._space
        filled = space.filled() if statement.has_class else []
        for code in statement.codes:
            awaited(self._loop, eval(code, space))
        for name in filled:
            if space.get(name) is self._names.get(name):
                space.pop(name, None)

    def _run_test(self, group: str, name: str, of_unittest: bool) -> bool:
        """Run a test function, or the method of the class ``group``; it fails by raising. Return whether it passed."""
        space, loop = self._space, self._loop
        if of_unittest:
            vars(self._module).update({key: space[key] for key in ("setUpModule", "tearDownModule") if key in space})
            assert self._unittest is not None
            result = self._unittest.TestResult()
            self._unittest.TestSuite([space[group](name)]).run(result)
            return bool(result.testsRun == 1 and result.wasSuccessful() and not result.skipped)
        module = types.SimpleNamespace(**{key: space[key] for key in space if key.startswith(("setup_", "teardown_"))})
        hook(module, "setup_module", module)
        if group:
            hook(space[group], "setup_class")
        for arguments in getattr(getattr(space[group], name) if group else space[name], "parameters", [{}]):
            owner = space[group]() if group else module
            function = getattr(owner, name) if group else space[name]
            hook(owner, "setup_method" if group else "setup_function", function)
            awaited(loop, function(**arguments))
            hook(owner, "teardown_method" if group else "teardown_function", function)
        if group:
            hook(space[group], "teardown_class")
        hook(module, "teardown_module", module)
        return True


class Statement(NamedTuple):
    """A statement of a test, which rewriting may have made several."""

    codes: "list[types.CodeType]"
    has_class: bool


def compiled(source: str) -> Statement:
    """Compile a test's source piece by piece, expressions apart, since their values may have to be awaited."""
    tree, flags, codes = ast.parse(source), ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, []
    for node in tree.body:
        if isinstance(node, ast.Expr):
            codes.append(compile(ast.Expression(node.value), "test.py", "eval", flags, dont_inherit=True))
        else:
            codes.append(compile(ast.Module([node], []), "test.py", "exec", flags, dont_inherit=True))
    return Statement(codes, any(isinstance(node, ast.ClassDef) for node in ast.walk(tree)))


def unbound(program: str) -> "set[str]":
    """Return names that a program uses and does not define, such as classes of a test's setup."""
    try:
        names = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return {node.id for node in names} - set(vars(builtins))


def own_modules(imported: "list[str]", text: str) -> "dict[str, types.ModuleType]":
    """Return modules for tests alone, whose code is ``text``, by name; the program gets others."""
    found: dict[str, types.ModuleType] = {}
    for name in COPIED:
        top = name.partition(".")[0]
        wanted = name in sys.modules or name in imported or (top in imported and name in text)
        if wanted and importlib.util.find_spec(top) is not None:
            original = importlib.import_module(name)
            found[name] = copy = types.ModuleType(name)
            copy.__dict__.update(vars(original))
            if top != name:
                setattr(found[top], name.rpartition(".")[2], copy)
    if "unittest" in imported:
        import unittest.mock

        # This class is imported when it is first asked for, and must not be the program's.
        unittest.IsolatedAsyncioTestCase  # noqa: B018
        for name in [name for name in sys.modules if name.partition(".")[0] == "unittest"]:
            found[name] = sys.modules.pop(name)
    if "pytest" in imported:
        found["pytest"], sys.modules["pytest"] = pytest_stand_in(Raises, Approx), pytest_stand_in(*map(_again, CLASSES))
    return found


def _again(kind: type) -> type:
    """Return a class like another, which is not changed with it."""
    return type(kind.__name__, (), {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")})


def awaited(loop: asyncio.AbstractEventLoop, value: Any) -> Any:
    """Return a value, or the result of an awaitable."""
    while inspect.isawaitable(value):

        async def wait(waiting: Any = value) -> Any:
            return await waiting

        value = loop.run_until_complete(wait())
    return value


def hook(owner: Any, name: str, *arguments: object) -> None:
    """Call a function that prepares tests or clears up after them, with as many arguments as it takes."""
    function = getattr(owner, name, None)
    if function is not None:
        function(*arguments[: len(inspect.signature(function).parameters)])


class Raises:
    """pytest.raises."""

    def __init__(self, expected: Any, match: "str | re.Pattern[str] | None" = None) -> None:
        self._expected, self._match = expected, match
        self.value: BaseException | None = None
        self.type: type[BaseException] | None = None

    def __enter__(self) -> "Raises":
        return self

    def __exit__(self, kind: "type[BaseException] | None", error: "BaseException | None", _: object) -> bool:
        if kind is None:
            raise AssertionError("did not raise")
        if not issubclass(kind, self._expected):
            return False
        self.type, self.value = kind, error
        if self._match is not None:
            self.match(self._match)
        return True

    def match(self, pattern: "str | re.Pattern[str]") -> bool:
        if not re.search(pattern, str(self.value)):
            raise AssertionError(f"{pattern} does not match {self.value}")
        return True


class Approx:
    """pytest.approx of numbers, sequences and mappings."""

    def __init__(
        self, expected: Any, rel: "float | None" = None, abs: "float | None" = None, nan_ok: bool = False
    ) -> None:
        # An absolute tolerance that is given alone replaces the relative one.
        self._rel = rel if rel is not None else (1e-6 if abs is None else 0.0)
        self._abs = 1e-12 if abs is None else abs
        self._expected, self._nan_ok = expected, nan_ok

    def __eq__(self, found: object) -> bool:
        return self._same(found, self._expected)

    __hash__ = None  # type: ignore[assignment]

    def _same(self, found: Any, expected: Any) -> bool:
        if isinstance(expected, Mapping):
            same_keys = isinstance(found, Mapping) and found.keys() == expected.keys()
            return same_keys and all(self._same(found[key], expected[key]) for key in expected)
        if isinstance(expected, (list, tuple)):
            same_length = isinstance(found, (list, tuple)) and len(found) == len(expected)
            return same_length and all(map(self._same, found, expected))
        if found == expected:
            return True
        try:
            if math.isnan(expected):
                return self._nan_ok and math.isnan(found)
            if math.isinf(expected):
                return False
            return bool(abs(found - expected) <= max(self._abs, self._rel * abs(expected)))
        except TypeError:
            return False


CLASSES = Raises, Approx


def pytest_stand_in(raises_class: Any, approx: Any) -> types.ModuleType:
    """Make the part of pytest that ground truths may use, so that no test depends on what the sandbox has installed."""
    module: Any = types.ModuleType("pytest")

    def raises(expected: Any, function: Any = None, *arguments: Any, match: Any = None, **named: Any) -> Any:
        if function is None:
            return raises_class(expected, match)
        with raises_class(expected, match) as raised:
            function(*arguments, **named)
        return raised

    def fail(reason: str = "", **_: object) -> None:
        raise AssertionError(reason)

    def parametrize(names: Any, values: Any, **_: object) -> Any:
        keys = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)
        rows = [
            dict(zip(keys, row.values if isinstance(row, Param) else row if len(keys) > 1 else [row])) for row in values
        ]
        if not rows:
            raise ValueError("parametrize without values")

        def mark(function: Any) -> Any:
            function.parameters = [{**row, **more} for more in getattr(function, "parameters", [{}]) for row in rows]
            return function

        return mark

    class Param:
        def __init__(self, *values: Any, id: object = None) -> None:
            self.values = values

    module.raises, module.approx, module.fail, module.param = raises, approx, fail, Param

    def asynchronous(function: Any = None, **_: object) -> Any:
        return function if function is not None else lambda given: given

    module.mark = types.SimpleNamespace(parametrize=parametrize, asyncio=asynchronous)
    return module


PR_SET_DUMPABLE = 4
# The program's process ends calls that take too long by itself; if it has not after so many seconds, it is killed.
LATE_S = 2.0


def main_apart() -> None:
    """Run tests in this process, and the program in another, which this one starts before it reads anything.

    The program's process cannot read the memory or the files of this one, which is not dumpable. What it prints is
    dropped, since it could read a pipe that it shares.
    """
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    (asked, ask), (answers, answer) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, asked, answer}:
            with contextlib.suppress(OSError):
                os.close(number)
        serve(os.fdopen(asked, "rb"), os.fdopen(answer, "wb"))
        os._exit(0)
    os.close(asked)
    os.close(answer)
    given = json.loads(sys.stdin.readline())
    secret = given["secret"]

    def report(text: str) -> None:
        os.write(1, f"\n{MARK}{text}\n".encode())

    if reports_missing(given, report):
        return

    def give_up() -> NoReturn:
        report(secret + INSEPARABLE)
        os._exit(0)

    program = RemoteProgram(child, ask, answers, give_up)
    module, loop = types.ModuleType("solution"), asyncio.new_event_loop()
    module.__dict__.update({name: Remote(program, {"n": name}) for name in given["names"]})
    space = {name: value for name, value in module.__dict__.items() if isinstance(value, Remote)}
    tests = Tests(given, module, space, program.define, loop, report)
    program.load(given)
    tests.run()


class Inseparable(Exception):
    """A value of the tests cannot leave their process."""


class Gone(BaseException):
    """An operation found that the program's process has ended."""


class RemoteProgram:
    """The program in its process, seen from the tests. An operation gets and returns values as `packed` writes them.

    Operations on a process that has ended raise Gone. ``give_up`` ends this process where it gets a value that cannot
    leave it: handlers in tests, and unittest's, would catch any error.
    """

    def __init__(self, child: int, ask: int, answers: int, give_up: "Callable[[], NoReturn]") -> None:
        self._child, self._ask, self._answers, self.give_up = child, ask, answers, give_up
        self._read = bytearray()
        self._objects: dict[int, RemoteObject] = {}

    def load(self, given: dict[str, Any]) -> None:
        """Run the program. Raises Gone if it fails."""
        if "error" in self._exchange(["load", given["program"], given["imports"]]):
            raise Gone

    def define(self, name: str, value: Any) -> None:
        """Give the program a module or a plain value that the tests bind to a name; keep other values from it."""
        if isinstance(value, types.ModuleType):
            self._exchange(["define", name, {"m": value.__name__}])
            return
        with contextlib.suppress(Inseparable):
            self._exchange(["define", name, packed(value, self._kept)])

    def do(self, operation: str, *given: Any, **named: Any) -> Any:
        """Return the result of an operation of `DOES` over there, or raise its error here."""
        names = list(named)
        arguments = [*given, *named.values()]
        try:
            said = [packed(value, self._kept) for value in arguments]
        except Inseparable:
            self.give_up()
        answer = self._exchange([operation, said, names])
        for place, changed in answer.get("changed", ()):
            restore(arguments[place], unpacked(changed, self._found))
        if "same" in answer:
            return arguments[answer["same"]]
        if "error" in answer:
            raise error_of(answer["error"], self._found)
        return unpacked(answer["value"], self._found)

    def _kept(self, value: Any) -> Any:
        if type(value) is Remote or isinstance(value, RemoteObject):
            return value._reference
        # Functions and types of Python's own.
        own = inspect.isbuiltin(value) and value.__module__ in ("builtins", "math")
        if own or any(value is kind for kind in OWN_TYPES):
            return {"m": value.__module__, "a": value.__name__}
        raise Inseparable

    def _found(self, reference: dict[str, Any]) -> Any:
        if "a" in reference:
            return next(kind for kind in OWN_TYPES if kind.__name__ == reference["a"])
        number = int(reference["h"])
        plain = unpacked(reference["plain"], self._found) if "plain" in reference else None
        # An object of a class that is made from a built-in one may have changed.
        if number not in self._objects or plain is not None:
            kind = RemoteIterator if reference.get("next") else RemoteObject
            self._objects[number] = kind(self, {"h": number}, bool(reference.get("lazy")), plain)
        return self._objects[number]

    def _exchange(self, request: "list[Any]") -> dict[str, Any]:
        """Send a request and return the answer. The time that is left to the running check is the program's."""
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        began = time.monotonic()
        try:
            data = json.dumps([left, *request]).encode() + b"\n"
            while data:
                data = data[os.write(self._ask, data) :]
            answer = json.loads(self._line(left + LATE_S if left else None))
        except (OSError, ValueError, RecursionError) as error:
            raise Gone from error
        finally:
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - began)))
        if not isinstance(answer, dict):
            raise Gone
        return answer

    def _line(self, within: "float | None") -> bytes:
        end = None if within is None else time.monotonic() + within
        while b"\n" not in self._read[-PIECE:]:
            left = None if end is None else end - time.monotonic()
            if (left is not None and left <= 0) or not select.select([self._answers], [], [], left)[0]:
                os.kill(self._child, signal.SIGKILL)
                raise OutOfTime
            piece = os.read(self._answers, PIECE)
            if not piece:
                raise Gone
            self._read += piece
        line, _, rest = self._read.partition(b"\n")
        self._read = rest
        return bytes(line)


PIECE = 1 << 16


class Remote:
    """A name of the program, to be called."""

    def __init__(self, program: RemoteProgram, reference: dict[str, Any]) -> None:
        self._program, self._reference = program, reference
        self.__name__ = self.__qualname__ = reference["n"]

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._program.do("call", self, *given, **named)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        self._program.give_up()


class RemoteObject:
    """An object of the program. Only another one can equal it, and its ``plain`` value what equals that."""

    def __init__(self, program: RemoteProgram, reference: dict[str, Any], lazy: bool, plain: Any) -> None:
        self._program, self._reference, self._lazy, self._plain = program, reference, lazy, plain

    def __getattr__(self, name: str) -> Any:
        return self._program.do("getattr", self, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._program.do("call", self, *given, **named)

    def __iter__(self) -> Any:
        return self._program.do("iter", self)

    def __len__(self) -> int:
        return int(self._program.do("len", self))

    def __bool__(self) -> bool:
        return bool(self._program.do("bool", self))

    def __str__(self) -> str:
        return str(self._program.do("str", self))

    def __repr__(self) -> str:
        return str(self._program.do("repr", self))

    def __getitem__(self, key: Any) -> Any:
        return self._program.do("getitem", self, key)

    def __contains__(self, item: Any) -> bool:
        return bool(self._program.do("contains", self, item))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and bool(self._program.do("eq", self, other))

    __hash__ = object.__hash__


class RemoteIterator(RemoteObject):
    """An iterator or generator of the program."""

    def __next__(self) -> Any:
        return self._program.do("next", self)


def error_of(said: Any, found: Callable[[dict[str, Any]], Any]) -> BaseException:
    """Return the error that an operation of the program raised: of the nearest class that is known here."""
    if said["late"]:
        return OutOfTime()
    for module, name in said["classes"]:
        # Errors of this file say something about the process.
        kind = getattr(sys.modules.get(module), name, None) if module != "__main__" else None
        if isinstance(kind, type) and issubclass(kind, BaseException):
            try:
                return kind(*unpacked(said["args"], found))
            except Exception:
                continue
    return RuntimeError()


def restore(value: Any, new: Any) -> None:
    """Give a container the content that the program's copy of it has by now, and those inside that have a new one."""
    if isinstance(value, list) and isinstance(new, list):
        value[:] = [_inside(old, item) for old, item in zip(value, new)] + new[len(value) :]
    elif isinstance(value, dict) and isinstance(new, dict):
        items = {key: _inside(value.get(key), item) for key, item in new.items()}
        value.clear()
        value.update(items)
    elif isinstance(value, (set, bytearray, collections.deque)) and type(value) is type(new):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(new)


def _inside(old: Any, new: Any) -> Any:
    if type(old) is not type(new) or not isinstance(old, CHANGING):
        return new
    restore(old, new)
    return old


CHANGING = (list, dict, set, bytearray, collections.deque)


def packed(value: Any, other: Callable[[Any], Any]) -> Any:
    """Write a value for JSON: a mapping says what is neither a list nor plain; ``other`` writes an unknown object."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [packed(item, other) for item in value]
    if kind in SEQUENCES:
        return {"k": kind.__name__, "v": [packed(item, other) for item in value]}
    if kind in MAPPINGS:
        return {"k": kind.__name__, "v": [[packed(key, other), packed(item, other)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {"k": kind.__name__, "v": value.hex()}
    if kind in WRITTEN:
        return {"k": kind.__name__, "v": [packed(part, other) for part in WRITTEN[kind](value)]}
    return other(value)


SEQUENCES: dict[type, Callable[[Any], Any]] = {kind: kind for kind in (tuple, set, frozenset, collections.deque)}
WRITTEN: dict[type, Callable[[Any], Any]] = {
    complex: lambda value: (value.real, value.imag),
    fractions.Fraction: lambda value: (value.numerator, value.denominator),
    decimal.Decimal: lambda value: (str(value),),
    range: lambda value: (value.start, value.stop, value.step),
    slice: lambda value: (value.start, value.stop, value.step),
    datetime.date: lambda value: (value.year, value.month, value.day),
    datetime.time: lambda value: (value.hour, value.minute, value.second, value.microsecond, value.tzinfo),
    datetime.datetime: lambda value: (*value.timetuple()[:6], value.microsecond, value.tzinfo),
    datetime.timezone: lambda value: (value.utcoffset(None),),
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
}
OWN_TYPES: tuple[Any, ...] = (bool, int, float, str, list, *SEQUENCES, dict, bytes, bytearray, complex)
KINDS: dict[str, type] = {kind.__name__: kind for kind in (*SEQUENCES, *MAPPINGS, *WRITTEN, bytes, bytearray)}


def unpacked(said: Any, found: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the value that `packed` wrote; ``found`` returns an object that a mapping refers to."""
    if isinstance(said, list):
        return [unpacked(item, found) for item in said]
    if not isinstance(said, dict):
        return said
    if "k" not in said:
        return found(said)
    kind, content = KINDS[said["k"]], said["v"]
    if kind in SEQUENCES:
        return kind(unpacked(item, found) for item in content)
    if kind in MAPPINGS:
        pairs = {unpacked(key, found): unpacked(item, found) for key, item in content}
        # A defaultdict's function stays where it is, and its pairs equal a dict's.
        return pairs if kind is collections.defaultdict else kind(pairs)
    if kind in (bytes, bytearray):
        return kind.fromhex(content)
    return kind(*(unpacked(part, found) for part in content))


DOES: dict[str, Callable[..., Any]] = {
    "call": lambda function, *given, **named: function(*given, **named),
    "getattr": getattr,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "getitem": operator.getitem,
    "contains": operator.contains,
    "eq": operator.eq,
}


def serve(requests: Any, answers: Any) -> None:
    """Run the program and do what the tests ask. Consumes a line for each request, and produces a line for each."""
    module = types.ModuleType("solution")
    asyncio.set_event_loop(asyncio.new_event_loop())
    sys.modules["solution"] = module
    # The driver's names must stay alive.
    hidden, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("main")
    space, objects, numbers = module.__dict__, list[Any](), dict[int, int]()

    def kept(value: Any) -> Any:
        if isinstance(value, (type({}.keys()), type({}.items()))):
            return packed(set(value), kept)
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            return packed(value.item(), kept)
        if isinstance(value, type) and value in OWN_TYPES:
            return {"a": value.__name__}
        base = next((base for base in type(value).__mro__ if base in PLAIN), None)
        if base in (int, float, str, bytes):
            return packed(PLAIN[base](value), kept)
        number = numbers.setdefault(id(value), len(objects))
        if number == len(objects):
            objects.append(value)
        said: dict[str, Any] = {"h": number, "next": hasattr(type(value), "__next__"), "lazy": is_lazy(value)}
        return said if base is None else {**said, "plain": packed(PLAIN[base](value), kept)}

    def found(reference: dict[str, Any]) -> Any:
        if "m" in reference:
            owner = importlib.import_module(reference["m"])
            return getattr(owner, reference["a"]) if "a" in reference else owner
        if "n" not in reference:
            return objects[reference["h"]]
        if reference["n"] not in space:
            raise NameError(f"name {reference['n']!r} is not defined")
        return space[reference["n"]]

    for line in requests:
        seconds, operation, *given = json.loads(line)
        answers.write(json.dumps(_answer(seconds, operation, given, space, kept, found)).encode() + b"\n")
        answers.flush()
    del hidden


def _answer(
    seconds: float,
    operation: str,
    given: "list[Any]",
    space: dict[str, Any],
    kept: Callable[[Any], Any],
    found: Callable[[dict[str, Any]], Any],
) -> dict[str, Any]:
    def out_of_time(*_: object) -> None:
        raise OutOfTime

    answer: dict[str, Any] = {}
    arguments: list[Any] = []
    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        if operation == "load":
            load({"program": given[0], "imports": given[1]}, space)
        elif operation == "define":
            space[given[0]] = unpacked(given[1], found)
        else:
            arguments, names = [unpacked(said, found) for said in given[0]], given[1]
            plain = arguments[: len(arguments) - len(names)]
            value = DOES[operation](*plain, **dict(zip(names, arguments[len(plain) :])))
            same = [place for place, argument in enumerate(arguments) if argument is value]
            if same and isinstance(value, CHANGING):
                answer["same"] = same[0]
            else:
                answer["value"] = packed(value, kept)
    except BaseException as error:
        classes = [[kind.__module__, kind.__name__] for kind in type(error).__mro__ if kind is not object]
        try:
            said = packed(list(error.args), kept)
        except RecursionError:
            said = []
        answer["error"] = {"classes": classes, "args": said, "late": isinstance(error, OutOfTime)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    after = {place: packed(value, kept) for place, value in enumerate(arguments) if isinstance(value, CHANGING)}
    answer["changed"] = [[place, new] for place, new in after.items() if new != given[0][place]]
    return answer

"""Runs inside the sandbox: loads a program as the module `solution`, then calls a function of it or tests it.

The first line of standard input is a JSON object that says which. Results are written to standard output after `MARK`;
those of tests follow a secret. The text of this file is sent as a program, so it needs nothing but Python 3.10 and its
standard library.

Tests are rewritten by `code_tests`: a check tells how it ended by calling a method of `Judge`, which no exception
handler undoes. Tests have builtins, modules and a unittest of their own, made before the program is loaded, and
compared values lose the program's classes, so that a program cannot change how it is judged without searching the
frames and objects of this process.
"""

import builtins

if __name__ == "__main__":
    # What the program changes in builtins must not change the functions below.
    globals()["__builtins__"] = dict(vars(builtins))

import __future__

import ast
import asyncio
import collections
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
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

MARK = "\x00rl-async: "
MISSING = "missing "
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
    for name in given["modules"]:
        if name != "pytest" and importlib.util.find_spec(name) is None:
            report(given["secret"] + MISSING + name)
            return
    module, loop = types.ModuleType("solution"), asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    tests = None if "name" in given else Tests(given, module, loop, report)
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
        if inspect.iscoroutine(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
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
        self, given: dict[str, Any], program: types.ModuleType, loop: Any, report: Callable[[str], None]
    ) -> None:
        self._given, self._program, self._loop = given, program, loop
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
        self._space = Space(program.__dict__, set(own) - set(given["required"]))
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
        if not all(name in self._program.__dict__ for name in given["required"]):
            return
        for number, (statement, checked) in enumerate(self._statements):
            if checked:
                judge.part = number
                if passes(lambda run=statement: self._execute(run), given["seconds"]):  # type: ignore[misc]
                    judge.tell("done")
                judge.part = -1
            else:
                self._execute(statement)
            for name in self._missing & dict.keys(self._space) - self._program.__dict__.keys():
                self._program.__dict__[name] = self._space[name]
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
            if space.get(name) is self._program.__dict__.get(name):
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


if __name__ == "__main__":
    main()

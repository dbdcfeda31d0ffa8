"""Hidden tests of a program as ground truths write them, and the comparison of results with expected ones.

A ground truth is parsed into one of the forms below, which docs/reference/sandbox.md lists; anything else, and anything
without a check that could fail, is a DataError. `Asserts` and `TestFunction` are code that runs beside the program.
Their checks are found and rewritten so that each tells that it ran, and how it ended: outside the sandbox, before
anything runs, ``assert add(1, 2) == 3`` becomes ``__seen__(0, add(1, 2))``, and the 3 stays here. Other checks become
calls of functions that `code_driver` defines under names such as ``__same__``."""

import ast
import builtins
import functools
import json
import keyword
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from rl_async.errors import DataError
from rl_async.files import lost_when_read
from rl_async.reward_loop.api import Conversation
from rl_async.reward_loop.scorers.code_driver import Opaque, canonical


class Call(msgspec.Struct, frozen=True):
    """A function, or method of a class Solution, gets ``arguments`` and returns ``expected``."""

    name: str
    arguments: list[Any]
    expected: Any

    checks: ClassVar[int] = 1


class Asserts(msgspec.Struct, frozen=True):
    """Statements in their order, in one process; those at the places ``checked`` are tests, which pass unless they
    raise. ``modules``: what the statements import. ``required``: names of Python's own that the program has to define.
    """

    statements: list[str]
    checked: list[int]
    modules: list[str] = []
    required: list[str] = []

    @property
    def checks(self) -> int:
        """How many tests these are."""
        return len(self.checked)


class Pair(msgspec.Struct, frozen=True):
    """A program gets ``stdin`` and prints ``stdout``, and the asserts ``after`` it hold."""

    stdin: str
    stdout: str
    after: Asserts | None = None

    checks: ClassVar[int] = 1


class TestFunction(msgspec.Struct, frozen=True):
    """A function, or a method of the class ``group``: called after the statements, it passes unless it raises."""

    statements: list[str]
    name: str
    group: str = ""
    unittest: bool = False
    modules: list[str] = []
    required: list[str] = []

    checks: ClassVar[int] = 1
    __test__: ClassVar[bool] = False


Test = Pair | Call | Asserts | TestFunction


class _Cases(msgspec.Struct, forbid_unknown_fields=True):
    """The form of PRIME's and verl's data sets."""

    inputs: list[Any] | None = None
    outputs: list[Any] | None = None
    fn_name: str | None = None
    assert_case: list[str] | None = None


class _Metadata(msgspec.Struct):
    func_name: str | None = None


class _Case(msgspec.Struct, forbid_unknown_fields=True):
    """An element of the lists of LiveCodeBench, DeepCoder and PrimeIntellect."""

    input: Any
    output: Any
    testtype: str | None = None
    type: str | None = None
    fn_name: str | None = None
    metadata: _Metadata | None = None


class _HumanEval(msgspec.Struct, forbid_unknown_fields=True):
    test: str
    entry_point: str | None = None


class _Mbpp(msgspec.Struct, forbid_unknown_fields=True):
    test_list: list[str]
    test_setup_code: str | None = None
    test_imports: list[str] | None = None
    challenge_test_list: list[str] | None = None


_STDIN, _FUNCTIONAL = {"stdin", "stdin_stdout", "standard_input"}, {"functional", "function_call", "call_based"}
_FORMS = (
    '{"inputs": [...], "outputs": [...]}, a list of {"input", "output", "testtype"}, a list of asserts, '
    "or tests as Python code"
)


def parse_tests(conversation: Conversation) -> list[Test]:
    """Return the tests of a ground truth, at least one. Raises DataError, naming row and field, if it is none."""
    row, truth = conversation.place, conversation.ground_truth
    if not truth.strip():
        raise DataError(f"{row} is empty; the scorer code needs {_FORMS}")
    try:
        value = _decoded(truth)
        if isinstance(value, dict):
            return _from_mapping(value, conversation.extra_info, row)
        if isinstance(value, list):
            return _from_list(value, conversation.extra_info, row)
    except (msgspec.ValidationError, _KeyTwice) as error:
        raise DataError(f"{row}: {error}; it may be {_FORMS}") from error
    return _from_code(truth, conversation.extra_info, row)


def starter_imports(extra: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the imports of the row's starter code, ``extra_info.starter_code``, as module and statement."""
    code = extra.get("starter_code")
    lines = code.split("\n") if isinstance(code, str) else []
    found = (re.match(r"(?:from|import)\s+(\w+)[\w.]*\s*(?:import\s+[\w, *]+|as\s+\w+)?\s*$", line) for line in lines)
    return [{"module": match[1], "source": match[0].strip()} for match in found if match]


class _KeyTwice(Exception):
    pass


def _decoded(truth: str) -> Any:
    """Return a mapping or list that is written as JSON, or as Python writes it; None for anything else.

    Raises _KeyTwice for JSON that has a key twice in one object.
    """
    if truth.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value, lost = json.loads(truth), lost_when_read(truth, digits=False)
    except (ValueError, RecursionError):
        pass
    else:
        if lost is not None:
            raise _KeyTwice(lost)
        return value
    try:
        return ast.literal_eval(truth.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _from_mapping(value: dict[str, Any], extra: Mapping[str, Any], row: str) -> list[Test]:
    if "test_list" in value:
        mbpp = msgspec.convert(value, _Mbpp)
        setup = [*(mbpp.test_imports or []), *filter(None, [mbpp.test_setup_code])]
        return _from_texts([*setup, *mbpp.test_list, *(mbpp.challenge_test_list or [])], extra, row)
    if "test" in value:
        given = msgspec.convert(value, _HumanEval)
        return _from_code(given.test, {**extra, "entry_point": given.entry_point or extra.get("entry_point")}, row)
    cases = msgspec.convert(value, _Cases)
    inputs, outputs, asserts = cases.inputs or [], cases.outputs or [], cases.assert_case or []
    if len(inputs) != len(outputs) and not (asserts and not (any(inputs) and any(outputs))):
        raise DataError(f"{row} has {len(inputs)} inputs and {len(outputs)} outputs; it needs as many")
    if asserts and not any(inputs) and not any(outputs):
        return _from_texts(asserts, extra, row)
    if not inputs:
        raise DataError(f"{row} has no tests; it may be {_FORMS}")
    if cases.fn_name:
        called = [_call(cases.fn_name, *pair, f"{row}.inputs[{n}]") for n, pair in enumerate(zip(inputs, outputs))]
        return [*called, *_from_texts(asserts, extra, row)] if asserts else _not_blank(called, row)
    if asserts and len(asserts) != len(inputs):
        raise DataError(f"{row} has {len(inputs)} inputs and {len(asserts)} assert_case; it needs as many")
    places = [(f"{row}.inputs[{n}]", f"{row}.outputs[{n}]") for n in range(len(inputs))]
    lines = [(_lines(a, p), _lines(b, q)) for a, b, (p, q) in zip(inputs, outputs, places)]
    after = [_after(text, extra, f"{row}.assert_case[{number}]") for number, text in enumerate(asserts)]
    return _not_blank([Pair(*pair, more) for pair, more in zip(lines, after or [None] * len(lines))], row)


def _after(text: str, extra: Mapping[str, Any], place: str) -> Asserts | None:
    """Return what an assert beside inputs and outputs checks; None if it checks nothing."""
    body = _parsed(text, place).body
    if not any(map(Checks(body).any, body)):
        return None
    match _from_code(text, extra, place):
        case [Asserts() as asserts]:
            return asserts
    raise DataError(f"{place} has test functions, which cannot stand beside inputs and outputs")


def _not_blank(tests: Sequence[Pair | Call], row: str) -> list[Test]:
    """Return the tests. Raises DataError if a program, or a function, that does nothing passes them all."""
    if all(map(_is_blank, tests)):
        raise DataError(f"{row} has no test: all of its outputs are blank or null, as of a program that does nothing")
    return [*tests]


def _is_blank(test: Pair | Call) -> bool:
    if isinstance(test, Call):
        return any(value is None for value in _meanings(test.expected))
    return not test.stdout.strip() and test.after is None


def _from_list(value: list[Any], extra: Mapping[str, Any], row: str) -> list[Test]:
    if not value:
        raise DataError(f"{row} is an empty list; the scorer code needs {_FORMS}")
    if all(isinstance(text, str) for text in value):
        return _from_texts(value, extra, row)
    tests = list[Pair | Call]()
    for number, case in enumerate(msgspec.convert(value, list[_Case])):
        place, kind = f"{row}[{number}]", case.testtype or case.type
        named = case.fn_name or (case.metadata.func_name if case.metadata else None)
        if kind in _FUNCTIONAL or (kind is None and named):
            name = named or _function_name(extra)
            if name is None:
                raise DataError(
                    f"{place} is functional, and no function is named: metadata.func_name, fn_name, or in extra_info "
                    "metadata.func_name, func_name, fn_name, entry_point or starter_code"
                )
            tests.append(_call(name, case.input, case.output, f"{place}.input"))
        elif kind is None or kind in _STDIN:
            tests.append(Pair(_lines(case.input, f"{place}.input"), _lines(case.output, f"{place}.output")))
        else:
            known = ", ".join(sorted(_STDIN | _FUNCTIONAL))
            raise DataError(f"{place}.{'testtype' if case.testtype else 'type'}: {kind!r:.80} is none of {known}")
    return _not_blank(tests, row)


def _function_name(extra: Mapping[str, Any]) -> str | None:
    """Return the name of the function that a row's extra_info says is tested."""
    metadata = extra.get("metadata")
    if isinstance(metadata, str):
        metadata = _decoded(metadata)
    named = [metadata.get("func_name")] if isinstance(metadata, dict) else []
    named += [extra.get(key) for key in ("func_name", "fn_name", "entry_point")]
    if isinstance(code := extra.get("starter_code"), str):
        named += [name for name in re.findall(r"^\s*(?:async\s+)?def\s+(\w+)", code, re.MULTILINE) if name[:2] != "__"]
    return next((name for name in named if isinstance(name, str) and name), None)


def _call(name: str, given: Any, expected: Any, place: str) -> Call:
    last = name.rpartition(".")[2]
    if not last.isidentifier() or keyword.iskeyword(last):
        raise DataError(f"{place}: {name!r:.80} is not the name of a function")
    return Call(last, _arguments(given, place), expected)


def _lines(value: Any, place: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        raise DataError(
            f"{place}: {value!r:.80} is neither a text nor a list of lines, as inputs and outputs without fn_name are"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: {value!r:.80} has half a character, which no program reads or prints") from error
    return value


def _arguments(value: Any, place: str) -> list[Any]:
    """Return a call's arguments: a list, or a text with one JSON value per line."""
    if isinstance(value, list):
        return value
    try:
        return [json.loads(line) for line in value.split("\n") if line.strip()]
    except (AttributeError, ValueError, RecursionError):
        raise DataError(f"{place}: {value!r:.80} is neither a list of arguments nor a JSON value per line") from None


def _from_texts(texts: Sequence[str], extra: Mapping[str, Any], row: str) -> list[Test]:
    """Take a list of asserts and of statements before them as one code. Each text must be Python by itself."""
    for number, text in enumerate(texts):
        _parsed(text, f"{row}[{number}]")
    return _from_code("\n".join(texts), extra, row)


def _parsed(text: str, place: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{place} is neither JSON in a known form nor Python: {error}; it may be {_FORMS}") from error


def _from_code(text: str, extra: Mapping[str, Any], row: str) -> list[Test]:
    """Read tests that are code: statements with asserts, HumanEval's ``check``, unittest, and pytest's functions."""
    body = [node for node in _inlined(_parsed(text, row).body) if not _runs_all_tests(node)]
    with_all_names(body)
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    entry_point = None
    if "check" in functions and not any(_calls(n, {"check"}) for n in body if n is not functions["check"]):
        entry_point = _entry_point(extra, row)
        body += _parsed(f"check({entry_point})", f"{row}: entry_point").body
    if not _uses_program(body, entry_point):
        raise DataError(f"{row} tests nothing of the program: it uses no name that it does not define itself")
    _refuse_unsupported(body, row)
    modules, required = sorted(_modules(body)), required_names(body, entry_point)
    checks = Checks(body)
    tested = {name for name, node in functions.items() if name.startswith("test") and checks.any(node)}
    statements = [node for node in body if not _is_call_without_arguments(node, tested)]
    sources = [ast.unparse(node) for node in statements]
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    checked = [n for n, node in enumerate(statements) if not isinstance(node, definitions) and checks.any(node)]
    tests: list[Test] = [Asserts(sources, checked, modules, required)] if checked else []
    for name in functions:
        if name in tested:
            _refuse_parameters(functions[name], f"{row}: {name}")
            tests.append(TestFunction(sources, name, modules=modules, required=required))
    for group, node in classes.items():
        of_unittest = _is_unittest(node, classes)
        if not of_unittest and not group.startswith("Test"):
            continue
        for name, method in _methods(node, classes).items():
            if name.startswith("test") and checks.any(method):
                _refuse_parameters(method, f"{row}: {group}.{name}")
                tests.append(TestFunction(sources, name, group, of_unittest, modules, required))
    if not tests:
        raise DataError(f"{row} has no test: neither an assert, nor a test function or class that asserts something")
    return tests


def _entry_point(extra: Mapping[str, Any], row: str) -> str:
    entry_point = extra.get("entry_point")
    if not isinstance(entry_point, str) or not entry_point.strip():
        raise DataError(
            f"{row} defines check(candidate) and calls it nowhere; name the function in extra_info.entry_point"
        )
    return entry_point.strip()


def _inlined(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, with those of ``if __name__ == "__main__"`` in its place."""
    for node in body:
        if isinstance(node, ast.If) and _is_main(node.test):
            yield from _inlined(node.body)
        else:
            yield node


def _is_main(test: ast.expr) -> bool:
    """Whether a condition is that the module is run as a script."""
    names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    operations = {type(op) for n in ast.walk(test) if isinstance(n, ast.Compare) for op in n.ops}
    return names == {"__name__"} and operations == {ast.Eq}


def _runs_all_tests(node: ast.stmt) -> bool:
    """Whether a statement calls ``unittest.main`` or ``pytest.main``: the tests are run one by one instead."""
    return isinstance(node, ast.Expr) and any(
        isinstance(call, ast.Call) and ast.unparse(call.func) in ("unittest.main", "pytest.main")
        for call in ast.walk(node)
    )


def _calls(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in names for n in ast.walk(node))


def _is_call_without_arguments(node: ast.stmt, names: set[str]) -> bool:
    """Whether a statement only calls a test function, which is run by itself."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and not call.args and not call.keywords and ast.unparse(call.func) in names


def _uses_program(body: Sequence[ast.stmt], entry_point: str | None) -> bool:
    """Whether code uses a name that neither it nor Python defines, or imports from the program.

    In an entry point, names of Python's own are the program's.
    """
    if entry_point is not None:
        used = {n.id for n in ast.walk(_parsed(entry_point, "entry_point")) if isinstance(n, ast.Name)}
        return bool(used - names_of(body).bound)
    for node in (n for statement in body for n in ast.walk(statement)):
        if isinstance(node, ast.Constant) and node.value == "solution":
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "solution":
            return True
        if isinstance(node, ast.Import) and any(a.name.partition(".")[0] == "solution" for a in node.names):
            return True
        if isinstance(node, ast.Name) and node.id in ("globals", "eval", "exec"):
            return True
    return bool(names_of(body).free)


def _modules(body: Sequence[ast.stmt]) -> set[str]:
    """Return the modules that code imports outside functions and ``try``, without the program."""
    names = set[str]()
    for node in body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - {"solution"}


_PYTEST = {"raises", "approx", "fail", "param", "mark", "main"}
_MARKS = {"parametrize", "asyncio"}
_SKIPPING = {"skip", "skipIf", "skipUnless", "skipTest", "expectedFailure", "SkipTest"}


def _refuse_unsupported(body: Sequence[ast.stmt], row: str) -> None:
    """Raise DataError, naming it, for a part of pytest or unittest that would be run otherwise than it means."""
    for node in (n for statement in body for n in ast.walk(statement)):
        name = ""
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            known = {"pytest": _PYTEST, "pytest.mark": _MARKS}.get(owner)
            if (known is not None and node.attr not in known) or (
                owner in ("unittest", "self") and node.attr in _SKIPPING
            ):
                name = f"{owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in ("pytest", "unittest"):
            names = [alias.name for alias in node.names]
            unknown = [n for n in names if (n not in _PYTEST if node.module == "pytest" else n in _SKIPPING)]
            name = f"{node.module}.{unknown[0]}" if unknown else ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("param") and node.keywords:
            name = next((f"param({word.arg}=...)" for word in node.keywords if word.arg == "marks"), "")
        if name:
            raise DataError(f"{row}: {name} is not supported in tests; pytest's {', '.join(sorted(_PYTEST))} are")


def _is_unittest(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef], depth: int = 0) -> bool:
    """Whether a class is a unittest.TestCase, itself or by classes of the same code."""
    names = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    return any(
        name in ("TestCase", "IsolatedAsyncioTestCase")
        or (name in classes and depth < len(classes) and _is_unittest(classes[name], classes, depth + 1))
        for name in names
    )


def _methods(
    node: ast.ClassDef, classes: Mapping[str, ast.ClassDef], depth: int = 0
) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return a class's methods, and those that it inherits from classes of the same code."""
    found = dict[str, ast.FunctionDef | ast.AsyncFunctionDef]()
    for base in (ast.unparse(base) for base in node.bases):
        if base in classes and depth < len(classes):
            found |= _methods(classes[base], classes, depth + 1)
    return found | {n.name: n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def _refuse_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, place: str) -> None:
    """Raise DataError for a test function with parameters that no ``parametrize`` or ``patch`` gives: fixtures; and for
    one that yields, and so does nothing when it is called.
    """
    if _yields(function.body):
        raise DataError(f"{place} yields, so that calling it runs none of it")
    taken = function.args
    named = [argument.arg for argument in (*taken.posonlyargs, *taken.args) if argument.arg != "self"]
    required = set(named[sum(map(_gives_mock, function.decorator_list)) : len(named) - len(taken.defaults)])
    required |= {a.arg for a, default in zip(taken.kwonlyargs, taken.kw_defaults) if default is None}
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize") and decorator.args:
            names = decorator.args[0]
            try:
                given = ast.literal_eval(names)
            except ValueError:
                raise DataError(f"{place}: parametrize needs its names as text, not {ast.unparse(names):.80}") from None
            required -= {n.strip() for n in (given.split(",") if isinstance(given, str) else given)}
    if required:
        raise DataError(f"{place} needs {', '.join(sorted(required))}: fixtures are not supported in tests")


def _gives_mock(decorator: ast.expr) -> bool:
    """Whether a decorator is unittest's ``patch`` or ``patch.object`` without a new object, which passes a mock."""
    if not isinstance(decorator, ast.Call):
        return False
    targets = {"patch": 1, "object": 2}.get(ast.unparse(decorator.func).rpartition(".")[2], 0)
    return len(decorator.args) == targets > 0 and not any(word.arg == "new" for word in decorator.keywords)


def _yields(body: Sequence[ast.AST]) -> bool:
    """Whether statements of a function make it a generator."""
    return any(
        isinstance(node, ast.Yield | ast.YieldFrom)
        or (not isinstance(node, _INNER) and _yields(list(ast.iter_child_nodes(node))))
        for node in body
    )


_INNER = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def same_text(found: str, expected: str) -> bool:
    """Whether two outputs have the same words on the same lines; empty lines do not count, and numbers may be close."""
    one, other = (
        [words for line in re.split(r"\r\n|\n|\r", text) if (words := re.findall(r"[^ \t\f\v]+", line))]
        for text in (found, expected)
    )
    return len(one) == len(other) and all(
        len(words) == len(others) and all(map(_same_word, words, others)) for words, others in zip(one, other)
    )


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    # Whole numbers have no tolerance.
    if "." not in expected and "e" not in expected.lower():
        return False
    if not (_NUMBER.fullmatch(found) and _NUMBER.fullmatch(expected)):
        return False
    # A number beyond all floats is not another one.
    return math.isfinite(float(expected)) and _close(float(found), float(expected))


_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)


def same_value(found: Any, expected: Any) -> bool:
    """Whether a function returned what was expected. That may be written as JSON in a text, which is then compared both
    as text and as JSON, and, as in PRIME's data, stand in a list of one.
    """
    return any(_same(found, value) for value in _meanings(expected))


def _decoded_value(text: str) -> Any:
    """Return a value that is written as JSON, or as Python prints it, such as True or ('a', 1).

    Raises what Python's readers of literals raise, and TypeError for one that JSON does not hold.
    """
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(json.dumps(ast.literal_eval(text.strip())))


def _meanings(expected: Any) -> Iterator[Any]:
    yield expected
    if isinstance(expected, list) and len(expected) == 1:
        yield from _meanings(expected[0])
    elif isinstance(expected, str):
        try:
            value = _decoded_value(expected)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return
        yield value
        if isinstance(value, list) and len(value) == 1:
            yield value[0]


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(found[key], expected[key]) for key in found)
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, int | float) and isinstance(expected, int | float):
        return found == expected or (isinstance(expected, float) and _close(found, expected))
    return bool(found == expected)


def _close(found: float, expected: float) -> bool:
    """Compare as NumPy's allclose does, which PRIME's scorer uses, and a NaN with a NaN.

    What is not finite is equal to itself alone; an integer beyond all floats is close to none.
    """
    try:
        if not (math.isfinite(found) and math.isfinite(expected)):
            return found == expected or (math.isnan(found) and math.isnan(expected))
        return abs(found - expected) <= 1e-8 + 1e-5 * abs(expected)
    except OverflowError:
        return False


FAILING = {"fail", "exit", "_exit", "quit"}
RAISING = {"raises", "assertRaises", "assertRaisesRegex"}
NOT_ABOUT_RESULTS = {"callable", "hasattr", "isfunction", "iscoroutinefunction", "isclass", "ismethod"}

# Tasks are to write functions of these names, so that tests that call them may mean the program's.
TASKS = {
    "abs",
    "bin",
    "divmod",
    "filter",
    "format",
    "hash",
    "hex",
    "max",
    "min",
    "oct",
    "pow",
    "reversed",
    "round",
    "sum",
}
BUILTINS = set(dir(builtins))

_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.In: "in",
    ast.NotIn: "not in",
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Sub: "sub",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.BitXor: "xor",
}


class Names(NamedTuple):
    """The names that tests bind, and those that they use and neither they nor Python define: the program's."""

    bound: set[str]
    free: set[str]


def names_of(body: Iterable[ast.AST]) -> Names:
    """Return the names of code; a name of a function that tasks are to write is the program's unless it is bound."""
    bound, used = set[str](), set[str]()
    for node in (n for statement in body for n in ast.walk(statement)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom) and _source(node) != "solution":
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return Names(bound, used - bound - (BUILTINS - TASKS) - {"__name__", "__file__"})


def _source(node: ast.Import | ast.ImportFrom) -> str:
    return (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name


def called(node: ast.Call) -> str:
    """Return the last part of the name of the function that is called; empty if it has none."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


class Checks:
    """Which parts of tests check something: ``checkers`` are the functions, methods and classes that do."""

    def __init__(self, body: Sequence[ast.stmt]) -> None:
        self.names = names_of(body)
        self.defined: dict[str, list[ast.AST]] = {}
        for node in (n for statement in body for n in ast.walk(statement)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.defined.setdefault(node.name, []).append(node)
        self.checkers = set[str]()
        while more := {n for n, nodes in self.defined.items() if n not in self.checkers and any(map(self.any, nodes))}:
            self.checkers |= more

    def any(self, node: ast.AST) -> bool:
        """Whether code may check something, itself or in a function that it calls."""
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Assert):
            return not self.is_settled(node.test) or self.truth(node.test) is False
        if isinstance(node, ast.Call) and (called(node) in self.checkers or self.is_check(node)):
            return True
        return any(self.any(part) for part in ast.iter_child_nodes(node))

    def is_check(self, node: ast.Call) -> bool:
        """Whether a call is of unittest's, pytest's or NumPy's checks, with arguments that are not settled."""
        name = called(node)
        if name in FAILING or name in self.defined:
            return name == "fail" and name not in self.defined
        if name in RAISING:
            return True
        given = [*node.args, *(word.value for word in node.keywords)]
        of_mock = name.endswith(("called", "called_once", "called_with", "called_once_with", "any_call", "has_calls"))
        return name.lower().startswith("assert") and (of_mock or not given or not all(map(self.is_settled, given)))

    def is_settled(self, node: ast.expr) -> bool:
        """Whether an expression does not depend on the program."""
        if self.truth(node) is not None:
            return True
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return not names - (BUILTINS - TASKS)

    def truth(self, node: ast.expr) -> bool | None:
        """Return whether an expression is always true or always false; None if that is not certain."""
        match node:
            case ast.Constant():
                return bool(node.value)
            case ast.Tuple() | ast.List() | ast.Set():
                return None if any(isinstance(e, ast.Starred) for e in node.elts) else bool(node.elts)
            case ast.Dict():
                return None if None in node.keys else bool(node.keys)
            case ast.JoinedStr() | ast.Lambda() | ast.GeneratorExp():
                return True
            case ast.ListComp():
                # A list of comparisons is true even if all of them are false.
                shown = isinstance(node.elt, ast.Compare) and not any(part.ifs for part in node.generators)
                return True if shown else None
            case ast.Name():
                # The program's function itself, which was to be called.
                return True if node.id in self.names.free else None
            case ast.UnaryOp(op=ast.Not()):
                inner = self.truth(node.operand)
                return None if inner is None else not inner
            case ast.BoolOp():
                values, decisive = [self.truth(value) for value in node.values], isinstance(node.op, ast.Or)
                if decisive in values:
                    return decisive
                return None if None in values else not decisive
            case ast.Compare(ops=[ast.Eq() | ast.LtE() | ast.GtE() | ast.Is()]):
                return True if ast.dump(node.left) == ast.dump(node.comparators[0]) else None
            case ast.Call():
                return True if called(node) in NOT_ABOUT_RESULTS - self.names.bound else None
        return None


class Rewritten(NamedTuple):
    """Statements to run, the expected results of their ``__seen__`` values by number, which stay out here, and the
    names that the tests mention: the program's classes among them are themselves tested.
    """

    statements: list[str]
    expected: dict[int, Any]
    mentioned: list[str]
    # If not None, tests only call these names of the program, so that it can run in a process of its own.
    called: list[str] | None


@functools.lru_cache(32)
def rewrite(statements: tuple[str, ...]) -> Rewritten:
    """Make the checks of tests tell what they find. Each test function of a file comes here with the whole file."""
    trees = [ast.parse(text) for text in statements]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    mentioned = {node.id for node in nodes if isinstance(node, ast.Name)}
    mentioned |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    mentioned |= {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    mentioned |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    body = [node for tree in trees for node in tree.body]
    alone = called_alone(body)
    rewriter = _Rewriter(Checks(body))
    told = [ast.unparse(ast.fix_missing_locations(rewriter.visit(tree))) for tree in trees]
    return Rewritten(told, rewriter.expected, sorted(mentioned), alone)


# Modules that tests may import where the program runs in a process of its own: none reaches into a process.
_APART = {
    *("bisect", "cmath", "collections", "collections.abc", "copy", "datetime", "decimal", "fractions", "functools"),
    *("heapq", "itertools", "json", "math", "numbers", "operator", "pytest", "re", "solution", "statistics", "string"),
    *("typing", "unittest"),
}
_INWARD = {"globals", "locals", "vars", "eval", "exec", "input", "__import__", "random", "sys", "mock", "patch"}
_INWARD |= {"redirect_stdout", "redirect_stderr", "capsys", "capfd", "monkeypatch", "getsource"}


def called_alone(body: Sequence[ast.stmt]) -> list[str] | None:
    """Return the program's names that tests use; None unless they do no more with them than call them.

    Classes of the program, other values and attributes of its names, coroutines and patches need its process.
    """
    nodes = [node for statement in body for node in ast.walk(statement)]
    names = names_of(body).free
    for node in nodes:
        match node:
            case ast.Import():
                if not all(alias.name in _APART - {"solution"} for alias in node.names):
                    return None
            case ast.ImportFrom():
                if node.level or node.module not in _APART or any(alias.name == "*" for alias in node.names):
                    return None
                if node.module == "solution":
                    names |= {alias.name for alias in node.names}
            case ast.ClassDef():
                methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
                if node not in body or not any(name.startswith("test") for name in methods):
                    return None
            case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                return None
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                if name in _INWARD:
                    return None
            case ast.Constant(value="solution"):
                return None
    passed = {id(part) for node in nodes if isinstance(node, ast.Call) for part in (node.func, *node.args)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in names:
            of_class = node.id[:1].isupper() and node.id != "Solution"
            if of_class or id(node) not in passed or not isinstance(node.ctx, ast.Load):
                return None
    return sorted(names)


def certain_checks(statements: Sequence[str], name: str = "", group: str = "") -> dict[int, set[int]]:
    """Return the numbers of ``__seen__`` that a test must reach to pass, by statement; of a test function under 0."""
    body = [ast.parse(text).body for text in statements]
    functions = {n.name: n.body for part in body for n in part if isinstance(n, ast.FunctionDef)}
    if name:
        classes = {n.name: n.body for part in body for n in part if isinstance(n, ast.ClassDef)}
        methods = {n.name: n.body for n in classes.get(group, []) if isinstance(n, ast.FunctionDef)}
        return {0: _certain((methods if group else functions).get(name, []), functions)}
    return {number: _certain(part, functions) for number, part in enumerate(body)}


def _certain(body: Sequence[ast.stmt], functions: Mapping[str, list[ast.stmt]]) -> set[int]:
    """Return the numbers in the statements before the first that may lead elsewhere, and in functions they call."""
    found = set[int]()
    for node in body:
        match node:
            case ast.Expr(ast.Call(ast.Name("__seen__"), [ast.Constant(int(number)), *_])):
                found.add(number)
            case ast.Expr(ast.Call(ast.Name(name))) if name in functions:
                found |= _certain(functions[name], {key: part for key, part in functions.items() if key != name})
            case ast.Expr() | ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Import() | ast.ImportFrom():
                pass
            case ast.FunctionDef() | ast.ClassDef() | ast.Pass():
                pass
            case _:
                break
    return found


class _Rewriter(ast.NodeTransformer):
    def __init__(self, checks: Checks) -> None:
        self.expected = dict[int, Any]()
        self._checks = checks
        # Objects of the program's classes may equal a literal by a method that is itself tested.
        self._classes = any(name[:1].isupper() for name in checks.names.free - {"Solution"})
        self._wanted_to_fail = 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if self._wanted_to_fail:
            return self.generic_visit(node)
        if self._checks.truth(node.test) is False:
            return ast.Expr(_call_node("__fail__"))
        if self._checks.is_settled(node.test):
            return node
        match node.test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                return ast.Expr(self._equal(left, right))
        return ast.Expr(_call_node("__truth__", self.visit(node.test)))

    def _equal(self, left: ast.expr, right: ast.expr) -> ast.Call:
        for value, literal in ((left, right), (right, left)):
            if self._classes and not (isinstance(value, ast.Call) and called(value)[:1].islower()):
                continue
            try:
                expected = ast.literal_eval(literal)
                canonical(expected)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, Opaque):
                continue
            number = len(self.expected)
            self.expected[number] = expected
            return _call_node("__seen__", ast.Constant(number), self.visit(value))
        return _call_node("__same__", self.visit(left), self.visit(right))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self._wanted_to_fail or not self._checks.is_check(node):
            return self.generic_visit(node)
        if called(node) in ("assertEqual", "assertEquals") and len(node.args) >= 2:
            match node.func:
                case ast.Attribute(value=ast.Name(id="self")):
                    return self._equal(node.args[0], node.args[1])
        visited = self.generic_visit(node)
        assert isinstance(visited, ast.Call)
        return ast.Call(_name("__ran__"), [visited.func, *visited.args], visited.keywords)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if not all(type(op) in _COMPARED for op in node.ops):
            return node
        operations = ast.Tuple([ast.Constant(_COMPARED[type(op)]) for op in node.ops], ast.Load())
        return _call_node("__compare__", operations, node.left, *node.comparators)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        text = isinstance(node.left, ast.JoinedStr) or (
            isinstance(node.left, ast.Constant) and isinstance(node.left.value, str | bytes)
        )
        self.generic_visit(node)
        if text or type(node.op) not in _ARITHMETIC:
            return node
        return _call_node("__arithmetic__", ast.Constant(_ARITHMETIC[type(node.op)]), node.left, node.right)

    def visit_If(self, node: ast.If) -> ast.AST:
        guards = (_fails(node.body) or _fails(node.orelse)) and not self._checks.is_settled(node.test)
        self.generic_visit(node)
        if guards:
            node.test = _call_node("__guard__", node.test)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        reached = _fails(node.body) or _fails(node.orelse)
        self.generic_visit(node)
        if reached:
            for handler in node.handlers:
                handler.body.insert(0, ast.Expr(_call_node("__guard__", ast.Constant(True))))
        return node

    def visit_TryStar(self, node: Any) -> ast.AST:
        return self.visit_Try(node)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> Any:
        contexts = [item.context_expr for item in node.items]
        raising = [call for call in contexts if isinstance(call, ast.Call) and called(call) in RAISING]
        if not raising:
            return self.generic_visit(node)
        wanted = any(_takes_asserts(call) for call in raising)
        self._wanted_to_fail += wanted
        node.body = [line for statement in node.body for line in _listed(self.visit(statement))]
        self._wanted_to_fail -= wanted
        return [node, ast.Expr(_call_node("__guard__", ast.Constant(True)))]

    def visit_AsyncWith(self, node: ast.AsyncWith) -> Any:
        return self.visit_With(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        node.body = [line for statement in node.body for line in _listed(self.visit(statement))]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = None if node.value is None else self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def _listed(visited: Any) -> list[ast.stmt]:
    return visited if isinstance(visited, list) else [visited]


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _call_node(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_name(name), list(arguments), [])


def _fails(body: Sequence[ast.stmt]) -> bool:
    """Whether statements end the test when they are reached."""
    return any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and not node.test.value)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) in FAILING)
        for node in body
    )


def _takes_asserts(node: ast.expr) -> bool:
    """Whether a ``raises`` is satisfied by a failed assert."""
    named = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return bool(named & {"AssertionError", "Exception", "BaseException"})


def required_names(body: Sequence[ast.stmt], entry_point: str | None) -> list[str]:
    """Return the names of Python's own that tests mean as the program's, which has to define them.

    Those are in the entry point, are called with literals alone, or are all that the tests use.
    """
    free, calls = names_of(body).free, dict[str, list[ast.Call]]()
    for node in (n for statement in body for n in ast.walk(statement)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in free & TASKS:
            calls.setdefault(node.func.id, []).append(node)
    meant = {name for name, nodes in calls.items() if not free - TASKS or all(map(_has_literals_alone, nodes))}
    if entry_point is not None:
        parsed = ast.walk(ast.parse(entry_point))
        meant |= {node.id for node in parsed if isinstance(node, ast.Name)} & (BUILTINS | _PRELUDE_MODULES)
    return sorted(meant)


_PRELUDE_MODULES = {
    "bisect",
    "collections",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "random",
    "re",
    "string",
    "sys",
}


def _has_literals_alone(node: ast.Call) -> bool:
    return not any(isinstance(n, ast.Name) for value in [*node.args, *node.keywords] for n in ast.walk(value))


def with_all_names(body: Sequence[ast.stmt]) -> None:
    """Give repeated test functions, classes and methods unique names, since Python would keep only the last."""
    _rename(body, "")
    for node in body:
        if isinstance(node, ast.ClassDef):
            _rename(node.body, node.name)


def _rename(body: Sequence[ast.stmt], group: str) -> None:
    found = dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.setdefault(node.name, []).append(node)
    for name, nodes in found.items():
        if not group and isinstance(nodes[0], ast.ClassDef):
            tests = name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in nodes[0].bases)
        else:
            tests = name.startswith("test")
        for number, node in enumerate(nodes[:-1] if tests else []):
            node.name = f"{name}__{number}"

"""Finds the checks in tests that are Python code, and rewrites them so that each tells that it ran, and how it ended.

Outside the sandbox, before anything runs: ``assert add(1, 2) == 3`` becomes ``__seen__(0, add(1, 2))``, and the 3 stays
here. Other checks become calls of functions that `code_driver` defines under names such as ``__same__``.
"""

import ast
import builtins
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rl_async.reward_loop.scorers.code_driver import Opaque, canonical

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
        """Whether an expression says nothing of what the program does."""
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
                # A list of truth values is true whatever they are.
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
    """Statements to run, what their ``__seen__`` values are compared with out here, by number, and the names that the
    tests mention: the program's classes among them are themselves tested.
    """

    statements: list[str]
    expected: dict[int, Any]
    mentioned: list[str]


@functools.lru_cache(32)
def rewrite(statements: tuple[str, ...]) -> Rewritten:
    """Make the checks of tests tell what they find. Each test function of a file comes here with the whole file."""
    trees = [ast.parse(text) for text in statements]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    mentioned = {node.id for node in nodes if isinstance(node, ast.Name)}
    mentioned |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    mentioned |= {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    mentioned |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    rewriter = _Rewriter(Checks([node for tree in trees for node in tree.body]))
    told = [ast.unparse(ast.fix_missing_locations(rewriter.visit(tree))) for tree in trees]
    return Rewritten(told, rewriter.expected, sorted(mentioned))


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
            return ast.Expr(_call("__fail__"))
        if self._checks.is_settled(node.test):
            return node
        match node.test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                return ast.Expr(self._equal(left, right))
        return ast.Expr(_call("__truth__", self.visit(node.test)))

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
            return _call("__seen__", ast.Constant(number), self.visit(value))
        return _call("__same__", self.visit(left), self.visit(right))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self._wanted_to_fail or not self._checks.is_check(node):
            return self.generic_visit(node)
        if called(node) in ("assertEqual", "assertEquals") and len(node.args) >= 2 and _is_self(node.func):
            return self._equal(node.args[0], node.args[1])
        visited = self.generic_visit(node)
        assert isinstance(visited, ast.Call)
        return ast.Call(_name("__ran__"), [visited.func, *visited.args], visited.keywords)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if not all(type(op) in _COMPARED for op in node.ops):
            return node
        operations = ast.Tuple([ast.Constant(_COMPARED[type(op)]) for op in node.ops], ast.Load())
        return _call("__compare__", operations, node.left, *node.comparators)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        text = isinstance(node.left, ast.JoinedStr) or (
            isinstance(node.left, ast.Constant) and isinstance(node.left.value, str | bytes)
        )
        self.generic_visit(node)
        if text or type(node.op) not in _ARITHMETIC:
            return node
        return _call("__arithmetic__", ast.Constant(_ARITHMETIC[type(node.op)]), node.left, node.right)

    def visit_If(self, node: ast.If) -> ast.AST:
        guards = (_fails(node.body) or _fails(node.orelse)) and not self._checks.is_settled(node.test)
        self.generic_visit(node)
        if guards:
            node.test = _call("__guard__", node.test)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        reached = _fails(node.body) or _fails(node.orelse)
        self.generic_visit(node)
        if reached:
            for handler in node.handlers:
                handler.body.insert(0, ast.Expr(_call("__guard__", ast.Constant(True))))
        return node

    def visit_TryStar(self, node: Any) -> ast.AST:
        return self.visit_Try(node)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> Any:
        raising = [item.context_expr for item in node.items if _raises(item.context_expr)]
        if not raising:
            return self.generic_visit(node)
        wanted = any(_takes_asserts(call) for call in raising)
        self._wanted_to_fail += wanted
        node.body = [line for statement in node.body for line in _listed(self.visit(statement))]
        self._wanted_to_fail -= wanted
        return [node, ast.Expr(_call("__guard__", ast.Constant(True)))]

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


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_name(name), list(arguments), [])


def _is_self(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self"


def _fails(body: Sequence[ast.stmt]) -> bool:
    """Whether statements end the test when they are reached."""
    return any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and not node.test.value)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) in FAILING)
        for node in body
    )


def _raises(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and called(node) in RAISING


def _takes_asserts(node: ast.expr) -> bool:
    """Whether a failed assert is what a ``raises`` waits for."""
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
    """Give repeated test functions, classes and methods, of which Python would keep the last, names of their own."""
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

"""The routes of SGLang's HTTP server, read off its source: path, methods, and the struct of the body."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tests.contracts.sglang.wheel import load


@dataclass(frozen=True)
class Route:
    """``body`` is the name of a struct of io_struct.py; empty: the route reads none."""

    methods: frozenset[str]
    body: str


def routes(folder: Path) -> dict[str, Route]:
    """Of every path; for one that two functions serve, the first, as in the server."""
    found: dict[str, Route] = {}
    files = [folder / "sglang/srt/entrypoints" / name for name in ("http_server.py", "v1_loads.py")]
    for node in [node for file in files for node in ast.parse(file.read_text()).body]:
        if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and (methods := _methods(decorator)):
                path = decorator.args[0]
                if isinstance(path, ast.Constant):
                    found.setdefault(path.value, Route(methods, _body(node)))
    return found


def refusal(folder: Path, route: Route, path: str, body: Any) -> str:
    """Why SGLang would answer 400 to this body, or which key it would overlook; empty: neither."""
    try:
        if route.body:
            struct = getattr(load(folder, "sglang.srt.managers.io_struct"), route.body)
            TypeAdapter(struct).validate_python(body)
            if unknown := set(body) - set(struct.__annotations__) - {"rid"}:  # rid: of the base class
                return f"SGLang would overlook {', '.join(unknown)}"
        if path == "/generate":
            load(folder, "sglang.api.v1.api_types").GenerateRequest.from_json_value(body)
            sampling = load(folder, "sglang.srt.sampling.sampling_params").SamplingParams(**body["sampling_params"])
            sampling.normalize(None)
            sampling.verify(vocab_size=100)
    except ValueError as error:  # pydantic's and JsonContractError are
        return f"{type(error).__name__}: {error}"
    return ""


def _methods(decorator: ast.Call) -> frozenset[str]:
    name = decorator.func.attr if isinstance(decorator.func, ast.Attribute) else ""
    if name in ("get", "post"):
        return frozenset({name.upper()})
    if name == "api_route":
        [methods] = [word.value for word in decorator.keywords if word.arg == "methods"]
        return frozenset(ast.literal_eval(methods))
    return frozenset()


def _body(function: ast.AsyncFunctionDef | ast.FunctionDef) -> str:
    """The struct in ``obj: Struct`` or ``obj: Annotated[Struct, Body()]``, perhaps optional."""
    for argument in function.args.args:
        if argument.arg == "obj" and argument.annotation is not None:
            names = [node.id for node in ast.walk(argument.annotation) if isinstance(node, ast.Name)]
            [struct] = [name for name in names if name not in ("Annotated", "Optional", "Body")]
            return struct
    return ""

"""``rl-async eval`` and ``compare``: what a model earns on held-out tasks, and whether another earns more."""

import argparse
import json
import sys
from pathlib import Path

from rl_async.errors import UserError
from rl_async.launcher.cli.options import add_config

SOLVED_HELP = "reward from which on an episode counts as passed, for pass@k (default: eval.solved)"


def add_eval(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sample eval.samples answers to each of the first eval.tasks held-out tasks (data.eval_path) from model.path, "
        "or from a model behind an OpenAI-compatible URL, and print avg@k and pass@k by data source. The run folder "
        "keeps every trajectory."
    )
    add_config(parser)
    parser.add_argument("--endpoint", metavar="URL", help="base URL of a server, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", metavar="NAME", help="the model at that server")
    parser.add_argument("--api-key-env", metavar="NAME", default="", help="environment variable with its API key")
    parser.add_argument("--solved", type=float, metavar="REWARD", help=SOLVED_HELP)
    parser.add_argument("--jsonl", type=Path, metavar="FILE", help="also write a line of JSON per episode, and role")
    parser.set_defaults(command=_evaluate, steady=True, fail=parser.error)


def _evaluate(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load import load_config
    from rl_async.launcher.plan.user_code import check_user_code
    from rl_async.launcher.sources.fetch import fetch_held_out, fetch_sources

    _check_place(arguments.jsonl)
    config = load_config(arguments.config, [*_endpoint(arguments), *arguments.overrides])
    check_user_code(config)
    _warn_of_greedy(config.eval.samples, config.eval.temperature)
    solved = config.eval.solved if arguments.solved is None else arguments.solved
    told = arguments.config, solved, arguments.jsonl
    if config.eval.endpoint is not None:
        from rl_async.launcher.runs.evaluate_endpoint import evaluate_endpoint

        return evaluate_endpoint(fetch_held_out(config), config.eval.endpoint, *told)
    from rl_async.launcher.runs.evaluate import evaluate

    return evaluate(fetch_sources(config), *told)


def _check_place(jsonl: Path | None) -> None:
    """Raise UserError if the folder is missing or the file is one: it is written at the end, after minutes or hours."""
    if jsonl is not None and not jsonl.parent.is_dir():
        raise UserError(f"--jsonl: there is no folder {jsonl.parent}; make it, or choose another")
    if jsonl is not None and jsonl.is_dir():
        raise UserError(f"--jsonl: {jsonl} is a folder; name a file")


def _warn_of_greedy(samples: int, temperature: float) -> None:
    """Say in one line that several samples are of no use where all are alike."""
    if samples > 1 and temperature == 0:
        print(
            f"eval.samples={samples}: at eval.temperature=0 all answers to a task are alike, so pass@k is pass@1; "
            "set e.g. eval.temperature=1.0",
            file=sys.stderr,
        )


def _endpoint(arguments: argparse.Namespace) -> list[str]:
    """Return the keys of the config for which the options stand."""
    given = {"url": arguments.endpoint, "model": arguments.model, "api_key_env": arguments.api_key_env or None}
    if arguments.endpoint and not arguments.model:
        arguments.fail("--endpoint needs --model, the name of the model at that server")
    if not arguments.endpoint and any(given.values()):
        arguments.fail("--model and --api-key-env belong to --endpoint; a folder is given as model.path=FOLDER")
    return [f"eval.endpoint.{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items() if value]


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare two evaluations task by task: of two runs, of two versions of one, or of what `rl-async eval` wrote. "
        "p is the probability of a change of the mean at least as large if it were chance (a paired randomization "
        "test); below it stand the tasks that changed most, the worst first."
    )
    for name in ("before", "after"):
        parser.add_argument(name, metavar=name.upper(), help="RUN, RUN@VERSION (default: its newest) or FILE.jsonl")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.set_defaults(command=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    import msgspec
    from rich.console import Console

    from rl_async.launcher.evaluation.compare import compare
    from rl_async.launcher.evaluation.recorded import read_evaluation
    from rl_async.launcher.evaluation.tables import print_comparison

    if arguments.before == arguments.after:
        raise UserError(
            f"{arguments.before} is compared with itself; name two evaluations, such as RUN@VERSION and RUN"
        )
    comparison = compare(read_evaluation(arguments.before), read_evaluation(arguments.after))
    if arguments.json:
        print(msgspec.json.encode(comparison).decode())
    else:
        print_comparison(comparison, Console())
    return 0

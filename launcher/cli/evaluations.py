"""``rl-async eval`` and ``compare``: what a model earns on held-out tasks, and whether another earns more."""

import argparse
from pathlib import Path

from rl_async.launcher.cli.options import add_config

SOLVED_HELP = "reward from which on an episode counts as passed, for pass@k (default: 1)"


def add_eval(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sample eval.samples answers to each of the first eval.tasks held-out tasks (data.eval_path) from model.path, "
        "and print avg@k and pass@k by data source. The run folder keeps every trajectory."
    )
    add_config(parser)
    parser.add_argument("--solved", type=float, default=1.0, metavar="REWARD", help=SOLVED_HELP)
    parser.add_argument("--jsonl", type=Path, metavar="FILE", help="also write a line of JSON per episode, and role")
    parser.set_defaults(command=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load.loader import load_config
    from rl_async.launcher.plan.user_code import check_user_code
    from rl_async.launcher.runs.evaluate import evaluate
    from rl_async.launcher.sources.fetch import fetch_sources

    config = load_config(arguments.config, arguments.overrides)
    check_user_code(config)
    return evaluate(fetch_sources(config), arguments.config, arguments.solved, arguments.jsonl)


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare two evaluations task by task: of two runs, of two steps of one, or of what `rl-async eval` evaluated. "
        "p is the probability of a change of the mean at least as large if it were chance (a paired randomization "
        "test); below it stand the tasks that changed most, the worst first."
    )
    for name in ("before", "after"):
        parser.add_argument(name, metavar=name.upper(), help="RUN or RUN@STEP; without a step, its newest evaluation")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.set_defaults(command=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    import msgspec
    from rich.console import Console

    from rl_async.launcher.evaluation.compare import compare
    from rl_async.launcher.evaluation.recorded import read_evaluation
    from rl_async.launcher.evaluation.tables import print_comparison

    comparison = compare(read_evaluation(arguments.before), read_evaluation(arguments.after))
    if arguments.json:
        print(msgspec.json.encode(comparison).decode())
    else:
        print_comparison(comparison, Console())
    return 0

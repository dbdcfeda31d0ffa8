"""``rl-async reward ...``: commands about rewards."""

import argparse
from pathlib import Path

from rl_async.launcher.cli.options import add_overrides


def add_reward_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    test = commands.add_parser("test", help="score answers without a run, and say what was extracted and why")
    test.add_argument("data", metavar="DATA", help="as data.path; with the templates that the config has for this path")
    test.add_argument(
        "--answers",
        required=True,
        type=Path,
        metavar="FILE",
        help='JSONL: {"answer": TEXT}, and "row": N if out of order',
    )
    test.add_argument("--config", metavar="NAME|PATH", help="a preset or a YAML file, for its section `reward`")
    add_overrides(test)
    test.set_defaults(command=_test)


def _test(arguments: argparse.Namespace) -> int:
    import asyncio
    import json

    from rl_async.configs.load import load_config
    from rl_async.launcher.runs.score_answers import report, score_answers
    from rl_async.launcher.watch.terminal import printable

    path = json.dumps(arguments.data, ensure_ascii=False)
    needed = [] if arguments.config else ["model.path=none", f"data.path={path}"]
    config = load_config(arguments.config, [*needed, *arguments.overrides])
    scored = asyncio.run(score_answers(config, arguments.data, arguments.answers))
    for line in report(config, scored):
        print(printable(line))
    return 0 if all(row.trajectory.scored for row in scored) else 1

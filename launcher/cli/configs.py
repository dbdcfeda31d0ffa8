"""``rl-async config ...`` and ``rl-async data ...``: commands about presets, configs and data sets."""

import argparse
import sys
from pathlib import Path

from rl_async.launcher.cli.options import add_overrides

# Projects whose settings can be read, and where their users have them.
IMPORTS = {
    "verl": "a YAML of verl's PPO trainer, or a shell script with its a.b=c arguments",
    "trl": "a YAML or JSON with the fields of TRL's GRPOConfig",
    "prime-rl": "a TOML of prime-rl's `rl` command",
    "slime": "a shell script with slime's flags",
}


def add_config_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("list", help="the presets").set_defaults(command=_list)
    show = commands.add_parser("show", help="a preset or file with every value, as a run here would have it")
    show.add_argument("config", metavar="NAME|PATH")
    add_overrides(show)
    show.set_defaults(command=_show)
    explain = commands.add_parser("explain", help="what a key or a section means")
    explain.add_argument(
        "key", metavar="KEY", nargs="?", default="", help="default: list the sections and the keys beside them"
    )
    explain.set_defaults(command=_explain)
    for name, what in IMPORTS.items():
        reader = commands.add_parser(f"from-{name}", help=f"print our config for {what}")
        reader.add_argument("file", metavar="FILE", type=Path, help=what)
        add_overrides(reader, f"further settings, as {name} has them")
        reader.set_defaults(command=_import, source=name)


def _list(arguments: argparse.Namespace) -> int:
    """Print every preset with the first line of its file, a comment."""
    from importlib import resources

    from rl_async.configs.load import preset_names

    names = preset_names()
    width = max(len(name) for name in names)
    for name in names:
        text = resources.files("rl_async.configs.presets").joinpath(f"{name}.yaml").read_text()
        comment = text.partition("\n")[0]
        print(f"{name:<{width}}  {comment.removeprefix('#').strip() if comment.startswith('#') else ''}".rstrip())
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load import dump, load_config
    from rl_async.launcher.plan.machine import settle_here

    # As a run on this machine would have it: roles that are started by hand read it from the run's folder.
    config, _ = settle_here(load_config(arguments.config, arguments.overrides), None)
    print(dump(config), end="")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from rl_async.configs.explain import explain

    print(explain(arguments.key))
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from rl_async.configs.importing.importers import SOURCES

    print(SOURCES[arguments.source](arguments.file, arguments.overrides), end="")
    return 0


def add_data_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    make = commands.add_parser("make", help="write tasks, held-out tasks and demonstrations as Parquet")
    make.add_argument(
        "name",
        metavar="NAME",
        help="calculator, shop, market, sort, code, order or sums; calculator-pairs: preference pairs",
    )
    make.add_argument("--out", type=Path, metavar="FOLDER", help="default: artifacts/TASK")
    make.set_defaults(command=_make)
    inspect = commands.add_parser("inspect", help="count and show the rows of a data set")
    inspect.add_argument(
        "path", metavar="PATH", help="as data.path: Parquet, JSONL, OWNER/NAME:SPLIT or reasoning_gym:NAME"
    )
    inspect.set_defaults(command=_inspect)
    harbor = commands.add_parser(
        "from-harbor", help="write a folder of Harbor's tasks as rows, for agent.environment=harbor:FOLDER"
    )
    harbor.add_argument("folder", metavar="FOLDER", type=Path, help="has a folder with a task.toml for each task")
    harbor.add_argument("out", metavar="OUT.jsonl", type=Path, help="for data.path; an older file is replaced")
    harbor.set_defaults(command=_from_harbor)


def _make(arguments: argparse.Namespace) -> int:
    from rl_async.agent_loop.toy_tasks import PAIRS, make_data, make_pairs

    pairs = arguments.name in PAIRS
    folder = arguments.out or Path("artifacts") / (PAIRS[arguments.name][0] if pairs else arguments.name)
    (make_pairs if pairs else make_data)(arguments.name, folder)
    print(f"wrote {', '.join(str(file) for file in sorted(folder.glob('*.parquet')))}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.sources.fetch import data_files
    from rl_async.launcher.watch.terminal import printable
    from rl_async.transfer_queue.dataset import inspect

    print(printable(inspect(data_files(arguments.path, "data.path"))))
    return 0


def _from_harbor(arguments: argparse.Namespace) -> int:
    """Write what can be played; name on standard error what cannot."""
    from rl_async.agent_loop.environments.harbor import write_rows

    written, refused = write_rows(arguments.folder, arguments.out)
    for error in refused:
        print(f"left out: {error}", file=sys.stderr)
    print(f"wrote {written} tasks to {arguments.out}, left out {len(refused)}")
    return 0

"""``rl-async engine ...``: verify an engine, and list, add and remove the engines of a running run."""

import argparse
from pathlib import Path

from rl_async.configs.engines import ENGINES
from rl_async.errors import UserError
from rl_async.launcher.cli.options import add_run
from rl_async.process.http_auth import token_from_environment


def add_engine_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser("verify", help="do its log-probabilities agree with a plain forward pass?")
    verify.epilog = "RL_ASYNC_TOKEN_FILE names the file with the engine's token: RUN/keys/engines.token in a run."
    verify.add_argument("url", metavar="URL", help="of an embedded engine, of vLLM with --enable-scale-out, or SGLang")
    verify.add_argument("--engine", choices=tuple(ENGINES), default="vllm", help="default: vllm")
    verify.add_argument("--model", type=Path, required=True, metavar="PATH", help="folder of the model it serves")
    verify.add_argument("--prompts", type=int, default=32, metavar="N", help="random prompts (default: 32)")
    verify.add_argument("--tolerance", type=float, default=1e-4, metavar="X", help="largest difference (default: 1e-4)")
    verify.set_defaults(command=_verify)
    show = commands.add_parser("list", help="the engines of a running run, which version they serve and how fast")
    add_run(show)
    show.set_defaults(command=_list)
    add = commands.add_parser("add", help="give an engine that you started to a running run")
    add_run(add)
    add.add_argument("url", metavar="URL", help="of the engine; on this machine, unless the run spans several")
    add.add_argument("--engine", choices=tuple(ENGINES), default="vllm", help="default: vllm")
    add.add_argument("--wait", type=float, default=120.0, metavar="S", help="for its first weights (default: 120)")
    add.set_defaults(command=_add)
    remove = commands.add_parser("remove", help="take an added engine away; its requests go to the others")
    add_run(remove)
    remove.add_argument("engine", metavar="ENGINE", help="its name, as `rl-async engine list` shows it")
    remove.set_defaults(command=_remove)


def _verify(arguments: argparse.Namespace) -> int:
    if not (arguments.model / "config.json").is_file():  # before seconds of imports
        raise UserError(f"--model: {arguments.model} is not the folder of a Hugging Face model: it has no config.json")
    from rl_async.launcher.cli.engine.verification import verify

    agreement = verify(
        arguments.url,
        arguments.model,
        arguments.prompts,
        arguments.tolerance,
        kind=arguments.engine,
        token=token_from_environment(),
    )
    print(agreement.text())
    return 0 if agreement.ok else 1


def _list(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.engine.membership import list_engines, table
    from rl_async.launcher.doctor.observe import observe_engines
    from rl_async.launcher.supervise.roster import FILE, read_roster

    engines = list_engines(arguments.run)
    # A run whose roles were started by hand has no launcher that lists its processes.
    processes = read_roster(arguments.run) if (arguments.run / FILE).exists() else []
    print(table(engines, observe_engines(arguments.run, engines.engines), processes))
    return 0


def _add(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.engine.membership import add_engine

    record = add_engine(arguments.run, arguments.url, arguments.engine, arguments.wait)
    print(f"{record.engine_id} serves version {record.version} and gets requests from now on")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.engine.membership import remove_engine

    remove_engine(arguments.run, arguments.engine)
    print(f"{arguments.engine} gets no more requests; you may stop its process")
    return 0

"""``rl-async launch``: train."""

import argparse
import sys

from rl_async.errors import ConfigError, UserError
from rl_async.launcher.cli.options import add_config

MODES = ("colocated", "disaggregated")
LAUNCHERS = ("local", "ray")


def add_launch(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train. Ctrl-C ends the run cleanly."
    parser.add_argument("--mode", choices=MODES, help="take turns on a device, or work side by side")
    add_config(parser)
    parser.add_argument("--name", default="", help="the run's folder below launcher.run_dir")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="continue the named run, or the newest of this config (default: a named run that did not reach its end)",
    )
    parser.add_argument("--launcher", choices=LAUNCHERS, default="local", help="where: this machine, or Ray's nodes")
    parser.add_argument("--address", default="", help="of the Ray cluster (default: the one that this machine is in)")
    parser.set_defaults(command=_launch, steady=True)


def _launch(arguments: argparse.Namespace) -> int:
    from rl_async.configs.checks import no_room, unrewarded, without_effect
    from rl_async.configs.load import load_config
    from rl_async.launcher.folder.run_folder import new_run, resumed_run, unfinished
    from rl_async.launcher.plan.environments import try_environment
    from rl_async.launcher.plan.mcp_servers import try_mcp_servers
    from rl_async.launcher.plan.user_code import check_user_code
    from rl_async.launcher.sources.fetch import fetch_sources, fetched_from

    if arguments.address and arguments.launcher != "ray":
        raise UserError("--address is the address of a Ray cluster; add --launcher ray")
    if arguments.resume is None and arguments.name:
        arguments.resume = unfinished(arguments.config, arguments.overrides, arguments.name)
        if arguments.resume:
            print(f"{arguments.name} did not reach its end: continuing it; --no-resume prevents this", flush=True)
    find = resumed_run if arguments.resume else new_run
    given, folder = find(arguments.config, arguments.overrides, mode=arguments.mode, name=arguments.name)
    if idle := without_effect(given):
        print(f"no effect with agent.gateway, whose programs play the episodes: {', '.join(idle)}", file=sys.stderr)
    if not arguments.resume and (problem := unrewarded(given)):
        raise ConfigError(problem)
    if told := no_room(given):
        print(told, file=sys.stderr)
    if arguments.launcher == "local":  # elsewhere, the nodes may have what this machine lacks
        check_user_code(given)
        for line in () if given.rollout.replay else try_mcp_servers(given.agent):
            print(line, flush=True)
    config = fetch_sources(given)
    if arguments.launcher == "local":
        try_environment(config)
    fetched = fetched_from(given, config)
    if arguments.dry_run:
        from rl_async.launcher.plan.dry_run import dry_run

        dry_run(config, folder, resume=bool(arguments.resume))
        return 0
    from rl_async.launcher.runs.launch import launch, launch_on_ray

    resume = bool(arguments.resume)
    unnamed = not (resume or load_config(arguments.config, arguments.overrides, name=arguments.name).name)
    if arguments.launcher == "ray":
        return launch_on_ray(config, folder, arguments.address, resume=resume, unnamed=unnamed, fetched=fetched)
    return launch(config, folder, resume=resume, unnamed=unnamed, fetched=fetched)

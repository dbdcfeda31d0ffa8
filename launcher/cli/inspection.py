"""``rl-async show``, ``doctor``, ``profile``, ``plan`` and ``audit``: commands that look at runs and start none."""

import argparse
from pathlib import Path

from rl_async.errors import UserError
from rl_async.launcher.cli.options import add_config, add_run


def add_show(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show the trajectories of a step; of the selected rows, the most corrected one token by token."
    add_run(parser)
    parser.add_argument("--step", type=int, help="counted from 0 (default: the newest)")
    parser.add_argument("--group", type=int, help="only the rows of this group")
    parser.add_argument("--sample", type=int, help="only this row of each group")
    parser.add_argument("--eval", action="store_true", help="what the first and last evaluation earned instead")
    parser.set_defaults(command=_show)


def _show(arguments: argparse.Namespace) -> int:
    if arguments.eval:
        from rl_async.launcher.evaluation.answers import show_evaluations

        show_evaluations(arguments.run)
        return 0
    from rl_async.launcher.watch.trajectory_view import show

    show(arguments.run, arguments.step, arguments.group, arguments.sample)
    return 0


def add_replay(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Play a recorded episode again with the answers as they were sampled, and compare what its tools, environment "
        "and rewards say now. They run as in a run, without an engine. Exit code 1: something differs."
    )
    add_run(parser)
    parser.add_argument("episode", metavar="EPISODE", help="GROUP.SAMPLE, as `rl-async show RUN` lists them")
    parser.set_defaults(command=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    import asyncio

    from rl_async.launcher.runs.replay_episode import replay_episode
    from rl_async.launcher.watch.terminal import printable

    lines, same = asyncio.run(replay_episode(arguments.run, arguments.episode))
    for line in lines:
        print(printable(line))
    return 0 if same else 1


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Diagnose a run that hangs, is slow or failed, or check this machine: docs/how-to/diagnosis.md."
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="run folder; without it, check this machine")
    parser.add_argument("--config", metavar="NAME|PATH", help="check this machine for a preset or a YAML file")
    parser.add_argument("--json", action="store_true", help="everything observed of the run, for programs")
    parser.set_defaults(command=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.run is None:
        from rl_async.launcher.doctor.machine_check import check_machine

        if arguments.json:
            raise UserError("doctor: --json needs RUN, the folder of a run")
        return check_machine(arguments.config)
    if arguments.config is not None:
        raise UserError("doctor: --config cannot be combined with RUN; a run has its own config")
    from rl_async.launcher.doctor.report import doctor

    return doctor(arguments.run, as_json=arguments.json)


def add_profile(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Record the next steps of every trainer rank of a live run (torch.profiler, for https://ui.perfetto.dev), or "
        "sample the stacks of another process (py-spy, for https://speedscope.app). Prints the files."
    )
    add_run(parser)
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="steps to record (default: 1)")
    parser.add_argument("--process", metavar="NAME", help="sample this one instead, such as worker-0 or engine-0")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="with --process (default: 10)")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="to wait for steps (default: 900)")
    parser.set_defaults(command=_profile)


def _profile(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.runs.profile import profile_steps, sample_process

    if arguments.steps < 1 or arguments.seconds <= 0:
        raise UserError("profile: --steps and --seconds must be positive")
    if arguments.process is not None:
        files = [sample_process(arguments.run, arguments.process, arguments.seconds)]
    else:
        files = profile_steps(arguments.run, arguments.steps, arguments.timeout)
    for file in files:
        print(file)
    return 0


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = "Simulate the run on N devices for each mode and split. See docs/how-to/planner.md."
    add_config(parser)
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="devices, one process each")
    parser.add_argument("--run", type=Path, help="measure costs and lengths on this run (default: assume an H100's)")
    check = "also simulate this recorded run, and print the error; may be repeated"
    parser.add_argument("--check", type=Path, action="append", default=[], metavar="RUN", help=check)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    parser.set_defaults(command=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.capacity.planner import plan_devices

    given = arguments
    return plan_devices(given.config, given.overrides, given.gpus, given.run, given.check, given.json)


def add_audit(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.set_defaults(command=_audit)


def _audit(arguments: argparse.Namespace) -> int:
    from rl_async.transfer_queue.ledger import audit

    report = audit(arguments.run)
    print(report.text())
    return 0 if report.ok else 1

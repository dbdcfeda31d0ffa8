"""The command line. Each command imports what it needs when it runs, so that ``--help`` answers at once."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_async.errors import EXIT_USER, RlAsyncError, UserError
from rl_async.launcher.cli.queue.commands import add_queue_commands

MODES = ("colocated", "disaggregated")
LAUNCHERS = ("local", "ray")
EXIT_INTERRUPTED = 130
Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. 2: a mistake of the user, 1: something failed, 130: interrupted."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    command: Command = arguments.command
    try:
        code = command(arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    except RlAsyncError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever reads, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
        return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Overrides may stand between options, which argparse alone does not allow."""
    parser = _parser()
    arguments, left = parser.parse_known_args(argv)
    if left and not hasattr(arguments, "overrides"):
        parser.error(f"unknown arguments: {' '.join(left)}")
    for word in left:
        if word.startswith("-"):
            parser.error(f"unknown option {word}")
        arguments.overrides.append(word)
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl-async", description="Asynchronous reinforcement learning.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    launch = commands.add_parser("launch", help="train", description="Train. Ctrl-C ends the run cleanly.")
    launch.add_argument("--mode", choices=MODES, help="take turns on a device, or work side by side")
    _add_config(launch)
    launch.add_argument("--name", default="", help="the run's folder below launcher.run_dir")
    launch.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    launch.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="continue the named run, or the newest of this config (default: a named run that did not reach its end)",
    )
    launch.add_argument("--launcher", choices=LAUNCHERS, default="local", help="where: this machine, or Ray's nodes")
    launch.add_argument("--address", default="", help="of the Ray cluster (default: the one that this machine is in)")
    launch.set_defaults(command=_launch)

    _add_sft(commands.add_parser("sft", help="fine-tune on conversations; or make the data and model of a preset"))

    evaluate = commands.add_parser("eval", help="mean reward of a model on the held-out tasks")
    _add_config(evaluate)
    evaluate.set_defaults(command=_evaluate)

    _add_reward_model(commands.add_parser("reward-model", help="train a reward model on preference pairs"))
    _add_config_commands(commands.add_parser("config", help="list, show and explain configs"))
    _add_data_commands(commands.add_parser("data", help="make and inspect data sets"))

    _add_show(commands.add_parser("show", help="the trajectories of a step, and why each token trained as it did"))

    _add_engine_commands(commands.add_parser("engine", help="verify an engine; list, add, remove those of a run"))

    add_queue_commands(commands.add_parser("queue", help="look into a transfer queue, act on it, or serve one alone"))

    _add_gateway(commands.add_parser("gateway", help="let agent programs play episodes of a run that is going on"))

    _add_doctor(commands.add_parser("doctor", help="who waits for whom in a run; without one: what this machine lacks"))

    _add_plan(commands.add_parser("plan", help="how to split devices between trainer and engines, by simulation"))

    export = commands.add_parser("export", help="a Hugging Face folder out of a run's checkpoint")
    export.add_argument("run", type=Path, metavar="RUN", help="run folder")
    export.add_argument("out", type=Path, metavar="OUT", help="folder to write, which must not exist")
    export.add_argument("--step", type=int, help="default: the newest checkpoint")
    export.add_argument("--critic", action="store_true", help="the critic instead of the policy, with its value head")
    export.set_defaults(command=_export)

    audit = commands.add_parser("audit", help="was every admitted sample of a run trained exactly once?")
    audit.add_argument("run", type=Path, metavar="RUN", help="run folder")
    audit.set_defaults(command=_audit)
    return parser


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, help="default: the newest")
    parser.add_argument("--group", type=int, help="only the rows of this group")
    parser.add_argument("--sample", type=int, help="only this row of each group")
    parser.description = "Of the rows asked for, the most corrected one is shown token by token."
    parser.set_defaults(command=_show)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Diagnose a run that hangs, is slow or failed; or check this machine. See docs/diagnosis.md."
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="run folder; without it, check this machine")
    parser.add_argument("--config", metavar="NAME|PATH", help="check this machine for a preset or a YAML file")
    parser.add_argument("--json", action="store_true", help="all that was seen of the run, for programs")
    parser.set_defaults(command=_doctor)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = "Simulate the run on N devices for each mode and split. See docs/planner.md."
    _add_config(parser)
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="devices, one process each")
    parser.add_argument("--run", type=Path, help="measure costs and lengths on this run (default: assume an H100's)")
    check = "also simulate this recorded run, and print the error; may be repeated"
    parser.add_argument("--check", type=Path, action="append", default=[], metavar="RUN", help=check)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    parser.set_defaults(command=_plan)


def _add_gateway(parser: argparse.ArgumentParser) -> None:
    parser.description = "An OpenAI-compatible gateway; each episode gets a base_url of its own. See docs/gateway.md."
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run that is going on")
    parser.add_argument("--host", default="", help="address to listen on (default: agent.gateway.host, or loopback)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.set_defaults(command=_gateway)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="NAME|PATH", help="a preset or a YAML file")
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help="values for config keys")


def _add_sft(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fine-tune --model on the conversations in --data and write --out; given again, an interrupted run goes on. "
        "Or, with the --config of a preset alone, make its data and warm-started model. See docs/sft.md."
    )
    add = parser.add_argument
    add("--config", metavar="NAME|PATH", help="a YAML file with a section `finetune`, or a preset")
    add("--model", metavar="PATH", help="folder of a Hugging Face causal LM (model.path)")
    add("--data", metavar="FILE", help="JSONL or Parquet with `messages` and optional `tools` (data.path)")
    add("--eval", metavar="FILE", help="conversations to measure on (data.eval_path; default: 5 %% of the data)")
    add("--out", metavar="PATH", help="folder to write (finetune.out)")
    add("--epochs", type=int, metavar="N", help="passes over the data (default: 1)")
    add("--batch-size", type=int, metavar="N", help="conversations per step (default: 32)")
    add("--learning-rate", type=float, metavar="X", help="peak of AdamW's (default: 1e-5)")
    add("--ranks", type=int, metavar="N", help="trainer processes (trainer.ranks; default: 1)")
    _add_overrides(parser)
    parser.set_defaults(command=_sft)


def _add_reward_model(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a sequence classifier with one label to tell chosen from rejected (Bradley-Terry)."
    add = parser.add_argument
    add("--pairs", required=True, metavar="FILE", help="Parquet or JSONL: chosen, rejected; optional prompt, margin")
    add("--model", required=True, metavar="PATH", help="folder to start from: a causal LM or a sequence classifier")
    add("--out", type=Path, required=True, metavar="PATH", help="folder to write, which must not exist")
    add("--epochs", type=int, default=1, metavar="N", help="passes over the pairs (default: 1)")
    add("--batch-size", type=int, default=32, metavar="N", help="pairs per step (default: 32)")
    add("--learning-rate", type=float, default=1e-5, metavar="X", help="peak of AdamW's (default: 1e-5)")
    add("--margin", type=float, default=0.0, metavar="X", help="for pairs without one of their own (default: 0)")
    add("--held-out", type=float, default=0.1, metavar="SHARE", help="prompts kept to measure accuracy (default: 0.1)")
    add("--seed", type=int, default=0, metavar="N", help="of the new head, the split and the order (default: 0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    add("--threads", type=int, default=1, metavar="N", help="torch threads on CPU (default: 1)")
    parser.set_defaults(command=_reward_model)


def _add_config_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("list", help="the presets").set_defaults(command=_config_list)
    show = commands.add_parser("show", help="a preset or file with every value")
    show.add_argument("config", metavar="NAME|PATH")
    _add_overrides(show)
    show.set_defaults(command=_config_show)
    explain = commands.add_parser("explain", help="what a key or a section means")
    explain.add_argument("key", metavar="KEY")
    explain.set_defaults(command=_config_explain)


def _add_engine_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser("verify", help="do its log-probabilities agree with a plain forward pass?")
    verify.add_argument("url", metavar="URL", help="of an embedded engine, of vLLM with --enable-scale-out, or SGLang")
    verify.add_argument("--engine", choices=("embedded", "vllm", "sglang"), default="vllm", help="default: vllm")
    verify.add_argument("--model", type=Path, required=True, metavar="PATH", help="folder of the model it serves")
    verify.add_argument("--prompts", type=int, default=32, metavar="N", help="random prompts (default: 32)")
    verify.add_argument("--tolerance", type=float, default=1e-4, metavar="X", help="largest difference (default: 1e-4)")
    verify.set_defaults(command=_engine_verify)
    show = commands.add_parser("list", help="the engines of a run that is going on, and what they serve")
    show.add_argument("run", type=Path, metavar="RUN", help="run folder")
    show.set_defaults(command=_engine_list)
    add = commands.add_parser("add", help="give an engine that you started to a run that is going on")
    add.add_argument("run", type=Path, metavar="RUN", help="run folder")
    add.add_argument("url", metavar="URL", help="of the engine; on this machine, unless the run spans several")
    add.add_argument("--engine", choices=("embedded", "vllm", "sglang"), default="vllm", help="default: vllm")
    add.add_argument("--wait", type=float, default=120.0, metavar="S", help="for its first weights (default: 120)")
    add.set_defaults(command=_engine_add)
    remove = commands.add_parser("remove", help="take an added engine away; its requests go to the others")
    remove.add_argument("run", type=Path, metavar="RUN", help="run folder")
    remove.add_argument("engine", metavar="ENGINE", help="its name, as `rl-async engine list` shows it")
    remove.set_defaults(command=_engine_remove)


def _add_data_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    make = commands.add_parser("make", help="write tasks, held-out tasks and demonstrations as Parquet")
    make.add_argument("name", metavar="NAME", help="calculator, shop or sort; calculator-pairs: preference pairs")
    make.add_argument("--out", type=Path, metavar="FOLDER", help="default: artifacts/TASK")
    make.set_defaults(command=_data_make)
    inspect = commands.add_parser("inspect", help="count and show the rows of a data set")
    inspect.add_argument("path", metavar="PATH", help="Parquet, JSONL or reasoning_gym:NAME")
    inspect.set_defaults(command=_data_inspect)


def _launch(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.folder.run_folder import new_run, resumed_run, unfinished

    if arguments.address and arguments.launcher != "ray":
        raise UserError("--address is of a Ray cluster; add --launcher ray")
    if arguments.resume is None and arguments.name:
        arguments.resume = unfinished(arguments.config, arguments.overrides, arguments.name)
        if arguments.resume:
            print(f"{arguments.name} did not reach its end: continuing it (--no-resume refuses)", flush=True)
    find = resumed_run if arguments.resume else new_run
    config, folder = find(arguments.config, arguments.overrides, mode=arguments.mode, name=arguments.name)
    if arguments.dry_run:
        from rl_async.launcher.plan.dry_run import dry_run

        dry_run(config, folder, resume=bool(arguments.resume))
        return 0
    from rl_async.launcher.runs.launch import launch, launch_on_ray

    if arguments.launcher == "ray":
        return launch_on_ray(config, folder, arguments.address, resume=bool(arguments.resume))
    return launch(config, folder, resume=bool(arguments.resume))


def _sft(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.runs.sft import sft

    return sft(arguments)


def _evaluate(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load.loader import load_config
    from rl_async.launcher.runs.evaluate import evaluate

    return evaluate(load_config(arguments.config, arguments.overrides), arguments.config)


def _reward_model(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.runs.reward_model import Request, make_reward_model

    names = Request.__dataclass_fields__
    request = Request(**{name: getattr(arguments, name) for name in names})
    make_reward_model(request, lambda line: print(line, flush=True))
    return 0


def _config_list(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.plan.dry_run import print_presets

    print_presets()
    return 0


def _config_show(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load.loader import dump, load_config

    print(dump(load_config(arguments.config, arguments.overrides)), end="")
    return 0


def _config_explain(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load.fields import explain

    print(explain(arguments.key))
    return 0


def _data_make(arguments: argparse.Namespace) -> int:
    from rl_async.agent_loop.data.tasks import PAIRS, make_data, make_pairs

    pairs = arguments.name in PAIRS
    folder = arguments.out or Path("artifacts") / (PAIRS[arguments.name][0] if pairs else arguments.name)
    (make_pairs if pairs else make_data)(arguments.name, folder)
    print(f"wrote {', '.join(str(file) for file in sorted(folder.glob('*.parquet')))}")
    return 0


def _data_inspect(arguments: argparse.Namespace) -> int:
    from rl_async.agent_loop.data.prompts import inspect

    print(inspect(arguments.path))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.watch.trajectory_view import show

    show(arguments.run, arguments.step, arguments.group, arguments.sample)
    return 0


def _gateway(arguments: argparse.Namespace) -> int:
    from rl_async.agent_loop.gateway.process import attach

    return attach(arguments.run, arguments.host, arguments.port)


def _engine_verify(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.engine.verification import verify

    agreement = verify(arguments.url, arguments.model, arguments.prompts, arguments.tolerance, kind=arguments.engine)
    print(agreement.text())
    return 0 if agreement.ok else 1


def _engine_list(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.engine.membership import list_engines, table

    print(table(list_engines(arguments.run)))
    return 0


def _engine_add(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.engine.membership import add_engine

    record = add_engine(arguments.run, arguments.url, arguments.engine, arguments.wait)
    print(f"{record.engine_id} serves version {record.version} and gets requests from now on")
    return 0


def _engine_remove(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.engine.membership import remove_engine

    remove_engine(arguments.run, arguments.engine)
    print(f"{arguments.engine} gets no more requests; stop its process when you like")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.run is None:
        from rl_async.launcher.doctor.machine_check import check_machine

        if arguments.json:
            raise UserError("doctor: --json is of a run; give its folder, or leave --json out")
        return check_machine(arguments.config)
    if arguments.config is not None:
        raise UserError("doctor: a run has its own config; leave --config out, or RUN to check this machine for it")
    from rl_async.launcher.doctor.diagnosis import doctor

    return doctor(arguments.run, as_json=arguments.json)


def _plan(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.capacity.planner import plan_devices

    given = arguments
    return plan_devices(given.config, given.overrides, given.gpus, given.run, given.check, given.json)


def _export(arguments: argparse.Namespace) -> int:
    from rl_async.trainer.checkpoints.export import export

    step = export(arguments.run, arguments.out, arguments.step, "critic" if arguments.critic else ".")
    print(f"wrote {arguments.out} from the checkpoint after step {step}")
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from rl_async.transfer_queue.reports.audit import audit

    report = audit(arguments.run)
    print(report.text())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())

"""Commands on an existing run: show and explain it, serve its page, and act on its engines, queue and gateway.

``show``, ``chat``, ``replay``, ``doctor``, ``profile``, ``plan``, ``audit``, ``docs``, ``view``, ``report``, ``trace``,
``engine``, ``queue``, ``gateway``, ``play``. The modules that do the work are imported when a command runs.
"""

import argparse
import signal
from pathlib import Path
from typing import Any

from rl_async.configs.engines import ENGINES
from rl_async.errors import EXIT_SIGNAL, UserError
from rl_async.launcher.cli.training_commands import add_config, add_overrides, add_run
from rl_async.process.http_auth import ROLES, make_tokens, token_from_environment


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
        from rl_async.insight.recorded_evaluations import show_evaluations

        show_evaluations(arguments.run)
        return 0
    from rl_async.insight.show import show

    show(arguments.run, arguments.step, arguments.group, arguments.sample)
    return 0


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Talk to a model folder, or to a run: to its current weights while it runs, else to its newest checkpoint. "
        "The run's tools answer its calls. Lines of standard input are answered one by one."
    )
    parser.add_argument("place", metavar="RUN|MODEL", help="run folder, or a model as model.path takes it")
    parser.add_argument("--config", metavar="NAME|PATH", help="a preset or a YAML file: limits and tools of a MODEL")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    parser.add_argument("--greedy", action="store_true", help="take the most likely tokens (default: as rollout does)")
    parser.add_argument("--probabilities", action="store_true", help="show each token's probability")
    add_overrides(parser, "values for config keys, such as agent.tools=[calculator]")
    parser.set_defaults(command=_chat)


def _chat(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.runs.chat import chat

    return chat(
        arguments.place,
        arguments.config,
        arguments.overrides,
        arguments.system,
        greedy=arguments.greedy,
        probabilities=arguments.probabilities,
    )


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
    from rl_async.process.role import printable

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
        from rl_async.launcher.machine_check import check_machine

        if arguments.json:
            raise UserError("doctor: --json needs RUN, the folder of a run")
        return check_machine(arguments.config)
    if arguments.config is not None:
        raise UserError("doctor: --config cannot be combined with RUN; a run has its own config")
    from rl_async.insight.doctor import doctor

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
    from rl_async.launcher.cli.live_actions import profile_steps, sample_process

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
    from rl_async.launcher.capacity import plan_devices

    return plan_devices(
        arguments.config, arguments.overrides, arguments.gpus, arguments.run, arguments.check, arguments.json
    )


def add_audit(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.set_defaults(command=_audit)


def _audit(arguments: argparse.Namespace) -> int:
    from rl_async.transfer_queue.ledger import audit

    report = audit(arguments.run)
    print(report.text())
    return 0 if report.ok else 1


def add_docs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("page", nargs="?", metavar="PAGE", help="such as docs/how-to/memory.md, or memory")
    parser.set_defaults(command=_docs)


def _docs(arguments: argparse.Namespace) -> int:
    from importlib.resources import files

    from rl_async.configs.suggestions import nearest

    # The folder is a link to the repository's, and a copy of it in a wheel.
    folder = Path(str(files("rl_async"))) / "docs"
    pages = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.md"))}
    if arguments.page is None:
        width = max(map(len, pages))
        for name, path in pages.items():
            title = path.read_text().partition("\n")[0].lstrip("# ")
            print(f"{name:{width}}  {title}")
        return 0
    asked = arguments.page.removeprefix("docs/").partition("#")[0].removesuffix(".md")
    named = [name for name in pages if asked in (name, name.rpartition("/")[2])]
    if len(named) != 1:
        either = f"either of {', '.join(named)}" if named else f"unknown page{nearest(asked, pages)}"
        raise UserError(f"docs: {arguments.page}: {either}; `rl-async docs` lists them")
    print(pages[named[0]].read_text(), end="")
    return 0


def add_view(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a page on runs, finished or running, to this machine's browser: curves, trajectories token by token, "
        "evaluations, and who waits for whom. See docs/how-to/view.md."
    )
    runs = "run folders, or folders of runs (default: runs)"
    parser.add_argument("runs", type=Path, nargs="*", default=[Path("runs")], metavar="RUN", help=runs)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="default: a free one")
    parser.set_defaults(command=_view, steady=True)


def _view(arguments: argparse.Namespace) -> int:
    from rl_async.insight.view.page import serve
    from rl_async.launcher.runs.chat import Chats

    serve(arguments.runs, arguments.port, Chats())
    return 0


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the page of a run into one file, which opens from disk: all metrics, the config, evaluations, and a "
        "bounded part of its trajectories. Read it before you send it: it says what your data and config say."
    )
    add_run(parser)
    parser.add_argument("out", type=Path, metavar="OUT.html")
    parser.set_defaults(command=_report)


def _report(arguments: argparse.Namespace) -> int:
    from rl_async.insight.view.page import write_report

    print(write_report(arguments.run, arguments.out))
    return 0


def add_trace(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write what every process of a run did, and when, as a trace for https://ui.perfetto.dev: "
        "phases, weight updates, answers, tool calls and rewards. See docs/how-to/view.md."
    )
    add_run(parser)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--steps", metavar="FROM[-TO]", help="whose episodes are in it (default: the newest 20)")
    parser.set_defaults(command=_trace)


def _trace(arguments: argparse.Namespace) -> int:
    from rl_async.insight.timeline import write_trace

    print(write_trace(arguments.run, arguments.out, _steps(arguments.steps)))
    return 0


def _steps(given: str | None) -> range | None:
    if given is None:
        return None
    first, _, last = given.partition("-")
    if not first.isdigit() or not (last or first).isdigit():
        raise UserError(f"--steps: {given!r} is no step and no range of steps such as 10-12")
    return range(int(first), int(last or first) + 1)


def add_engine_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser("verify", help="Check its log-probabilities against a plain forward pass")
    verify.epilog = "RL_ASYNC_TOKEN_FILE names the file with the engine's token: RUN/keys/engines.token in a run."
    verify.add_argument("url", metavar="URL", help="of an embedded engine, of vLLM with --enable-scale-out, or SGLang")
    verify.add_argument("--engine", choices=tuple(ENGINES), default="vllm", help="default: vllm")
    verify.add_argument("--model", type=Path, required=True, metavar="PATH", help="folder of the model it serves")
    verify.add_argument("--prompts", type=int, default=32, metavar="N", help="random prompts (default: 32)")
    verify.add_argument("--tolerance", type=float, default=1e-4, metavar="X", help="largest difference (default: 1e-4)")
    verify.set_defaults(command=_verify_engine)
    show = commands.add_parser("list", help="List the engines of a running run, their versions and speeds")
    add_run(show)
    show.set_defaults(command=_list_engines)
    add = commands.add_parser("add", help="Give an engine that you started to a running run")
    add_run(add)
    add.add_argument("url", metavar="URL", help="of the engine; on this machine, unless the run spans several")
    add.add_argument("--engine", choices=tuple(ENGINES), default="vllm", help="default: vllm")
    add.add_argument("--wait", type=float, default=120.0, metavar="S", help="for its first weights (default: 120)")
    add.set_defaults(command=_add_engine)
    remove = commands.add_parser("remove", help="Take an added engine away; its requests go to the others")
    add_run(remove)
    remove.add_argument("engine", metavar="ENGINE", help="its name, as `rl-async engine list` shows it")
    remove.set_defaults(command=_remove_engine)


def _verify_engine(arguments: argparse.Namespace) -> int:
    # The imports below take seconds.
    if not (arguments.model / "config.json").is_file():
        raise UserError(f"--model: {arguments.model} is not the folder of a Hugging Face model: it has no config.json")
    from rl_async.launcher.cli.engine_verification import verify

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


def _list_engines(arguments: argparse.Namespace) -> int:
    from rl_async.insight.doctor import observe_engines
    from rl_async.launcher.cli.live_actions import connected, engine_table
    from rl_async.process.run_files import ROSTER_FILE, read_roster

    with connected(str(arguments.run)) as queue:
        engines = queue.engines()
    # A run whose roles were started by hand has no launcher that lists its processes.
    processes = read_roster(arguments.run) if (arguments.run / ROSTER_FILE).exists() else []
    print(engine_table(engines, observe_engines(arguments.run, engines.engines), processes))
    return 0


def _add_engine(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.live_actions import add_engine

    record = add_engine(arguments.run, arguments.url, arguments.engine, arguments.wait)
    print(f"{record.engine_id} serves version {record.version} and gets requests from now on")
    return 0


def _remove_engine(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.live_actions import remove_engine

    remove_engine(arguments.run, arguments.engine)
    print(f"{arguments.engine} gets no more requests; you may stop its process")
    return 0


def add_queue_commands(parser: argparse.ArgumentParser) -> None:
    parser.description = "Inspect the transfer queue of a running run and act on it, or serve one without a run."
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    status = _queue_command(commands, "status", "Print counts by state, ages, rates and dead letters")
    status.add_argument("--json", dest="as_json", action="store_true", help="for programs")
    status.add_argument(
        "--watch", dest="every_s", type=float, nargs="?", const=2.0, metavar="S", help="again every S seconds (2)"
    )

    ls = _queue_command(commands, "ls", "List the groups that the queue holds")
    ls.add_argument(
        "--state", choices=("waiting", "leased", "ready", "reserved", "committed"), default="", help="only those"
    )
    ls.add_argument("--json", dest="as_json", action="store_true", help="one object per line")

    peek = _queue_command(commands, "peek", "Print a stored trajectory, which stays in the queue")
    peek.add_argument("group", type=int, metavar="GROUP")
    peek.add_argument("sample", type=int, nargs="?", metavar="SAMPLE", help="default: the first one stored")

    requeue = _queue_command(commands, "requeue", "Admit the task of a dead letter again")
    requeue.add_argument("group", type=int, metavar="GROUP", help="as `rl-async queue status` shows it")

    drain = _queue_command(commands, "drain", "Stop admission; admitted groups are still finished and trained")
    drain.add_argument("--undo", action="store_true", help="admit again")

    tail = _queue_command(
        commands, "tail", "Print a line of JSON for each group that is trained, as one of several readers"
    )
    tail.add_argument("--consumer", required=True, metavar="NAME", help="name under which the queue keeps the position")
    tail.add_argument("--oldest", action="store_true", help="a new consumer begins with the oldest group")
    tail.add_argument("--forget", action="store_true", help="print nothing; remove the consumer")

    export = _queue_command(commands, "export", "Write the stored rows as Parquet; they stay in the queue")
    export.add_argument("file", type=Path, metavar="FILE.parquet")

    imports = _queue_command(commands, "import", "Put an exported file into a queue")
    imports.add_argument("file", type=Path, metavar="FILE.parquet")
    imports.add_argument("--as", dest="kind", choices=("ready", "tasks"), default="ready", help="default: ready groups")
    imports.add_argument(
        "--timeout", dest="timeout_s", type=float, default=60.0, metavar="S", help="wait for room for a group (60)"
    )
    _add_queue_serve(commands.add_parser("serve", help="Serve a queue without a run"))

    keygen = commands.add_parser("keygen", help="Make the keys and tokens of a run's own processes, and of a client")
    keygen.add_argument("folder", type=Path, metavar="FOLDER", help="RUN/keys, or for queue.keys; existing ones stay")
    keygen.add_argument("--client", metavar="NAME", help="of one more client, too: FOLDER/NAME.key")
    keygen.add_argument("--role", choices=ROLES, default="worker", help="what that client may do (default: worker)")
    keygen.set_defaults(command=_keygen)


def _queue_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text)
    parser.add_argument("run", metavar="RUN", help="run folder, folder of a served queue, or its tcp://HOST:PORT")
    parser.set_defaults(command=_act_on_queue, action=name)
    return parser


def _add_queue_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve until interrupted. Producers submit tasks or groups: docs/explanation/transfer_queue.md."
    )
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="keep all of it there (default: memory)")
    parser.add_argument("--tasks", metavar="FILE", help="Parquet or JSONL in the columns of data.path (default: none)")
    parser.add_argument("--group-size", type=int, default=1, metavar="N", help="samples per task (default: 1)")
    parser.add_argument("--batch-groups", type=int, default=1, metavar="N", help="groups per batch (default: 1)")
    parser.add_argument("--max-staleness", type=int, default=1, metavar="N", help="batches ahead (default: 1)")
    parser.add_argument(
        "--lease", type=float, default=15.0, metavar="S", help="after which a silent worker is lost (default: 15)"
    )
    parser.add_argument(
        "--sampling", choices=("fifo", "freshest", "priority"), default="fifo", help="as queue.sampling (default: fifo)"
    )
    parser.add_argument("--window", type=int, default=0, metavar="N", help="as queue.window (default: none)")
    parser.add_argument("--port", type=int, default=0, help="on this machine (default: a free one)")
    parser.add_argument("--metrics-port", type=int, default=0, help="for Prometheus, on this machine (default: none)")
    parser.set_defaults(command=_serve, steady=True)


def _act_on_queue(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.live_actions import ACTIONS

    action, names = ACTIONS[arguments.action]
    return action(arguments.run, **{name: getattr(arguments, name) for name in names})


def _serve(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.cli.live_actions import serve
    from rl_async.transfer_queue.server import standalone_settings

    settings = standalone_settings(
        group_size=arguments.group_size,
        batch_groups=arguments.batch_groups,
        max_staleness=arguments.max_staleness,
        lease_s=arguments.lease,
        sampling=arguments.sampling,
        window=arguments.window,
    )
    return serve(settings, arguments.tasks, arguments.folder, arguments.port, arguments.metrics_port)


def _keygen(arguments: argparse.Namespace) -> int:
    from rl_async.transfer_queue.auth import make_client_keys, make_keys

    if arguments.client is None:
        made = [*make_keys(arguments.folder), *make_tokens(arguments.folder)]
    else:
        made = make_client_keys(arguments.folder, arguments.client, arguments.role)
    print(f"wrote {', '.join(map(str, made))}" if made else f"{arguments.folder} already has these keys")
    return 0


def add_gateway(parser: argparse.ArgumentParser) -> None:
    parser.usage = """rl-async gateway RUN [--host HOST] [--port PORT]
       rl-async gateway ls RUN [--url URL]
       rl-async gateway end RUN EPISODE [--url URL]"""
    parser.description = (
        "Add a gateway to a running run: agent programs play its episodes, each at a base_url of its own. Or list the "
        "open episodes, or end one, so that it is played again. See docs/how-to/gateway.md."
    )
    parser.add_argument("words", nargs="+", metavar="RUN", help="folder of a running run; behind ls or end, if given")
    parser.add_argument("--host", default="", help="address to listen on (default: agent.gateway.host, or loopback)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--url", default="", help="of the gateway to list or end episodes of (default: the run's own)")
    parser.set_defaults(command=_gateway, fail=parser.error)


def _gateway(arguments: argparse.Namespace) -> int:
    match arguments.words:
        case ["ls", run]:
            return _list_episodes(Path(run), arguments.url)
        case ["end", run, episode]:
            answer = _ask_gateway(Path(run), arguments.url, "/episodes/give-back", {"episode": episode})
            if not answer["accepted"]:
                raise UserError(f"episode {episode}: {answer['reason']}")
            print(f"episode {episode} has ended; its sample is played again")
            return 0
        case [run] if run not in ("ls", "end"):
            from rl_async.agent_loop.gateway.server import attach

            return attach(Path(run), arguments.host, arguments.port)
    arguments.fail("give RUN, ls RUN, or end RUN EPISODE")
    return 2


def _list_episodes(run: Path, url: str) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rl_async.process.role import printable

    listing = _ask_gateway(run, url, "/episodes")
    episodes = listing["episodes"]
    if episodes:
        table = Table()
        for heading in ("episode", "task", "partition", "age", "silent for", "answers"):
            table.add_column(heading, justify="left" if heading in ("episode", "task", "partition") else "right")
        for one in sorted(episodes, key=lambda one: -one["age_s"]):
            ages = (f"{one['age_s']:.0f} s", f"{one['idle_s']:.0f} s", f"{one['answers']}")
            table.add_row(*(Text(printable(one[name])) for name in ("episode", "task_id", "partition")), *ages)
        Console().print(table)
    silence = listing["unattended_s"]
    print(
        f"{len(episodes)} episodes open, {listing['programs_waiting']} programs wait for one, "
        f"{listing['samples_waiting']} samples wait for a program"
        + (f"; no program has asked for {silence:.0f} s" if silence else "")
    )
    for one in listing["ignored"]:
        client, field = printable(one["client"]) or "a client without a name", printable(one["field"])
        print(f"{client}: {field} ignored in {one['requests']} requests (agent.gateway.unsupported)")
    return 0


def _ask_gateway(run: Path, url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a request to a gateway of the run. Raises UserError if it is missing, does not answer or refuses."""
    from rl_async.gateway import Gateway
    from rl_async.process.http_auth import token_file
    from rl_async.process.run_files import gateway_url

    url = url or gateway_url(run)
    gateway = Gateway(url, token_file=token_file(run, "gateway"), start_s=3.0)
    try:
        status, answer = gateway.get(path) if body is None else gateway.post(path, body)
    except OSError as error:
        raise UserError(str(error)) from error
    if status != 200:
        raise UserError(f"{url}: {answer.get('error', {}).get('message', answer)}")
    return answer


def add_play(parser: argparse.ArgumentParser) -> None:
    parser.usage = "rl-async play [-n N] [--reward FILE[:FUNCTION]] [--timeout S] [--home] [--url U] RUN -- PROGRAM..."
    parser.description = (
        "Run PROGRAM for each episode of a gateway, in a folder of its own, until the run is over. {prompt} in its "
        "arguments is the task; OPENAI_BASE_URL, ANTHROPIC_BASE_URL and their keys are set. See docs/how-to/gateway.md."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a running run")
    parser.add_argument("program", nargs="*", metavar="PROGRAM", help="the agent program and its arguments, behind --")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="episodes played at once (default: 1)")
    parser.add_argument(
        "--reward",
        default="",
        metavar="FILE[:FUNCTION]",
        help="grades by FUNCTION(workspace, task, stdout), default grade (default: the run's reward.functions)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="of one episode, --reward included (default: agent.episode_timeout_s)",
    )
    parser.add_argument("--home", action="store_true", help="give each episode an empty home directory of its own")
    parser.add_argument("--url", default="", help="of the gateway (default: the run's own)")
    parser.set_defaults(command=_play, steady=True)


def _play(arguments: argparse.Namespace) -> int:
    from rl_async.gateway import Gateway
    from rl_async.launcher.play import Player, StopPipe, found_program, load_grade
    from rl_async.process.http_auth import token_file
    from rl_async.process.role import heeded, printable
    from rl_async.process.run_files import gateway_url

    if arguments.n < 1:
        raise UserError(f"play: -n {arguments.n} is not a number of programs")
    program = found_program(arguments.program)
    reward = load_grade(arguments.reward) if arguments.reward else None
    url = arguments.url or gateway_url(arguments.run)
    # A request to stop takes effect when the gateway has answered, so it must not wait for long.
    gateway = Gateway(url, token_file=token_file(arguments.run, "gateway"), wait_s=2.0)
    signals: list[int] = []
    with StopPipe() as stop:

        def on_signal(number: int, _: object) -> None:
            signals.append(number)
            stop.stop()

        for number in heeded(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, on_signal)

        def say(line: str) -> None:
            print(printable(line), flush=True)

        player = Player(
            program, reward, stop, say, timeout_s=arguments.timeout, at_once=arguments.n, own_home=arguments.home
        )
        try:
            player.play(gateway)
        except OSError as error:
            raise UserError(f"play: {error}") from error
    mean = f", mean reward {sum(player.rewards) / len(player.rewards):.3f}" if player.rewards else ""
    print(f"{len(player.rewards)} episodes played{mean}; {player.failed} given back", flush=True)
    return EXIT_SIGNAL + signals[0] if signals else 0

"""Commands that make a run, a model, an evaluation, rewards, configs or data sets.

``launch``, ``sft``, ``dpo``, ``reward-model``, ``export``, ``model``, ``eval``, ``compare``, ``reward``, ``config``,
``data``; and options that several commands share. The modules that do the work are imported when a command runs.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from rl_async.errors import ConfigError, UserError


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and the overrides of its keys."""
    parser.add_argument("--config", required=True, metavar="NAME|PATH", help="a preset or a YAML file")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser, text: str = "values for config keys") -> None:
    """Add the words ``a.b=c``, which ``__main__`` also accepts between options."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help=text)


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")


def add_launch(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train. Ctrl-C ends the run cleanly."
    modes = ("colocated", "disaggregated")
    parser.add_argument("--mode", choices=modes, help="take turns on a device, or work side by side")
    add_config(parser)
    parser.add_argument("--name", default="", help="the run's folder below launcher.run_dir")
    parser.add_argument("--dry-run", action="store_true", help="try reward and data, print the plan, start nothing")
    parser.add_argument("--verbose", action="store_true", help="with --dry-run: memory by stage, and command lines")
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="continue the named run, or the newest of this config (default: a named run that did not reach its end)",
    )
    where = "where: this machine, or Ray's nodes"
    parser.add_argument("--launcher", choices=("local", "ray"), default="local", help=where)
    parser.add_argument("--address", default="", help="of the Ray cluster (default: the one that this machine is in)")
    parser.set_defaults(command=_launch, steady=True)


def _launch(arguments: argparse.Namespace) -> int:
    from rl_async.configs.checks import no_room, unrewarded, without_effect
    from rl_async.configs.load import load_config
    from rl_async.launcher.plan.machine import check_inputs, check_logins, check_trackers
    from rl_async.launcher.plan.trials import check_user_code, try_environment, try_mcp_servers
    from rl_async.launcher.run_folder import continuation, hold, new_run, resumed_run, unfinished
    from rl_async.launcher.runs.rehearsal import Findings, rehearse
    from rl_async.launcher.sources import fetch_sources, fetched_from
    from rl_async.process.role import stop_with_starter

    stop_with_starter()
    if arguments.address and arguments.launcher != "ray":
        raise UserError("--address is the address of a Ray cluster; add --launcher ray")
    where, may_resume = (arguments.config, arguments.overrides), arguments.resume is not False
    if arguments.resume is None and arguments.name:
        arguments.resume = unfinished(*where, arguments.name)
    if arguments.resume:
        given, folder = resumed_run(*where, mode=arguments.mode, name=arguments.name)
        # A run that is still going on is not continued.
        with hold(folder):
            print(
                f"continuing {folder.name} {continuation(folder, given)}; another --name starts a new run", flush=True
            )
    else:
        given, folder = new_run(*where, mode=arguments.mode, name=arguments.name, may_resume=may_resume)
    if idle := without_effect(given):
        print(f"no effect with agent.gateway, whose programs play the episodes: {', '.join(idle)}", file=sys.stderr)
    if not arguments.resume and (problem := unrewarded(given)):
        raise ConfigError(problem)
    if told := no_room(given):
        print(told, file=sys.stderr)
    # Ray's nodes may have files and packages that this machine lacks.
    if arguments.launcher == "local":
        # A dry run's rehearsal loads it.
        check_user_code(given, apart=not arguments.dry_run)
        for line in () if given.rollout.replay else try_mcp_servers(given.agent):
            print(line, flush=True)
    config = fetch_sources(given)
    findings = Findings()
    if arguments.launcher == "local":
        # Files and trackers are looked at first, since this takes no time, and the rest fails without them.
        check_inputs(config)
        check_trackers(config)
        check_logins(config)
        try_environment(config)
        findings = rehearse(config, whole=arguments.dry_run)
        for line in findings.warnings:
            print(line, file=sys.stderr)
    fetched = fetched_from(given, config)
    if arguments.dry_run:
        from rl_async.launcher.runs.launch import dry_run

        dry_run(config, folder, findings, resume=bool(arguments.resume), verbose=arguments.verbose)
        return 0
    from rl_async.launcher.runs.launch import launch, launch_on_ray

    resume = bool(arguments.resume)
    unnamed = not (resume or load_config(arguments.config, arguments.overrides, name=arguments.name).name)
    if arguments.launcher == "ray":
        return launch_on_ray(config, folder, arguments.address, resume=resume, unnamed=unnamed, fetched=fetched)
    return launch(config, folder, resume=resume, unnamed=unnamed, fetched=fetched)


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
    solved = "least reward with which an episode counts as passed, for pass@k (default: eval.solved)"
    parser.add_argument("--solved", type=float, metavar="REWARD", help=solved)
    parser.add_argument("--jsonl", type=Path, metavar="FILE", help="also write a line of JSON per episode, and role")
    parser.set_defaults(command=_evaluate, steady=True, fail=parser.error)


def _evaluate(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load import load_config
    from rl_async.launcher.plan.trials import check_user_code
    from rl_async.launcher.sources import fetch_held_out, fetch_sources

    jsonl = arguments.jsonl
    # Checked now, since the file is only written at the end, after minutes or hours.
    if jsonl is not None and not jsonl.parent.is_dir():
        raise UserError(f"--jsonl: there is no folder {jsonl.parent}; make it, or choose another")
    if jsonl is not None and jsonl.is_dir():
        raise UserError(f"--jsonl: {jsonl} is a folder; name a file")
    config = load_config(arguments.config, [*_endpoint(arguments), *arguments.overrides])
    check_user_code(config)
    if config.eval.samples > 1 and config.eval.temperature == 0:
        print(
            f"eval.samples={config.eval.samples}: at eval.temperature=0 all answers to a task are alike, so pass@k is "
            "pass@1; set e.g. eval.temperature=1.0",
            file=sys.stderr,
        )
    solved = config.eval.solved if arguments.solved is None else arguments.solved
    from rl_async.launcher.runs.evaluate import evaluate, evaluate_endpoint

    if config.eval.endpoint is not None:
        return evaluate_endpoint(fetch_held_out(config), config.eval.endpoint, arguments.config, solved, jsonl)
    return evaluate(fetch_sources(config), arguments.config, solved, jsonl)


def _endpoint(arguments: argparse.Namespace) -> list[str]:
    """Return the endpoint's options as overrides of config keys."""
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

    from rl_async.insight.recorded_evaluations import compare, print_comparison, read_evaluation

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


# The config key of each option of `rl-async sft`.
SFT_KEYS = {
    "model": "model.path",
    "data": "data.path",
    "eval": "data.eval_path",
    "out": "finetune.out",
    "epochs": "finetune.epochs",
    "batch_size": "finetune.batch_size",
    "learning_rate": "finetune.learning_rate",
    "ranks": "trainer.ranks",
}


def add_sft(parser: argparse.ArgumentParser, data: str = "`messages` and optional `tools`") -> None:
    parser.description = (
        "Fine-tune --model on the conversations in --data and write --out; given again, an interrupted run goes on. "
        "Or, with the --config of a preset alone, make its data and warm-started model. See docs/how-to/sft.md."
    )
    add = parser.add_argument
    add("--config", metavar="NAME|PATH", help="a YAML file with a section `finetune`, or a preset")
    add("--model", metavar="PATH", help="a Hugging Face causal LM: folder, OWNER/NAME, GGUF file (model.path)")
    add("--data", metavar="FILE", help=f"JSONL or Parquet with {data} (data.path)")
    add("--eval", metavar="FILE", help="conversations to measure on (data.eval_path; default: 5 %% of the data)")
    add("--out", metavar="PATH", help="folder to write (finetune.out)")
    add("--epochs", type=int, metavar="N", help="passes over the data (default: 1)")
    add("--batch-size", type=int, metavar="N", help="conversations per step (default: 32)")
    add("--learning-rate", type=float, metavar="X", help="peak of AdamW's (default: 1e-5)")
    add("--ranks", type=int, metavar="N", help="trainer processes (trainer.ranks; default: 1)")
    add_overrides(parser)
    parser.set_defaults(command=_sft, steady=True, preferences=False)


def add_dpo(parser: argparse.ArgumentParser) -> None:
    add_sft(parser, "`chosen`, `rejected`, optional `prompt` and `tools`")
    parser.description = (
        "Train --model to prefer the better conversation of each pair in --data (direct preference optimisation), and "
        "write --out; given again, an interrupted run goes on. See docs/how-to/sft.md."
    )
    parser.set_defaults(preferences=True)


def _sft(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load import load_config
    from rl_async.launcher.plan.artifacts import needs_preparation
    from rl_async.launcher.sources import fetch_sources

    values = {key: getattr(arguments, option) for option, key in SFT_KEYS.items()}
    given = {key: value for key, value in values.items() if value is not None}
    if arguments.config is None:
        missing = [f"--{option}" for option in ("model", "data", "out") if SFT_KEYS[option] not in given]
        if missing:
            raise UserError(f"missing {', '.join(missing)}; or give --config, a YAML file or a preset")
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]
    overrides += arguments.overrides
    config = load_config(arguments.config, overrides)
    if arguments.preferences:
        if config.finetune is None:
            raise UserError(f"--config: {arguments.config} has no section `finetune`; add --out PATH")
        if config.finetune.preferences is None:
            config = load_config(arguments.config, ["finetune.preferences={}", *overrides])
    config = fetch_sources(config)
    if config.finetune is not None:
        from rl_async.launcher.runs.finetune import finetune

        return finetune(config)
    if config.warm_start is None and config.data.make is None:
        raise UserError(
            f"--config: {arguments.config} has no section `finetune`; add --out PATH, or `finetune: {{out: PATH}}`, to "
            "fine-tune model.path on data.path"
        )
    if not needs_preparation(config):
        print(f"{config.model.path} exists; delete it to make it again")
        return 0
    from rl_async.launcher.runs.prepare import prepare

    prepare(config, lambda line: print(line, flush=True))
    return 0


def add_reward_model(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a sequence classifier with one label to tell chosen from rejected (Bradley-Terry)."
    add = parser.add_argument
    add("--pairs", required=True, metavar="FILE", help="Parquet or JSONL: chosen, rejected; optional prompt, margin")
    add("--model", required=True, metavar="PATH", help="to start from: a causal LM or a sequence classifier")
    add("--out", type=Path, required=True, metavar="PATH", help="folder to write, which must not exist")
    add("--epochs", type=int, default=1, metavar="N", help="passes over the pairs (default: 1)")
    add("--batch-size", type=int, default=32, metavar="N", help="pairs per step (default: 32)")
    add("--learning-rate", type=float, default=1e-5, metavar="X", help="peak of AdamW's (default: 1e-5)")
    add("--margin", type=float, default=0.0, metavar="X", help="for pairs without one of their own (default: 0)")
    add("--held-out", type=float, default=0.1, metavar="SHARE", help="prompts kept to measure accuracy (default: 0.1)")
    add("--seed", type=int, default=0, metavar="N", help="of the new head, the split and the order (default: 0)")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if there is one")
    add("--threads", type=int, default=1, metavar="N", help="torch threads on CPU (default: 1)")
    parser.set_defaults(command=_reward_model, steady=True)


def _reward_model(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.runs.reward_model import RewardModelJob, make_reward_model
    from rl_async.launcher.sources import model_folder

    arguments.model = str(model_folder(arguments.model, "--model"))
    job = RewardModelJob(**{name: getattr(arguments, name) for name in RewardModelJob.__dataclass_fields__})
    make_reward_model(job, lambda line: print(line, flush=True))
    return 0


def add_export(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, which must not exist")
    parser.add_argument("--step", type=int, help="default: the newest checkpoint")
    parser.add_argument("--critic", action="store_true", help="the critic instead of the policy, with its value head")
    parser.add_argument("--adapter", action="store_true", help="the adapters alone, unmerged, in PEFT's format")
    parser.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> int:
    from rl_async.trainer.checkpoints import folder_of
    from rl_async.trainer.export import export

    if arguments.critic and arguments.adapter:
        raise UserError("export: --critic has no adapters; choose one of --critic and --adapter")
    part = "critic" if arguments.critic else "."
    step = export(arguments.run, arguments.out, arguments.step, part, merge=not arguments.adapter)
    print(f"wrote {arguments.out} from {folder_of(arguments.run / 'checkpoints', step)}")
    if arguments.adapter:
        print("PEFT, vLLM and SGLang load it beside the base that its adapter_config.json names")
    elif not arguments.critic:
        out, config = (shlex.quote(str(path)) for path in (arguments.out, arguments.run / "config.yaml"))
        print(f"talk to it:    rl-async chat {out} --config {config}")
        print(f"evaluate it:   rl-async eval --config {config} model.path={out}")
        print(f"train it on:   rl-async launch --config {config} --name NAME model.path={out}")
        print("Transformers, vLLM and SGLang load the folder as it is")
    return 0


def add_model_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    reader = commands.add_parser("import", help="Write a model as a folder of safetensors, tokenizer and chat template")
    reader.add_argument("source", metavar="SOURCE", help="a GGUF file, package:NAME with one, or OWNER/NAME[@REVISION]")
    reader.add_argument("folder", type=Path, metavar="DIR", help="folder to write, which must not exist")
    reader.set_defaults(command=_import_model, steady=True)
    info = commands.add_parser("info", help="Describe a model: architecture, engines, trainers, memory")
    info.add_argument("model", metavar="DIR", help="folder, or what `model import` takes")
    info.add_argument("--config", metavar="NAME|PATH", help="a preset or a YAML file, to size the memory")
    add_overrides(info)
    info.set_defaults(command=_info)


def _import_model(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.sources import import_model

    print(f"reading {arguments.source}", flush=True)
    import_model(arguments.source, arguments.folder)
    print(f"wrote {arguments.folder}; `rl-async model info {arguments.folder}` describes it")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load import load_config
    from rl_async.launcher.model_info import describe
    from rl_async.launcher.plan.artifacts import check_model_folder
    from rl_async.launcher.plan.machine import settle_here
    from rl_async.launcher.sources import model_folder

    folder = model_folder(arguments.model, "DIR")
    check_model_folder(folder, "DIR")
    path = json.dumps(str(folder), ensure_ascii=False)
    paths = [f"model.path={path}", *([] if arguments.config else ["data.path=none"])]
    config, machine = settle_here(load_config(arguments.config, [*arguments.overrides, *paths]), None)
    for line in (*describe(folder, config), *machine.lines):
        print(line)
    if not arguments.config:
        print("memory is that of the default settings; --config NAME|PATH sizes it for a run")
    return 0


def add_reward_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    test = commands.add_parser("test", help="Score answers without a run, and show what was extracted and why")
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

    from rl_async.configs.load import load_config
    from rl_async.launcher.runs.inspect_data import report, score_answers
    from rl_async.process.role import printable

    path = json.dumps(arguments.data, ensure_ascii=False)
    needed = [] if arguments.config else ["model.path=none", f"data.path={path}"]
    config = load_config(arguments.config, [*needed, *arguments.overrides])
    scored = asyncio.run(score_answers(config, arguments.data, arguments.answers))
    for line in report(config, scored):
        print(printable(line))
    return 0 if all(row.trajectory.scored for row in scored) else 1


# The projects whose settings can be read, and the files that hold them.
IMPORT_HELP = {
    "verl": "a YAML of verl's PPO trainer, or a shell script with its a.b=c arguments",
    "trl": "a YAML, a Python program or a shell command with the fields of TRL's GRPOConfig",
    "prime-rl": "a TOML of prime-rl's `rl` command",
    "slime": "a shell script with slime's flags",
}


def add_config_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("list", help="List the presets").set_defaults(command=_list_presets)
    show = commands.add_parser("show", help="Print a preset or file with every value, as a run here would have it")
    show.add_argument("config", metavar="NAME|PATH")
    add_overrides(show)
    show.set_defaults(command=_show_config)
    explain = commands.add_parser("explain", help="Explain a key or a section")
    explain.add_argument(
        "key", metavar="KEY", nargs="?", default="", help="default: list the sections and the keys beside them"
    )
    explain.set_defaults(command=_explain)
    for name, what in IMPORT_HELP.items():
        reader = commands.add_parser(f"from-{name}", help=f"Print our config for {what}")
        reader.add_argument("file", metavar="FILE", type=Path, help=what)
        add_overrides(reader, f"further settings, as {name} has them")
        reader.set_defaults(command=_import_config, source=name)


def _list_presets(arguments: argparse.Namespace) -> int:
    """Print every preset with the comment in the first line of its file."""
    from importlib import resources

    from rl_async.configs.load import preset_names

    names = preset_names()
    width = max(len(name) for name in names)
    for name in names:
        text = resources.files("rl_async.configs").joinpath("presets", f"{name}.yaml").read_text()
        comment = text.partition("\n")[0]
        print(f"{name:<{width}}  {comment.removeprefix('#').strip() if comment.startswith('#') else ''}".rstrip())
    return 0


def _show_config(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load import dump, load_with_refusals
    from rl_async.errors import ConfigError
    from rl_async.launcher.plan.machine import settle_here

    config, refusals = load_with_refusals(arguments.config, arguments.overrides)
    if refusals:
        # No run here has these values, but they show what a short file amounts to.
        print(dump(config), end="", flush=True)
        raise ConfigError("\n  ".join(["refused as it stands:", *refusals]))
    # Roles started by hand read their config from a run's folder, so it is shown as a run here would write it.
    config, _ = settle_here(config, None)
    print(dump(config), end="")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load import explain

    print(explain(arguments.key))
    return 0


def _import_config(arguments: argparse.Namespace) -> int:
    from rl_async.configs.importing import SOURCES

    print(SOURCES[arguments.source](arguments.file, arguments.overrides), end="")
    return 0


def add_data_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    make = commands.add_parser("make", help="Write tasks, held-out tasks and demonstrations as Parquet")
    make.add_argument(
        "name",
        metavar="NAME",
        help="calculator, shop, market, sort, code, order or sums; calculator-pairs: preference pairs",
    )
    make.add_argument("--out", type=Path, metavar="FOLDER", help="default: artifacts/TASK")
    make.set_defaults(command=_make_data)
    inspect = commands.add_parser("inspect", help="Show a data set's columns and tasks, and what it lacks")
    inspect.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="as data.path: Parquet, JSONL, CSV, OWNER/NAME:SPLIT or reasoning_gym:NAME (default: those of --config)",
    )
    inspect.add_argument("--config", metavar="NAME|PATH", help="a preset or a YAML file: its templates, model, limits")
    add_overrides(inspect)
    inspect.set_defaults(command=_inspect_data)
    harbor = commands.add_parser(
        "from-harbor", help="Write a folder of Harbor's tasks as rows, for agent.environment=harbor:FOLDER"
    )
    harbor.add_argument("folder", metavar="FOLDER", type=Path, help="has a folder with a task.toml for each task")
    harbor.add_argument("out", metavar="OUT.jsonl", type=Path, help="for data.path; an older file is replaced")
    harbor.set_defaults(command=_from_harbor)


def _make_data(arguments: argparse.Namespace) -> int:
    from rl_async.agent_loop.toy_tasks import PAIRS, make_data, make_pairs

    pairs = arguments.name in PAIRS
    folder = arguments.out or Path("artifacts") / (PAIRS[arguments.name][0] if pairs else arguments.name)
    (make_pairs if pairs else make_data)(arguments.name, folder)
    print(f"wrote {', '.join(str(file) for file in sorted(folder.glob('*.parquet')))}")
    return 0


def _inspect_data(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load import load_config
    from rl_async.configs.schema.data import DataSource
    from rl_async.launcher.runs.inspect_data import inspect, inspect_config
    from rl_async.launcher.sources import data_files
    from rl_async.process.role import printable

    path, overrides = arguments.path, arguments.overrides
    # An override may stand where PATH is expected.
    if path is not None and "=" in path and not Path(path).exists():
        path, overrides = None, [path, *overrides]
    if arguments.config is None:
        if overrides:
            raise UserError(
                f"data inspect: {overrides[0]} changes a config, and none is given; add --config with a preset "
                "(rl-async config list) or a YAML file"
            )
        if path is None:
            raise UserError("data inspect: give PATH, or --config")
        lines = inspect(DataSource(path=data_files(path, "data.path")))
    else:
        given = [] if path is None else [f"data.path={json.dumps(path, ensure_ascii=False)}", "data.eval_path=null"]
        lines = inspect_config(load_config(arguments.config, [*given, *overrides]))
    for line in lines:
        print(printable(line))
    return 0


def _from_harbor(arguments: argparse.Namespace) -> int:
    """Write the tasks that can be played, and name the others on standard error."""
    from rl_async.agent_loop.environments.harbor import write_rows

    written, refused = write_rows(arguments.folder, arguments.out)
    for error in refused:
        print(f"left out: {error}", file=sys.stderr)
    print(f"wrote {written} tasks to {arguments.out}, left out {len(refused)}")
    return 0

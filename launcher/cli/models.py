"""``rl-async sft``, ``reward-model``, ``export`` and ``model``: commands that write or describe a model."""

import argparse
import json
from pathlib import Path

from rl_async.errors import UserError
from rl_async.launcher.cli.options import add_overrides, add_run

SFT_KEYS = {  # config key of each option of `rl-async sft`
    "model": "model.path",
    "data": "data.path",
    "eval": "data.eval_path",
    "out": "finetune.out",
    "epochs": "finetune.epochs",
    "batch_size": "finetune.batch_size",
    "learning_rate": "finetune.learning_rate",
    "ranks": "trainer.ranks",
}


def add_sft(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fine-tune --model on the conversations in --data and write --out; given again, an interrupted run goes on. "
        "Or, with the --config of a preset alone, make its data and warm-started model. See docs/how-to/sft.md."
    )
    add = parser.add_argument
    add("--config", metavar="NAME|PATH", help="a YAML file with a section `finetune`, or a preset")
    add("--model", metavar="PATH", help="a Hugging Face causal LM: folder, OWNER/NAME, GGUF file (model.path)")
    add("--data", metavar="FILE", help="JSONL or Parquet with `messages` and optional `tools` (data.path)")
    add("--eval", metavar="FILE", help="conversations to measure on (data.eval_path; default: 5 %% of the data)")
    add("--out", metavar="PATH", help="folder to write (finetune.out)")
    add("--epochs", type=int, metavar="N", help="passes over the data (default: 1)")
    add("--batch-size", type=int, metavar="N", help="conversations per step (default: 32)")
    add("--learning-rate", type=float, metavar="X", help="peak of AdamW's (default: 1e-5)")
    add("--ranks", type=int, metavar="N", help="trainer processes (trainer.ranks; default: 1)")
    add_overrides(parser)
    parser.set_defaults(command=_sft, steady=True)


def _sft(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load import load_config
    from rl_async.launcher.plan.artifacts import needs_preparation
    from rl_async.launcher.sources.fetch import fetch_sources

    values = {key: getattr(arguments, option) for option, key in SFT_KEYS.items()}
    given = {key: value for key, value in values.items() if value is not None}
    if arguments.config is None:
        missing = [f"--{option}" for option in ("model", "data", "out") if SFT_KEYS[option] not in given]
        if missing:
            raise UserError(f"missing {', '.join(missing)}; or give --config, a YAML file or a preset")
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]
    config = fetch_sources(load_config(arguments.config, [*overrides, *arguments.overrides]))
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
    from rl_async.launcher.sources.fetch import model_folder

    arguments.model = str(model_folder(arguments.model, "--model"))
    job = RewardModelJob(**{name: getattr(arguments, name) for name in RewardModelJob.__dataclass_fields__})
    make_reward_model(job, lambda line: print(line, flush=True))
    return 0


def add_export(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, which must not exist")
    parser.add_argument("--step", type=int, help="default: the newest checkpoint")
    parser.add_argument("--critic", action="store_true", help="the critic instead of the policy, with its value head")
    parser.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> int:
    from rl_async.trainer.checkpoints import folder_of
    from rl_async.trainer.export import export

    step = export(arguments.run, arguments.out, arguments.step, "critic" if arguments.critic else ".")
    print(f"wrote {arguments.out} from {folder_of(arguments.run / 'checkpoints', step)}")
    return 0


def add_model_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    reader = commands.add_parser("import", help="write a model as a folder of safetensors, tokenizer and chat template")
    reader.add_argument("source", metavar="SOURCE", help="a GGUF file, package:NAME with one, or OWNER/NAME[@REVISION]")
    reader.add_argument("folder", type=Path, metavar="DIR", help="folder to write, which must not exist")
    reader.set_defaults(command=_import, steady=True)
    info = commands.add_parser("info", help="architecture, chat format, what trains and serves it, memory")
    info.add_argument("model", metavar="DIR", help="folder, or what `model import` takes")
    info.add_argument("--config", metavar="NAME|PATH", help="a preset or a YAML file, to size the memory")
    add_overrides(info)
    info.set_defaults(command=_info)


def _import(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.sources.importing import import_model

    print(f"reading {arguments.source}", flush=True)
    import_model(arguments.source, arguments.folder)
    print(f"wrote {arguments.folder}; `rl-async model info {arguments.folder}` describes it")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from rl_async.configs.load import load_config
    from rl_async.launcher.plan.artifacts import check_model_folder
    from rl_async.launcher.plan.machine import settle_here
    from rl_async.launcher.sources.fetch import model_folder
    from rl_async.launcher.sources.info import describe

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

"""Names, creates and locks run folders, and finds the one to resume."""

import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

import msgspec

from rl_async.configs.checks import check
from rl_async.configs.load import Given, dump, leaves, load_config, load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.files import DAMAGE, make_durable_folder, nearest_run, replace_file
from rl_async.insight.tail import last_record
from rl_async.launcher.plan.artifacts import checkpoints
from rl_async.launcher.plan.machine import read_machine, with_adapter_way
from rl_async.launcher.plan.memory import model_size
from rl_async.launcher.sources import Fetched, kept_sources
from rl_async.transfer_queue.journal import FILE as SQLITE
from rl_async.transfer_queue.ledger import tells_end, tells_samples

# Records, in a run folder, the files that were fetched for the run.
SOURCES = "sources.json"
# The config of a run before it was last resumed with other values.
REPLACED = "config-before.yaml"
# What ``handle.launch`` writes into the folder of a run before it starts the command.
FUNCTIONS, GIVEN, OUTPUT = "functions", "given.yaml", Path("logs", "output.log")
# Kept in a folder whose run made no sample, when a run of that name is started again.
KEPT = (FUNCTIONS, GIVEN, "logs")
# What a run writes, which one that made no sample leaves behind. Files of other names are the user's.
WRITTEN = (
    *(
        "config.yaml",
        REPLACED,
        "queue*",
        "ledger.jsonl",
        "refused.jsonl",
        "lineage",
        "keys",
        "endpoints.json",
        "processes.json",
    ),
    *(SOURCES, "machine.json", "memory.json", "tools.json", "checkpoints", "trajectories", "ranks", "progress"),
    *("timeline", "stacks", "doctor.txt", "profiles", "prometheus", "view.sqlite*", "verdicts.sqlite*"),
)
# A folder with one of these holds results, even if nothing in it can be continued.
RESULTS = ("metrics.jsonl", "trained.jsonl", "evaluations.jsonl", "trajectories/*")


def new_run(
    name_or_path: Given,
    overrides: Sequence[str] = (),
    *,
    mode: str | None = None,
    name: str = "",
    may_resume: bool = True,
) -> tuple[RunConfig, Path]:
    """Load and check the config of a new run and choose its folder. Changes nothing.

    A folder whose run made no sample does not count. Raises UserError if a run of that name exists; the message
    proposes to resume it only if the user ``may_resume`` it.
    """
    config = load_config(name_or_path, overrides, mode=mode, name=name)
    root = Path(config.launcher.run_dir)
    if not config.name:
        folder = next_folder(root, run_prefix(name_or_path, config.mode))
        config = msgspec.structs.replace(config, name=folder.name)
    folder = _folder(root, config.name)
    if folder.exists() and not is_unused(folder):
        raise UserError(f"--name: {folder} exists{_way_out(folder, may_resume)}")
    return config, folder


def _way_out(folder: Path, may_resume: bool) -> str:
    """Describe the run in a folder that exists, and what to do instead of starting another there."""
    if not begun(folder):
        return " and holds results that no run can continue; choose another name, or delete it"
    kept = load_resolved(folder / "config.yaml")
    if has_more(folder, kept):
        resume = "add --resume to continue it, " if may_resume else ""
        return f" and would continue {continuation(folder, kept)}; {resume}choose another name, or delete it"
    further = "; --resume with a larger trainer.steps trains it further" if may_resume else ""
    return f" and has trained all of its {kept.trainer.steps} steps; choose another name, or delete it{further}"


def continuation(folder: Path, config: RunConfig) -> str:
    """Describe where the run in ``folder`` would be continued, and what it keeps of its work."""
    kept, steps = saved(folder), config.trainer.steps
    if not kept:
        return f"at step 0 of {steps}, with the samples that it has"
    trained = int(last_record(folder / "metrics.jsonl").get("step", -1)) + 1
    again = f"; steps {kept} to {trained - 1} are trained again" if trained > kept + 1 else ""
    again = f"; step {kept} is trained again" if trained == kept + 1 else again
    return f"at step {kept} of {steps}, from its newest checkpoint{again}"


def is_unused(folder: Path) -> bool:
    """Whether an existing folder holds nothing of a run, or only what a run wrote that ended before its first sample.

    ``handle.launch`` writes some of it before the run itself writes anything.
    """
    if {path.name for path in folder.iterdir()} <= set(KEPT):
        return True
    config = folder / "config.yaml"
    if not config.exists() or begun(folder) or any(any(folder.glob(name)) for name in RESULTS):
        return False
    return load_resolved(config).finetune is None


def clear_unused(folder: Path) -> bool:
    """Delete what an earlier start that made no sample left in the folder; return whether it did.

    Its logs stay, and so does what no run writes.

    The caller holds the run. Raises UserError if samples were made there since ``new_run`` looked.
    """
    if begun(folder):
        raise UserError(f"--name: {folder} exists{_way_out(folder, may_resume=False)}")
    if not (folder.exists() and is_unused(folder)):
        return False
    left = [path for name in WRITTEN for path in folder.glob(name)]
    # The config goes last: if this is interrupted, the folder is still recognised.
    for path in sorted(left, key=lambda path: path.name == "config.yaml"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return bool(left)


def resumed_run(
    name_or_path: Given, overrides: Sequence[str] = (), *, mode: str | None = None, name: str = ""
) -> tuple[RunConfig, Path]:
    """Find the named run, or the newest of that config, and apply ``overrides`` to its own resolved config.

    Prints on stderr the keys whose values change, and those that keep the run's although the given config has others.
    Raises UserError if the run does not exist or has no samples.
    """
    # Loaded first, so that mistakes in the arguments are reported before anything about the run.
    preset = load_config(name_or_path, overrides, mode=mode)
    root = Path(preset.launcher.run_dir)
    folder = _folder(root, name) if name else _newest_begun(root, run_prefix(name_or_path, preset.mode))
    if not folder.is_dir():
        raise UserError(f"--resume: no run {folder}; {nearest_run(folder) or 'leave --resume out to start it'}")
    if not begun(folder):
        raise UserError(f"--resume: no sample was made in {folder}, so start it without --resume")
    kept = load_resolved(folder / "config.yaml")
    record = _fetched(folder)
    preset = kept_sources(preset, kept, record)
    config = kept_sources(load_resolved(folder / "config.yaml", overrides), kept, record)
    if mode is not None:
        config = msgspec.structs.replace(config, mode=mode)
        check(config)
    _refuse_another_run(kept, config, preset, folder)
    if changed := differences(kept, config):
        values = [dict(leaves(msgspec.to_builtins(one))) for one in (kept, config)]
        told = [f"{key} from {_said(values[0].get(key))} to {_said(values[1].get(key))}" for key in changed]
        print(f"{folder.name} changes {', '.join(told)}; {REPLACED} keeps its config before", file=sys.stderr)
    if found := differences(config, as_settled(preset, folder)):
        print(
            f"{folder.name} keeps the config that it was started with, which differs from "
            f"{config_name(name_or_path)} in {', '.join(found)}; to change one, give it as KEY=VALUE",
            file=sys.stderr,
        )
    return config, folder


def _said(value: object) -> str:
    """Return a value of a config as JSON, cut to half a line."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def differences(kept: RunConfig, given: RunConfig) -> list[str]:
    """Return the keys that differ between two configs, except the name and the mode of the run."""
    old, new = (dict(leaves(msgspec.to_builtins(config))) for config in (kept, given))
    keys = (old.keys() | new.keys()) - {"name", "mode"}
    return sorted(key for key in keys if old.get(key) != new.get(key))


def changes(folder: Path, name_or_path: str, overrides: Sequence[str], mode: str) -> list[str]:
    """Return the keys of a config that differ from the config of the run in ``folder``."""
    kept = load_resolved(folder / "config.yaml")
    given = kept_sources(load_config(name_or_path, overrides, mode=mode), kept, _fetched(folder))
    return ["mode"] * (kept.mode != given.mode) + differences(kept, as_settled(given, folder))


def as_settled(given: RunConfig, folder: Path) -> RunConfig:
    """Return the config with ``model.dtype: auto`` replaced by the type that was chosen for the run in ``folder``, and
    ``weight_sync.adapters: auto`` as at its start, and the way of weights if the machine chose it.
    """
    record = read_machine(folder)
    given = with_adapter_way(given, model_size(given))
    if record is not None and record.weights:
        kept, sync = load_resolved(folder / "config.yaml").weight_sync, given.weight_sync
        way = kept.way if sync.way == "auto" else sync.way
        bucket = kept.bucket_bytes if sync.bucket_bytes is None else sync.bucket_bytes
        sync = msgspec.structs.replace(sync, way=way, bucket_bytes=bucket)
        given = msgspec.structs.replace(given, weight_sync=sync)
    if given.model.dtype != "auto" or record is None or record.compute.by != "machine":
        return given
    return msgspec.structs.replace(given, model=msgspec.structs.replace(given.model, dtype=record.compute.dtype))


def unfinished(name_or_path: Given, overrides: Sequence[str], name: str) -> bool:
    """Whether a run of that name was interrupted: it has samples, but lacks steps or its end."""
    folder = _folder(Path(load_config(name_or_path, overrides).launcher.run_dir), name)
    return begun(folder) and has_more(folder, load_resolved(folder / "config.yaml"))


def has_more(folder: Path, config: RunConfig) -> bool:
    """Whether there are steps to train, or the launcher was killed before the queue learned of the end."""
    left = config.trainer.steps - saved(folder)
    return left > 0 or (left == 0 and not tells_end(folder / "ledger.jsonl"))


def _refuse_another_run(before: RunConfig, config: RunConfig, preset: RunConfig, folder: Path) -> None:
    """Raise UserError if a resumed run would change a setting that it must keep, or has nothing left to do."""
    if preset.data.path != before.data.path:
        raise UserError(
            f"--resume: {folder} trains on {before.data.path}, and this config on {preset.data.path}; give the config "
            "that the run was started with"
        )
    for key, old, new in (
        ("name", before.name, config.name),
        ("model.path", before.model.path, config.model.path),
        ("model.override", before.model.override, config.model.override),
        ("seed", before.seed, config.seed),
        ("rollout.group_size", before.rollout.group_size, config.rollout.group_size),
    ):
        if old != new:
            raise UserError(f"{key}: {folder} was started with {old}, and a run that is resumed keeps it")
    for key, had, has in (
        ("critic", before.critic is not None, config.critic is not None),
        ("trainer.lora", before.trainer.lora is not None, config.trainer.lora is not None),
    ):
        if had != has and checkpoints(folder):
            state = "with" if had else "without"
            raise UserError(f"{key}: the checkpoints of {folder} are those of a run {state} it, which a resume keeps")
    schedules = {config.trainer.schedule, config.critic.schedule if config.critic else "constant"} - {"constant"}
    done, to_do = (given.trainer.minibatches * given.trainer.epochs for given in (before, config))
    if schedules and done != to_do and checkpoints(folder):
        raise UserError(
            f"trainer.minibatches, trainer.epochs: the rate's schedule ({', '.join(sorted(schedules))}) counts "
            f"optimizer steps, {done} for each step of {folder}; keep their product, or use trainer.schedule=constant"
        )
    if not has_more(folder, config):
        raise UserError(
            f"trainer.steps: {folder} has trained {saved(folder)} of {config.trainer.steps} steps; give a larger number"
        )


def create(config: RunConfig, folder: Path) -> None:
    """Make the folder, for this user only, unless it exists, and write the resolved config into it.

    Both are durable, since no checkpoint can be resumed without its config. One that is replaced by another stays as
    ``REPLACED``.
    """
    written = dump(config).encode()
    with removed_on_failure(folder):
        make_durable_folder(folder, 0o700)
        (folder / "logs").mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            before = (folder / "config.yaml").read_bytes()
            if before != written:
                replace_file(folder / REPLACED, before, durable=True)
        replace_file(folder / "config.yaml", written, durable=True)


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove a folder that the block makes if it cannot fill it, so that the same command can be given again."""
    new = not folder.exists()
    try:
        yield
    except (OSError, UserError):
        if new and folder.exists():
            shutil.rmtree(folder)
        raise


def note_sources(folder: Path, fetched: Fetched) -> None:
    """Add to the record of the files that were fetched for a run."""
    if not fetched:
        return
    record = _fetched(folder)
    for key, paths in fetched.items():
        record[key] = record.get(key, {}) | paths
    replace_file(folder / SOURCES, json.dumps(record, indent=1).encode(), durable=True)


def _fetched(folder: Path) -> Fetched:
    """Return the paths that the ids in the configs of a run stood for when they were fetched."""
    try:
        return msgspec.json.decode((folder / SOURCES).read_bytes(), type=Fetched)
    except FileNotFoundError:
        return {}
    except DAMAGE as error:
        raise UserError(
            f"{folder / SOURCES} is damaged ({error}); delete it, and give the paths of config.yaml"
        ) from error


class RunInUse(UserError):
    """Another process holds the run; the message names both."""


@contextmanager
def hold_unnamed(config: RunConfig, folder: Path) -> Iterator[tuple[RunConfig, Path]]:
    """Hold a new run without a given name while the block runs, as ``hold`` does.

    If another launcher has taken the folder meanwhile, the next free number is chosen.
    """
    prefix, _, first = folder.name.rpartition("-")
    for number in count(int(first)):
        own = folder.with_name(f"{prefix}-{number:03d}")
        with ExitStack() as held:
            try:
                held.enter_context(hold(own))
            except RunInUse:
                continue
            if not own.exists():
                yield msgspec.structs.replace(config, name=own.name), own
                return


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep every other launcher on this machine out of the run while the block runs.

    The lock is on a file beside the folder and is released when this process ends; children do not inherit it. If the
    parent folder was only created for the lock, it is removed again. Raises RunInUse, before anything is changed, if
    another process holds the lock.
    """
    new = not folder.parent.exists()
    path = folder.with_name(f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise UserError(f"launcher.run_dir: cannot write into {folder.parent}: {error.strerror}") from error
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder removed the file after it was opened here, so the lock is worth nothing.
            if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                raise BlockingIOError
        except BlockingIOError:
            file.seek(0)
            raise RunInUse(
                f"--name: the run {folder} is in use by process {file.read().strip() or '?'}; wait for it or stop it, "
                "or choose another name"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if new:
                # The folder is not empty if a run was made in it.
                with suppress(OSError):
                    folder.parent.rmdir()


def saved(folder: Path) -> int:
    """Return the number of steps in the newest complete checkpoint, or 0: a resumed run continues there."""
    return max(checkpoints(folder), default=0)


def begun(folder: Path) -> bool:
    """Whether the run has something to continue: a checkpoint, or samples in the queue's journal.

    The ledger tells whether the journal has samples. If the ledger is lost, an existing journal is assumed to have.
    """
    ledger = folder / "ledger.jsonl"
    if checkpoints(folder) or tells_samples(ledger):
        return True
    lost = folder.is_dir() and not (ledger.exists() and ledger.stat().st_size)
    return lost and _may_have_journal(folder)


def _may_have_journal(folder: Path) -> bool:
    if (folder / SQLITE).exists():
        return True
    config = folder / "config.yaml"
    queue = load_resolved(config).queue if config.exists() else None
    return queue is not None and (queue.journal == "redis" or bool(queue.sqlite and queue.sqlite.folder))


def config_name(given: Given) -> str:
    """Return the name of a preset or file; of a mapping, that of the one which it extends, or `run`."""
    return given if isinstance(given, str) else str(given.get("extends", "run"))


def run_prefix(name_or_path: Given, mode: str) -> str:
    """Return the default name of a run, without its number."""
    return f"{Path(config_name(name_or_path)).stem}-{mode}"


def next_folder(root: Path, prefix: str) -> Path:
    """Return ``PREFIX-NNN`` with the number after the highest that exists."""
    return root / f"{prefix}-{max(_numbers(root, prefix), default=0) + 1:03d}"


def _folder(root: Path, name: str) -> Path:
    if not re.fullmatch(r"[\w.+=-]+", name) or name.startswith("."):
        raise UserError(f"--name: {name!r} is not a folder name; use letters, digits, '-', '_', '.', '+' and '='")
    return root / name


def _numbers(root: Path, prefix: str) -> list[int]:
    found = (re.fullmatch(rf"{re.escape(prefix)}-(\d+)", item.name) for item in root.glob(f"{prefix}-*"))
    return [int(match[1]) for match in found if match]


def _newest_begun(root: Path, prefix: str) -> Path:
    """Return the newest run that has something to continue. Raises UserError if none has."""
    numbers = sorted(_numbers(root, prefix), reverse=True)
    for number in numbers:
        if begun(folder := root / f"{prefix}-{number:03d}"):
            return folder
    why = "has made a sample" if numbers else "exists"
    raise UserError(f"--resume: no run {root / prefix}-* {why}; start one without --resume, or name one with --name")

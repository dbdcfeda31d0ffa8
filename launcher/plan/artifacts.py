"""The files that a run needs before its processes start: data and models. Imports nothing heavy."""

import faulthandler
import hashlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rl_async.configs.derived import GENERATED_PREFIX, eval_parts, files_of, parts, warm_start_of
from rl_async.configs.schema.data import WarmStartConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError, UserError
from rl_async.files import DAMAGE, nearest_file
from rl_async.launcher.plan.planning import serves_reward_model
from rl_async.model_files import INDEX, indexed_files, read_header

# A warm start writes its ``Origin`` into the model's folder.
SFT_FILE = "sft.json"
MADE_FILES = ("train.parquet", "test.parquet", "demos.parquet")
# The keys of a preset that an own data set leaves pointing at files which nobody makes.
INSTEAD = {
    "data.eval_path": "; data.eval_path=null evaluates on no tasks",
    "warm_start.demos_path": "; warm_start=null needs none, and trains the model of model.path as it is",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def needs_preparation(config: RunConfig) -> bool:
    """Whether data or the model must still be made.

    Raises UserError for data or a model that is missing and cannot be made, or that cannot be used.
    """
    data = needs_data(config)
    model = needs_model(config)
    kl = config.algorithm.kl
    if config.algorithm.uses_reference and kl.reference_path:
        check_model_folder(Path(kl.reference_path), "algorithm.kl.reference_path")
    for key, path in config.algorithm.teacher.paths.items() if config.algorithm.teacher else ():
        check_model_folder(Path(path), key)
    if config.critic is not None and config.critic.path is not None:
        _check_critic_folder(Path(config.critic.path))
    if serves_reward_model(config):
        _check_reward_model(config, model)
    return data or model


def needs_data(config: RunConfig) -> bool:
    """Whether ``data.make`` has files to write. Raises DataError for a missing file that it does not write."""
    missing = False
    for key, path in _data_files(config):
        if path.is_file():
            continue
        if path not in _made_files(config):
            hint = f"; data.make={config.data.make} writes {', '.join(MADE_FILES)}" if config.data.make else ""
            hint += INSTEAD.get(key, "")
            close = nearest_file(path)
            raise DataError(f"{key}: no file {path}{close and f'; {close}'}{hint}")
        missing = True
    return missing


def check_data(config: RunConfig) -> None:
    """Raise DataError for existing data that the queue would refuse, judging by the first rows of each file."""
    if any(_data_files(config)) and not needs_data(config):
        # Not imported above, since it imports PyArrow.
        from rl_async.transfer_queue.dataset import check_first_rows

        check_first_rows(config)


def needs_model(config: RunConfig) -> bool:
    """Whether the warm start must still be done. Raises UserError if the model at ``model.path`` cannot be used."""
    path, makes = Path(config.model.path), warm_start_of(config)
    if not path.exists():
        if makes is None:
            raise ConfigError(_no_model(config))
        if Path(config.launcher.run_dir).resolve() in path.resolve().parents:
            raise UserError(f"model.path: no folder {path}; models are not made in a folder of runs")
        return True
    check_model_folder(path, "model.path")
    record = path / SFT_FILE
    if makes is not None and record.is_file():
        try:
            made = msgspec.json.decode(record.read_bytes(), type=Origin)
        except DAMAGE as error:
            raise UserError(f"model.path: {record} cannot be read ({error}); delete {path} to make it again") from error
        if other := made.differs(origin_of(makes)):
            raise UserError(f"model.path: {path} was made with other {other}; delete it, or choose another model.path")
    return False


def _no_model(config: RunConfig) -> str:
    path, settings = config.model.path, config.warm_start
    if beside := checkpoints_beside(Path(path)):
        return f"model.path: no folder {path}{beside}"
    text = f"model.path: no folder {path}; give the folder of a Hugging Face model, an id of the Hub (OWNER/NAME) or a "
    if settings is None:
        return text + "GGUF file, or set warm_start.demos_path and warm_start.out to warm up a tiny one"
    made = f"makes a model at {settings.out} only" if settings.out else "makes no model without warm_start.out"
    return text + f"GGUF file. The warm start {made}; set warm_start.out={path} for one there"


def _check_reward_model(config: RunConfig, warm_start: bool) -> None:
    """Raise UserError if the run's own reward model cannot be served, or is needed before it runs."""
    assert config.reward.model is not None
    check_model_folder(Path(config.reward.model.path), "reward.model.path")
    if warm_start:
        raise UserError(
            f"model.path: no folder {config.model.path}; its warm start cannot use the run's own reward model, which "
            "does not run yet. Make it first with `rl-async sft` and a rule as reward, or set reward.model.url"
        )


class Origin(msgspec.Struct, frozen=True):
    """The settings and demonstrations of a warm start, as its model's folder records them."""

    fingerprint: str
    # A hash of the demonstrations, which early versions did not record.
    demos: str | None = None

    def differs(self, now: "Origin") -> str:
        """Name the part that differs from ``now``; empty if none does, or if nothing can be compared."""
        if self.fingerprint != now.fingerprint:
            return "settings of warm_start"
        known = self.demos is not None and now.demos is not None
        return "demonstrations (warm_start.demos_path)" if known and self.demos != now.demos else ""


def origin_of(settings: WarmStartConfig) -> Origin:
    """Hash the settings of a warm start, except the model's path, and the demonstrations if they are here."""
    values = msgspec.to_builtins(settings)
    del values["out"]
    # Without these keys' features the hash stays that of versions which did not have the keys.
    if settings.pretrained is None:
        del values["pretrained"]
    for key in ("experts", "vision"):
        if not values[key]:
            del values[key]
    files = [file for file in files_of(settings.demos_path) if file.is_file()]
    demos = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            demos.update(hashlib.file_digest(content, "sha256").digest())
    fingerprint = hashlib.sha256(msgspec.json.encode(values, order="sorted")).hexdigest()[:16]
    return Origin(fingerprint, demos.hexdigest()[:16] if files else None)


def _data_files(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yield every local file that the run reads, with its config key."""
    data = config.data
    named = [("data.path", source.path) for source in parts(data)]
    named += [("data.eval_path", source.path) for source in eval_parts(data)]
    if (makes := warm_start_of(config)) and not Path(config.model.path).exists():
        named.append(("warm_start.demos_path", makes.demos_path))
    for key, path in named:
        if path.startswith(GENERATED_PREFIX):
            continue
        files = files_of(path)
        if not files:
            raise DataError(f"{key}: no Parquet or JSONL files in {path}")
        for file in files:
            yield key, file


def _made_files(config: RunConfig) -> list[Path]:
    if config.data.make is None or not isinstance(config.data.path, str):
        return []
    return [Path(config.data.path).parent / name for name in MADE_FILES]


def check_model_folder(path: Path, key: str) -> None:
    """Raise UserError, naming ``key``, unless the folder has a model and its tokenizer."""
    _check_folder(path, key)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{key}: {path} has no tokenizer (tokenizer.json); save the model's tokenizer into it")
    _check_tokenizer(path, key)
    _check_weights(path, key)


# Limits of a tokenizer's trial, with room for the largest vocabularies that are published.
TRIAL_BYTES = 3 << 29
TRIAL_S = 20
TRIAL_WAIT_S = 300
# Beside the short messages that tell formats apart: repeated characters, and unusual ones.
TRIAL_TEXT = f"In 2024, (3 + 4) * 12 = 84.\n\t{'a' * 64} \u00e9\u4e16\U0001f600"


def _check_tokenizer(path: Path, key: str) -> None:
    """Raise UserError if the folder's tokenizer or chat template takes more than TRIAL_BYTES or TRIAL_S of computing.

    Both are small programs: normalizers, patterns and templates can make texts as long as their author wants. They are
    tried in a fork, which the limits end. The run reports other errors of theirs, where it loads them.
    """
    # Before the fork, since the run needs them as well.
    _import_tokenizers()
    child = os.fork()
    if child == 0:
        try_tokenizer(str(path))
    _, status = os.waitpid(child, 0)
    ended = os.waitstatus_to_exitcode(status)
    if ended == -signal.SIGSEGV:
        # A fork lacks the threads of its parent, and may crash for that alone. A new process takes seconds.
        own = f"import sys; from {__name__} import try_tokenizer; try_tokenizer(sys.argv[1])"
        ended = subprocess.run([sys.executable, "-P", "-c", own, str(path)], check=False).returncode
    if ended != 0:
        raise UserError(
            f"{key}: the tokenizer or the chat template of {path} takes too much memory or time "
            f"for short messages (limits: {TRIAL_BYTES >> 20} MiB, {TRIAL_S} s of computing, {TRIAL_WAIT_S} s in all; "
            f"the trial ended with {ended}); use another model, or correct them"
        )


def _import_tokenizers() -> tuple[Any, Any]:
    """Import what takes a second only where it is needed."""
    from rl_async.agent_loop.chat_formats.render import ChatRenderer
    from rl_async.template_tokens import read_tokenizer

    return ChatRenderer, read_tokenizer


def try_tokenizer(path: str) -> NoReturn:
    """Use a folder's tokenizer and chat template within the limits, and end this process: with 0 if they fit."""
    renderer, read_tokenizer = _import_tokenizers()
    fits = False
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        # The libraries report panics and forks there, and Python the signal of a failed allocation.
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + TRIAL_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_S,) * 2)
        # Computing is not counted while the fork waits, as it would for a lock that another thread held.
        signal.alarm(TRIAL_WAIT_S)
        tokenizer = read_tokenizer(path)
        tokenizer.encode(TRIAL_TEXT)
        renderer(tokenizer).printed_call()
        fits = True
    # A template that takes longer than its own limits: the run would only meet them again.
    except ConfigError:
        pass
    except Exception as error:
        raised: BaseException | None = error
        while raised is not None and not isinstance(raised, MemoryError):
            raised = raised.__context__
        fits = raised is None
    finally:
        os._exit(not fits)


def checkpoints(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints, oldest first. ``state.json`` is the last file of each."""
    found = (re.fullmatch(r"step-(\d+)", file.parent.name) for file in folder.glob("checkpoints/step-*/state.json"))
    return sorted(int(match[1]) for match in found if match)


def checkpoints_beside(path: Path) -> str:
    """Name the checkpoints of the run in whose folder ``path`` is missing, for messages; empty for other paths."""
    root = next((folder for folder in path.parents if folder.name == "checkpoints"), None)
    if root is None:
        return ""
    names = ", ".join(f"step-{step:06d}" for step in checkpoints(root.parent))
    # This is not a run's folder, but some folder of models.
    if not names and root.is_dir() and not (root.parent / "config.yaml").is_file():
        return ""
    return f"; {root} has {names or 'no checkpoint'}"


def _check_critic_folder(path: Path) -> None:
    """Check a Hugging Face folder, or the ``critic`` folder of a checkpoint, which holds one. It needs no tokenizer."""
    saved = path / "model"
    folder = saved if saved.is_dir() else path
    _check_folder(folder, "critic.path")
    _check_weights(folder, "critic.path")


def _check_folder(path: Path, key: str) -> None:
    if not path.is_dir():
        raise UserError(f"{key}: {path} is not a folder{checkpoints_beside(path)}")
    if not (path / "config.json").is_file():
        raise UserError(f"{key}: {path} has no config.json; it is not the folder of a Hugging Face model")


def _check_weights(path: Path, key: str) -> None:
    if not any(path.glob("*.safetensors")):
        raise UserError(
            f"{key}: {path} has no weights (*.safetensors); pickles (*.bin) are not read: save as safetensors"
        )
    try:
        for file in sorted(path.glob("*.safetensors")):
            read_header(file)
        named = indexed_files(path / INDEX) if (path / INDEX).is_file() else []
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {error}; save or download the model again") from error
    if missing := [name for name in named if not (path / name).is_file()]:
        raise UserError(f"{key}: {path} lacks {', '.join(missing[:5])}, which {INDEX} names; download the model again")

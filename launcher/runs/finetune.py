"""``rl-async sft``: fine-tunes a model folder on conversations, and prints the progress.

The conversations are checked and encoded here, once, into files that the ranks map. An interrupted run continues from
its newest checkpoint when the same command is given again. A preset may make its model this way, from a pretrained one
and the preset's demonstrations (``warm_start.pretrained``).
"""

import asyncio
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from rl_async.accelerators import count_gpus
from rl_async.agent_loop.training_data import Chat, ChatEncoder, ChatTokens, Pair, read_chats, read_pairs
from rl_async.configs.checks import INSTEAD
from rl_async.configs.derived import eval_parts, files_of, parts
from rl_async.configs.load import load_resolved
from rl_async.configs.schema.data import DataConfig, DataSource, FinetuneConfig, PretrainedConfig, WarmStartConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import EXIT_SIGNAL, DataError, UserError
from rl_async.files import replace_file, undamaged
from rl_async.insight.tail import LineTail, Record
from rl_async.launcher.plan.artifacts import SFT_FILE, check_model_folder, checkpoints, origin_of
from rl_async.launcher.plan.machine import check_trainer, cores, read_machine, settle_here, with_threads
from rl_async.launcher.plan.memory import model_size, read_shape
from rl_async.launcher.plan.planning import RENDEZVOUS, PortWish, assign_ports, finetune_ranks
from rl_async.launcher.run_folder import create, hold, saved
from rl_async.launcher.runs.launch import log_into, note_machine, shown, stop_text
from rl_async.launcher.sources import model_folder
from rl_async.launcher.supervisor import Interrupted, RoleFailed, ThisMachine, keep_ranks
from rl_async.pictures import PictureProcessor
from rl_async.process.private_folder import hold_private_folder
from rl_async.reward_loop.scorers.reward_model import load_tokenizer
from rl_async.trainer.finetune import HELD_OUT, IMAGES, ROWS, ChatRows, EncodedRow, total_steps

POLL_S = 0.3
# A whole run prints this many lines, besides those of measurements.
LINES = 40
HEAD = f"{'steps':>7} {'epoch':>6} {'loss':>8} {'held-out':>8} {'tokens/s':>10} {'rate':>8} {'left':>8}"


class FinetuneView:
    """Shows the records that the ranks write, each step once; an earlier start did the first ``begun`` of ``steps``."""

    def __init__(self, folder: Path, steps: int, begun: int, console: Console) -> None:
        self._console, self._steps, self._shown = console, steps, begun
        self._metrics = LineTail(folder / "metrics.jsonl")
        self._evaluations = LineTail(folder / "evaluations.jsonl")
        self._since: list[Record] = []
        self._measured, self._headed = begun > 0, False
        # Skip the records of an earlier start: ranks replace the files when they continue from a checkpoint.
        self._metrics.records()
        self._evaluations.records()

    async def run(self) -> None:
        """Consumes metrics.jsonl and evaluations.jsonl; produces lines. Waits POLL_S. Runs until cancelled."""
        while True:
            self.show_new()
            await asyncio.sleep(POLL_S)

    def show_new(self) -> None:
        """Print the lines for the records since the last call."""
        for evaluation in self._evaluations.records():
            if evaluation["eval/step"] == 0 and not self._measured:
                self._measured = True
                self._print(row(0, 0.0, None, evaluation["eval/loss"], None, None, None))
        for record in self._metrics.records():
            completed = int(record["step"]) + 1
            # A step may be trained again.
            if completed <= self._shown:
                continue
            self._shown = completed
            self._since.append(record)
            if completed == self._steps or completed % max(1, self._steps // LINES) == 0 or "eval/loss" in record:
                self._print(line(self._since, self._steps))
                self._since = []

    def _print(self, text: str) -> None:
        if not self._headed:
            self._console.print(HEAD, markup=False)
            self._headed = True
        self._console.print(text, markup=False)


def line(records: list[Record], steps: int) -> str:
    """Format the mean over some steps; the time left assumes that the remaining steps take as long."""
    last = records[-1]
    completed = int(last["step"]) + 1
    trained = sum(r["tokens/trained"] for r in records)
    loss = sum(r["loss/train"] * r["tokens/trained"] for r in records) / max(trained, 1)
    speed = sum(r["tokens/all"] for r in records) / sum(r["time/train_s"] for r in records)
    left = (steps - completed) * sum(r["time/step_s"] for r in records) / len(records)
    return row(completed, last["epoch"], loss, last.get("eval/loss"), speed, last["learning_rate"], left)


def row(
    completed: int,
    epoch: float,
    loss: float | None,
    held_out: float | None,
    speed: float | None,
    rate: float | None,
    left: float | None,
) -> str:
    """Format one line of the table; ``left`` is in seconds."""
    cells = (
        (f"{completed}", 7),
        (f"{epoch:.2f}", 6),
        ("" if loss is None else f"{loss:.4f}", 8),
        ("" if held_out is None else f"{held_out:.4f}", 8),
        ("" if speed is None else f"{speed:,.0f}", 10),
        ("" if rate is None else f"{rate:.1e}", 8),
        ("" if left is None else f"{int(left) // 60}:{int(left) % 60:02d}", 8),
    )
    return " ".join(text.rjust(width) for text, width in cells)


def summary(folder: Path, out: Path) -> str:
    """Summarize a run that wrote ``out``: held-out loss before and after, and the places of its files."""
    evaluations = LineTail(folder / "evaluations.jsonl").records()
    held_out = ""
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        unit = "pair" if "eval/accuracy" in last else "token"
        held_out = f"held-out loss per {unit} {first['eval/loss']:.4f} before, {last['eval/loss']:.4f} after; "
        if "eval/accuracy" in last:
            held_out += f"{last['eval/accuracy']:.1%} of held-out pairs in the right order; "
    return f"{held_out}model: {out}; metrics and checkpoints: {folder}"


DATA_FILE = "data.json"
KEPT = (
    *("model.path", "model.dtype", "data.path", "data.eval_path", "data.shuffle", "seed", "trainer.backend"),
    "agent.chat_format",
    *("trainer.grad_clip", "trainer.weight_decay", "trainer.beta2"),
    *(f"finetune.{name}" for name in FinetuneConfig.__struct_fields__ if name not in ("out", "eval_every")),
)


class DataRecord(msgspec.Struct, frozen=True):
    """Describes the encoded conversations beside it: counts, and checksums of the data's and the tokenizer's files."""

    checksums: dict[str, str]
    conversations: int
    held_out: int
    skipped: int
    tokens: int
    learned: int


def finetune(config: RunConfig) -> int:
    """Fine-tune and show the progress; return the exit code. Raises UserError or RoleFailed."""
    assert config.finetune is not None
    out = Path(config.finetune.out)
    if not out.name:
        raise UserError(f"finetune.out={config.finetune.out}: give the name of a new folder")
    folder = out.with_name(f"{out.name}.run")
    _check(config)
    with hold(folder), hold_private_folder(folder):
        config, machine = settle_here(_as_begun(config, folder), folder if checkpoints(folder) else None)
        resumes = _resumes(config, folder)
        if out.exists():
            _require_finished(config, folder, resumes)
            print(f"{out} exists; delete it and {folder} to train it again")
            return 0
        create(config, folder)
        note_machine(folder, machine)
        record = _encode_once(config, folder)
        console = Console(highlight=False)
        for line in _headline(config, record, folder):
            console.print(line, markup=False, soft_wrap=True)
        with log_into(folder):
            code = asyncio.run(_train(config, folder, console))
        if out.exists():
            console.print(summary(folder, out), markup=False, soft_wrap=True)
        elif code == 0:
            raise RoleFailed(
                f"the ranks were asked to end before the last step; the same command continues; see {folder}/logs"
            )
        return code


async def _train(config: RunConfig, folder: Path, console: Console) -> int:
    """Run the ranks; return 0, or the exit code of the signal that ended the run."""
    assert config.finetune is not None
    rows = ChatRows.map(folder / ROWS, config.finetune.each)
    steps = total_steps(len(rows), config.finetune)
    view = FinetuneView(folder, steps, saved(folder), console)
    began = time.time()

    def on_stop(number: int) -> None:
        console.print(stop_text(folder, began, number), markup=False, soft_wrap=True)

    try:
        async with shown(view.run()):
            executor = ThisMachine(assign_ports([PortWish(RENDEZVOUS)]), folder)
            gpus = count_gpus()
            given = config if gpus else with_threads(config, model_size(config), cores(), engine_ranks=0)
            specs = finetune_ranks(given, folder, gpus)
            await keep_ranks(specs, executor, folder, config.launcher.stop_timeout_s, on_stop)
    except Interrupted as interrupted:
        view.show_new()
        done = saved(folder)
        print(
            f"interrupted ({interrupted}) with {done} of {steps} steps saved; the same command continues from there",
            file=sys.stderr,
        )
        return EXIT_SIGNAL + interrupted.number
    view.show_new()
    return 0


def _as_begun(config: RunConfig, folder: Path) -> RunConfig:
    """Return the config, with the compute type of the run to continue if that run lacks a record of its machine."""
    if config.model.dtype != "auto" or not checkpoints(folder) or read_machine(folder) is not None:
        return config
    dtype = load_resolved(folder / "config.yaml").model.dtype
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype=dtype))


def _check(config: RunConfig) -> None:
    """Check the model and the trainer's requirements before the conversations are read. Raises UserError."""
    check_model_folder(Path(config.model.path), "model.path")
    gpus = count_gpus()
    if config.model.device == "gpu" and gpus == 0:
        raise UserError("model.device=gpu, but no GPU is visible; use auto or cpu")
    check_trainer(config, gpus)


def _resumes(config: RunConfig, folder: Path) -> bool:
    """Whether the folder holds a run of this config.

    Raises UserError if a run of another config has a checkpoint there; without one, its encoded data are discarded.
    """
    if not (folder / "config.yaml").is_file():
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"finetune.out: {folder} is where the run would be, and holds something else; move it away")
        return False
    before, now = (msgspec.to_builtins(c) for c in (load_resolved(folder / "config.yaml"), config))
    for key in KEPT:
        section, _, name = key.rpartition(".")
        old, new = ((values[section] if section else values)[name] for values in (before, now))
        if old != new and not checkpoints(folder):
            (folder / DATA_FILE).unlink(missing_ok=True)
            return False
        if old != new:
            raise UserError(
                f"{key}={new}: the run in {folder} was begun with {old}, which it keeps; give it again, delete "
                f"{folder} to start again, or choose another finetune.out"
            )
    return True


def _require_finished(config: RunConfig, folder: Path, resumes: bool) -> None:
    assert config.finetune is not None
    done = checkpoints(folder)
    finished = resumes and (folder / ROWS).is_dir() and done
    each = config.finetune.each
    if not finished or done[-1] < total_steps(len(ChatRows.map(folder / ROWS, each)), config.finetune):
        raise UserError(f"finetune.out: {config.finetune.out} exists; delete it, or choose another folder")


def _encode_once(config: RunConfig, folder: Path) -> DataRecord:
    """Encode the conversations, unless an earlier start of the run did. Raises DataError."""
    given = (("data.path", parts(config.data)), ("data.eval_path", eval_parts(config.data)))
    checksums = {
        str(file): checksum(key, file) for key, sources in given for source in sources for file in files_of(source.path)
    }
    tokenizer = {str(file): checksum("model.path", file) for file in _tokenizer_files(Path(config.model.path))}
    checksums |= tokenizer
    done = folder / DATA_FILE
    if done.is_file():
        with undamaged(done):
            record = msgspec.json.decode(done.read_bytes(), type=DataRecord)
        before = record.checksums
        # Earlier versions did not record the tokenizer's files.
        if not before.keys() & tokenizer.keys():
            before = tokenizer | before
        changed = sorted(path for path in before.keys() | checksums.keys() if before.get(path) != checksums.get(path))
        if not changed:
            return record
        if checkpoints(folder):
            raise DataError(f"{changed[0]} is not what {folder} was begun with; restore it, or delete {folder}")
        done.unlink()
    record = _encode(config, folder, checksums)
    # Written last, so that it only exists beside complete files.
    replace_file(done, msgspec.json.encode(record))
    return record


def _tokenizer_files(model: Path) -> list[Path]:
    """Return the files of a model's folder that determine the tokens of a conversation."""
    patterns = (
        "*processor_config.json",
        "tokenizer*",
        "chat_template*",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab*",
        "merges.txt",
    )
    return sorted(file for pattern in (*patterns, "*.model") for file in model.glob(pattern) if file.is_file())


def checksum(key: str, path: Path) -> str:
    """Return the SHA-256 of a file. Raises DataError, naming ``key``, if it does not exist."""
    if not path.is_file():
        raise DataError(f"{key}: no file {path}; paths are relative to the working directory")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _encode(config: RunConfig, folder: Path, checksums: dict[str, str]) -> DataRecord:
    own = config.finetune
    assert own is not None
    tokenizer, pictures = load_tokenizer(config.model.path, "model.path"), PictureProcessor.load(config.model.path)
    encoder = ChatEncoder(tokenizer, config.agent.chat_format, pictures)
    limit = longest(config)
    encode = encode_all if own.preferences is None else encode_pairs
    examples, skipped = encode(parts(config.data), encoder, limit, own)
    if config.data.eval_path is None:
        examples, held_out = split(examples, own.held_out, config.seed)
    else:
        held_out, more = encode(eval_parts(config.data), encoder, limit, own)
        skipped += more
    rows = [row for example in examples for row in example]
    if not rows:
        raise DataError(f"{_named(config)}: no conversation is left to train on ({skipped} were too long)")
    for name in (ROWS, HELD_OUT, IMAGES):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    for name, part in ((ROWS, rows), (HELD_OUT, [row for example in held_out for row in example])):
        ChatRows.of([EncodedRow(row.ids, row.learned, row.media) for row in part]).write(folder / name)
        for image in (image for row in part for image in row.images):
            (folder / IMAGES / image.sha256).write_bytes(image.data)
    return DataRecord(
        checksums=checksums,
        conversations=len(examples),
        held_out=len(held_out),
        skipped=skipped,
        tokens=sum(len(row.ids) for row in rows),
        learned=sum(int(row.learned.sum()) for row in rows),
    )


def _named(config: RunConfig) -> str:
    return ", ".join(source.path for source in parts(config.data))


# The rows of one example: a conversation, or the better and the worse one of a pair.
Example = tuple[ChatTokens, ...]


def encode_all(
    sources: Sequence[DataSource], encoder: ChatEncoder, limit: int, own: FinetuneConfig
) -> tuple[list[Example], int]:
    """Encode the conversations of data sets; also return the number skipped. Raises DataError naming the line."""
    chats = (chat for source in sources for chat in read_chats(source))
    return _within(((chat.place, (encoder.encode(chat),)) for chat in chats), limit, own)


def encode_pairs(
    sources: Sequence[DataSource], encoder: ChatEncoder, limit: int, own: FinetuneConfig
) -> tuple[list[Example], int]:
    """Encode the pairs of data sets; also return the number skipped. Raises DataError naming the row.

    Answers that both conversations of a pair begin with are part of the prompt and are not learned.
    """
    pairs = (pair for source in sources for file in files_of(source.path) for pair in read_pairs(str(file)))
    return _within(((pair.place, encode_pair(pair, encoder)) for pair in pairs), limit, own)


def encode_pair(pair: Pair, encoder: ChatEncoder) -> Example:
    """Encode both conversations of a pair, the better one first; what they begin with alike is not learned.

    Raises DataError if one of them is the beginning of the other.
    """
    both = pair.chosen, pair.rejected
    asked = sum(1 for _ in takewhile(lambda messages: messages[0] == messages[1], zip(*both, strict=False)))
    if asked == min(map(len, both)):
        raise DataError(f"{pair.place}: one conversation is the beginning of the other; compare answers to one prompt")
    turns = sum(message["role"] == "assistant" for message in pair.chosen[:asked])
    return tuple(_unlearned(encoder.encode(Chat(messages, pair.tools, pair.place)), turns) for messages in both)


def _unlearned(row: ChatTokens, turns: int) -> ChatTokens:
    """Return a row of which the first ``turns`` of the assistant's turns are not learned."""
    # Something that is not the assistant's stands between two turns.
    turn = np.cumsum(np.diff(row.learned, prepend=False) & row.learned)
    return row._replace(learned=row.learned & (turn > turns))


def _within(examples: Iterable[tuple[str, Example]], limit: int, own: FinetuneConfig) -> tuple[list[Example], int]:
    kept, skipped = list[Example](), 0
    for place, rows in examples:
        longest_row = max(len(row.ids) for row in rows)
        if longest_row <= limit:
            kept.append(rows)
        elif own.too_long == "skip":
            skipped += 1
        else:
            raise DataError(
                f"{place}: {longest_row} tokens, and the most is {limit} (finetune.max_tokens, or the model's "
                "positions); shorten it, or set finetune.too_long=skip to leave such conversations out"
            )
    return kept, skipped


def split(rows: list[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Split examples into training and held-out ones, at least one of each if ``share`` and their number allow it."""
    count = min(max(1, round(share * len(rows))), len(rows) - 1) if share > 0 and rows else 0
    kept = set(np.random.default_rng([seed & 0xFFFFFFFF, 1]).permutation(len(rows))[:count].tolist())
    return [r for i, r in enumerate(rows) if i not in kept], [r for i, r in enumerate(rows) if i in kept]


def longest(config: RunConfig) -> int:
    """Return the maximal number of tokens of a conversation. Raises UserError if the model has too few positions."""
    assert config.finetune is not None
    wanted = config.finetune.max_tokens
    file = Path(config.model.path) / "config.json"
    shape = read_shape("model.path", Path(config.model.path))
    if shape is None:
        raise UserError(f"model.path: there is no {file}")
    positions = shape.get("text_config", shape).get("max_position_embeddings")
    if positions is not None and wanted > positions:
        raise UserError(f"finetune.max_tokens={wanted}: {config.model.path} has {positions} positions; set fewer")
    return wanted or positions or sys.maxsize


def _headline(config: RunConfig, record: DataRecord, folder: Path) -> list[str]:
    own = config.finetune
    assert own is not None
    skipped = f", {record.skipped} too long and skipped" if record.skipped else ""
    begun = checkpoints(folder)
    kind = "conversations" if own.preferences is None else "pairs"
    return [
        f"{config.model.path} on {_named(config)}: {record.conversations:,} {kind}, {record.held_out:,} held "
        f"out{skipped}; {record.learned:,} of {record.tokens:,} tokens are learned",
        f"{total_steps(record.conversations, own)} steps of {own.batch_size} {kind} on {config.trainer.ranks} "
        f"rank(s) of {config.trainer.backend}; run folder: {folder}",
        *([f"continuing at step {begun[-1]}"] if begun else []),
    ]


KEY = "warm_start.pretrained.path"


def fine_tune(config: RunConfig, settings: WarmStartConfig, report: Callable[[str], None]) -> None:
    """Fetch the pretrained model, fine-tune it in separate processes, and save it at ``warm_start.out``.

    After an interruption, the next call continues. Raises UserError or RoleFailed, and SystemExit on a signal.
    """
    assert settings.pretrained is not None
    base = model_folder(settings.pretrained.path, KEY)
    check_model_folder(base, KEY)
    report(f"warm start: fine-tuning {settings.pretrained.path} on {settings.demos_path}")
    if code := finetune(finetune_config(config, settings, settings.pretrained, base)):
        sys.exit(code)
    record = msgspec.to_builtins(origin_of(settings)) | {"pretrained": settings.pretrained.path}
    replace_file(Path(settings.out) / SFT_FILE, json.dumps(record).encode() + b"\n")


def finetune_config(
    config: RunConfig, settings: WarmStartConfig, pretrained: PretrainedConfig, base: Path
) -> RunConfig:
    """Return the config of the fine-tuning, without the settings of ``trainer`` that only concern RL."""
    ignored = {key: getattr(TrainerConfig(), key) for key in INSTEAD}
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=str(base)),
        data=DataConfig(path=settings.demos_path),
        trainer=msgspec.structs.replace(config.trainer, **ignored),
        critic=None,
        warm_start=None,
        finetune=FinetuneConfig(
            out=settings.out,
            epochs=pretrained.epochs,
            batch_size=pretrained.batch_size,
            learning_rate=pretrained.learning_rate,
        ),
    )

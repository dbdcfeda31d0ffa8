"""``rl-async model info``: describes a model folder, the trainers and engines that can use it, and their memory."""

import io
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from rl_async.configs.engines import ENGINES
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, UserError
from rl_async.launcher.plan.machine import check_engine_python, has_megatron
from rl_async.launcher.plan.memory import engine_bytes, model_size, trainer_bytes
from rl_async.launcher.sources import SOURCE_FILE
from rl_async.model_files import read_header, read_object
from rl_async.pictures import PictureProcessor

Facts = Iterator[tuple[str, str]]


def describe(folder: Path, config: RunConfig) -> list[str]:
    """Return one line for each fact about the model; ``config`` sizes the memory.

    Raises UserError if the folder's ``config.json`` is not that of a model.
    """
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: its config.json cannot be used: {str(error).partition(chr(10))[0]}") from error
    processor, unread = None, ""
    try:
        processor = PictureProcessor.load(str(folder))
    except UserError as error:
        unread = str(error)
    built, problem = (None, unread.partition("\n")[0]) if unread else _built(folder)
    trainers, engines = _trainers(hf, built, problem), _engines(built or hf, config)
    facts = [*_weights(folder, hf), *_images(processor, unread), *_chat(folder), *trainers, *engines, *_memory(config)]
    width = max(len(name) for name, _ in facts)
    return [f"{name:<{width}}  {text}" for name, text in facts]


def _weights(folder: Path, hf: Any) -> Facts:
    yield "architecture", f"{', '.join(hf.architectures or ['unknown'])} (model type {hf.model_type})"
    dtypes: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        for tensor in read_header(file).values():
            dtypes[tensor.dtype] += math.prod(tensor.shape)
    kinds = ", ".join(sorted(dtypes))
    yield "parameters", f"{dtypes.total():,} ({kinds})" if dtypes else "unknown: there are no safetensors files"
    text = hf.get_text_config()
    yield "positions", f"{getattr(text, 'max_position_embeddings', None) or 'unknown'}"
    if (folder / SOURCE_FILE).is_file():
        facts = read_object(folder / SOURCE_FILE)
        yield (
            "imported from",
            ", ".join(f"{value}" if key == "source" else f"{key} {value}" for key, value in facts.items()),
        )


# Pixels of a side of the image whose tokens are counted.
SIDE = 448


def _images(processor: PictureProcessor | None, unread: str) -> Facts:
    if unread:
        yield "images", f"none: {unread}"
    if processor is not None:
        file = io.BytesIO()
        Image.new("RGB", (SIDE, SIDE)).save(file, "PNG")
        yield "images", f"{len(processor.encode(file.getvalue()).tokens):,} tokens for one of {SIDE} x {SIDE} pixels"


def _chat(folder: Path) -> Facts:
    import jinja2
    from transformers import PreTrainedTokenizerFast

    from rl_async.agent_loop.chat_formats.format_registry import choose
    from rl_async.reward_loop.scorers.reward_model import load_tokenizer

    try:
        tokenizer: PreTrainedTokenizerFast = load_tokenizer(str(folder), "chat format")
        chat = choose(tokenizer, "auto")
    except (ConfigError, ValueError, jinja2.TemplateError) as error:
        yield "chat format", f"none: {error}"
        return
    ends = ", ".join(str(tokenizer.convert_ids_to_tokens(token)) for token in chat.stop_token_ids)
    yield "chat format", f"{chat.name}; a turn ends with {ends}"
    yield "vocabulary", f"{len(tokenizer):,} tokens"


def _built(folder: Path) -> tuple[Any, str]:
    """The config of the model that the trainer builds, on PyTorch's meta device, whose tensors take no memory.

    None if it cannot be built; the second result says why.
    """
    import torch

    from rl_async.trainer.model import build_bare

    try:
        with torch.device("meta"):
            return build_bare(folder).config, ""
    except UserError as error:
        return None, str(error).partition("\n")[0]


def _trainers(hf: Any, built: Any, problem: str) -> Facts:
    from rl_async.trainer.families import why_not_shared, why_padded, why_unsupported

    if built is None:
        yield "trainer fsdp2", f"no: {problem}"
    elif padded := why_padded(built):
        yield "trainer fsdp2", f"yes, rows padded: {padded}"
    else:
        yield "trainer fsdp2", "yes, rows packed"
        if apart := why_not_shared(built, 1):
            yield "  sharing", f"trainer.sequence_parallel is refused: {apart}"
    unsupported = why_unsupported(hf)
    install = "" if has_megatron() else "; it is not installed here: pip install 'rl-async[megatron]'"
    yield "trainer megatron", f"{'yes' if unsupported is None else f'no: the model {unsupported}'}{install}"


def _engines(hf: Any, config: RunConfig) -> Facts:
    from rl_async.rollout_server.embedded.core import why_not_served

    problem = why_not_served(hf)
    yield "engine embedded", "yes" if problem is None else f"no: it does not serve {problem}"
    for kind, traits in ENGINES.items():
        if not traits.package:
            continue
        try:
            check_engine_python(kind, config.rollout.python or sys.executable)
            where = f"installed in {config.rollout.python or 'this environment'}"
        except UserError:
            where = f"not installed here: {traits.install}"
        yield f"engine {kind}", f"decided by {traits.title}'s own list of architectures; {where}"


def _memory(config: RunConfig) -> Facts:
    size = model_size(config)
    data, rollout = config.data, config.rollout
    what = (
        f"model.dtype={config.model.dtype} rollout.max_model_len={rollout.max_model_len} rollout.max_batch_size="
        f"{rollout.max_batch_size} data.train_batch_groups={data.train_batch_groups} rollout.group_size="
        f"{rollout.group_size} trainer.ranks={config.trainer.ranks}"
    )
    yield "memory of a trainer rank", f"{_gib(trainer_bytes(config, size))} (as --dry-run estimates)"
    yield "memory of an engine", _gib(engine_bytes(config, size))
    yield "  with", what


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.2f} GiB"

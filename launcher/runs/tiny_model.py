"""Makes the tiny model of a preset: a tokenizer, random weights, and a warm start on demonstrations."""

import asyncio
import contextlib
import errno
import functools
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from rl_async.agent_loop.chat_formats.format import reasoning_and_answer
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.tiny_tokenizer import VISION_MARKS, read_demos, train_tokenizer
from rl_async.agent_loop.tools.tool_registry import connect_servers
from rl_async.concurrency import gather_or_cancel
from rl_async.configs.schema.data import WarmStartConfig
from rl_async.configs.schema.run import EvalConfig, RunConfig
from rl_async.errors import UserError
from rl_async.files import written_whole
from rl_async.launcher.plan.artifacts import SFT_FILE, origin_of
from rl_async.launcher.plan.memory import TINY_PATCH, tiny_shape, tiny_tower
from rl_async.messages import LeasedGroup, Media, Task, Version, by_role, episode_rewards
from rl_async.pictures import PictureProcessor
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.embedded.engine_thread import LocalEngine
from rl_async.trainer.packing import ImageRow, Images, embedded, lay_images
from rl_async.transfer_queue.dataset import make_sources
from rl_async.transfer_queue.images import images_of, mime_of

WARMUP_STEPS = 30
IGNORED = -100
# Token ids, and for each whether it is learned.
TokenRow = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class WarmStartResult:
    """Steps taken, the greedy reward that passed the gate, and the wall time in seconds."""

    steps: int
    gate_reward: float
    seconds: float


class Plateau:
    """Halves the learning rate when greedy reward has not risen for ``PATIENCE`` checks.

    It waits until the model copies at all, since before that a lower rate only delays the jump. A model whose greedy
    reward reaches ``COPIES`` does.
    """

    PATIENCE = 3
    COPIES = 0.3

    def __init__(self) -> None:
        self.best, self.scale = 0.0, 1.0
        self._stalled = 0

    def observe(self, reward: float) -> None:
        """Update ``best`` and ``scale`` (the factor on the learning rate) with the reward of one check."""
        self._stalled = 0 if reward > self.best else self._stalled + 1
        self.best = max(self.best, reward)
        if self._stalled >= self.PATIENCE and self.best >= self.COPIES:
            self.scale, self._stalled = self.scale / 2, 0


def warm_start(
    model: torch.nn.Module,
    rows: Sequence[TokenRow],
    check: Callable[[], float],
    config: WarmStartConfig,
    report: Callable[[str], None],
    on_step: Callable[[int, int, float], None] = lambda step, next_check, loss: None,
    images_of: Callable[[Sequence[int]], Images | None] = lambda numbers: None,
) -> WarmStartResult:
    """Train ``model`` on demonstrations until ``check()``, its greedy reward on held-out tasks, reaches
    ``config.gate``. ``on_step`` is called with each step, the step of the next check, and the loss; ``images_of`` lays
    out the images of the rows with these numbers.

    Copying appears abruptly after 200 to more than 400 steps, depending on the seed, so no fixed number of steps is
    enough. A seed that copies but stays below the gate needs a smaller learning rate, which is halved when greedy
    reward stops rising. Raises UserError if the gate is not reached within ``config.max_steps``.
    """
    began = time.perf_counter()
    draw = random.Random(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    plateau = Plateau()
    for step in range(1, config.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * plateau.scale * min(1.0, step / WARMUP_STEPS)
        numbers = [draw.randrange(len(rows)) for _ in range(config.batch_size)]
        loss = _loss(model, [rows[number] for number in numbers], images_of(numbers))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_step(step, next_check(step, config), loss.item())
        if step >= config.min_steps and step % config.check_every == 0:
            reward = check()
            report(f"warm start: {step} steps, loss {loss.item():.3f}, greedy reward {reward:.2f} (gate {config.gate})")
            if reward >= config.gate:
                return WarmStartResult(step, reward, time.perf_counter() - began)
            plateau.observe(reward)
    raise UserError(
        f"the warm start reached a greedy reward of {plateau.best:.2f}, not warm_start.gate={config.gate}, in "
        f"warm_start.max_steps={config.max_steps} steps; raise warm_start.max_steps, or try another warm_start.seed"
    )


def next_check(step: int, config: WarmStartConfig) -> int:
    """Return the first step from ``step`` on after which the greedy reward is measured, or the last step."""
    first = max(step, config.min_steps)
    return min(config.max_steps, first + -first % config.check_every)


def _loss(model: torch.nn.Module, rows: Sequence[TokenRow], images: Images | None) -> Tensor:
    """Return the mean cross-entropy of the tokens to learn. Padding on the right needs no attention mask."""
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.zeros((len(rows), width), dtype=torch.int64)
    labels = torch.full((len(rows), width), IGNORED)
    for i, (ids, learn) in enumerate(rows):
        tokens[i, : len(ids)] = torch.tensor(ids)
        labels[i, : len(ids)] = torch.where(torch.tensor(learn), torch.tensor(ids), IGNORED)
    inputs = {"input_ids": tokens} if images is None else embedded(model, tokens, images)
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)


def make_model(
    config: RunConfig,
    settings: WarmStartConfig,
    report: Callable[[str], None],
    on_step: Callable[[int, int, float], None],
) -> None:
    """Train a tokenizer and a tiny model on the demonstrations up to the gate, and save both at ``model.path``.

    ``on_step`` is that of ``warm_start``.
    """
    torch.set_num_threads(config.launcher.threads or 1)
    torch.manual_seed(settings.seed)
    demos = read_demos(settings.demos_path)
    longest = config.rollout.max_model_len
    tokenizer = train_tokenizer(demos, settings.vocab_size, model_max_length=longest, vision=settings.vision)
    model = tiny_model(settings, tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    report(f"warm start: {parameters:,} parameters, {len(tokenizer)} tokens, {len(demos)} demonstrations")
    renderer = ChatRenderer(tokenizer)
    with tempfile.TemporaryDirectory(prefix="rl-async-model-") as folder:
        # Prompts are measured by the files of a model, and this one has none yet.
        write_text_files(Path(folder), model, tokenizer)
        renderer.pictures = PictureProcessor.load(folder)
        readable = msgspec.structs.replace(config.model, path=folder)
        _, held_out = make_sources(msgspec.structs.replace(config, model=readable, eval=_greedy(config, settings)))
    rows = [renderer.demo_row(demo) for demo in demos]
    images = [images_of(demo) for demo in demos]
    if not held_out:
        raise UserError("data.eval_path: the warm start's gate needs held-out tasks")
    result = warm_start(
        model,
        rows,
        lambda: greedy_reward(config, model, renderer, held_out),
        settings,
        report,
        on_step,
        lambda numbers: shown(numbers, rows, images, renderer.pictures),
    )
    save(Path(config.model.path), model, tokenizer, settings, result)
    report(
        f"warm start: greedy reward {result.gate_reward:.2f} after {result.steps} steps, {result.seconds:.0f} s; "
        f"saved to {config.model.path}"
    )


def shown(
    numbers: Sequence[int],
    rows: Sequence[TokenRow],
    images: Sequence[Sequence[bytes]],
    processor: PictureProcessor | None,
) -> Images | None:
    """Lay out the images of the demonstrations with these numbers; each has its tokens, in order, in its row."""
    found, media = [], dict[str, bytes]()
    for number in numbers:
        (ids, learned), there, end = rows[number], list[Media](), 0
        for data in images[number]:
            assert processor is not None, "a row was made of it"
            place = ids.index(processor.image_token, end)
            end = place + len(processor.encode(data).tokens)
            there.append(Media.of(data, mime_of(data), place))
            media[there[-1].sha256] = data
        found.append(ImageRow(number, np.array(ids), np.array(learned), there))
    return lay_images(found, media, processor, "cpu")


def tiny_model(settings: WarmStartConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Make a Qwen3, a Qwen3-MoE or a Qwen2.5-VL of the configured size, with random weights."""
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        **tiny_shape(settings),
        "max_position_embeddings": tokenizer.model_max_length,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if settings.experts:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, norm_topk_prob=True))
    if settings.vision:
        return Qwen2_5_VLForConditionalGeneration(vision_config(shape, tiny_tower(settings), tokenizer))
    return Qwen3ForCausalLM(Qwen3Config(**shape))


# The standard deviation of a tiny vision-language model's first weights. With the usual 0.02 it takes a thousand steps
# until the model reads images at all.
SPREAD = 0.06


def vision_config(shape: dict[str, Any], tower: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """Return the config of a Qwen2.5-VL with a decoder of this shape, and a vision tower."""
    half = shape["hidden_size"] // shape["num_attention_heads"] // 2
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    vocabulary = tokenizer.get_vocab()
    start, image, end = (vocabulary[mark] for mark in VISION_MARKS)
    spread: dict[str, Any] = {"initializer_range": SPREAD}
    return Qwen2_5_VLConfig(
        text_config={key: value for key, value in shape.items() if key != "head_dim"}
        | spread
        | {"rope_parameters": rope},
        vision_config=tower | spread | {"window_size": 4 * TINY_PATCH, "fullatt_block_indexes": [1]},
        image_token_id=image,
        vision_start_token_id=start,
        vision_end_token_id=end,
        # There is none.
        video_token_id=len(tokenizer),
        tie_word_embeddings=True,
        **spread,
    )


def image_processor() -> Qwen2VLImageProcessorPil:
    """Return the image processor of the tiny model: images of up to 64 tokens, larger ones are shrunk."""
    size = {"shortest_edge": (2 * TINY_PATCH) ** 2, "longest_edge": 64 * (2 * TINY_PATCH) ** 2}
    return Qwen2VLImageProcessorPil(patch_size=TINY_PATCH, temporal_patch_size=2, merge_size=2, size=size)


def write_text_files(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write what reads and writes the model's texts and images: its config, tokenizer and image processor."""
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if isinstance(model.config, Qwen2_5_VLConfig):
        image_processor().save_pretrained(folder)


def greedy_reward(config: RunConfig, model: torch.nn.Module, renderer: ChatRenderer, tasks: Sequence[Task]) -> float:
    """Return the mean reward of one greedy episode per task, played by the run's own loop and scorers."""
    assert config.warm_start is not None
    config = msgspec.structs.replace(config, eval=_greedy(config, config.warm_start))
    model.eval()
    engine = LocalEngine(
        model,
        max_batch=config.rollout.max_batch_size,
        max_length=config.rollout.max_model_len,
        pictures=renderer.pictures,
    )
    try:
        return asyncio.run(mean_reward(config, engine, renderer, tasks))
    finally:
        model.train()


async def mean_reward(config: RunConfig, engine: LocalEngine, renderer: ChatRenderer, tasks: Sequence[Task]) -> float:
    """Return the mean reward of one episode per task, and close the engine."""
    async with contextlib.AsyncExitStack() as stack:
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-async-mcp-"))
        toolbox = await stack.enter_async_context(connect_servers(config.agent, Path(logs), "warm-start"))
        runner = EpisodeRunner(config, renderer, engine, toolbox)
        stack.push_async_callback(runner.close)
        # The engine's thread delivers to this event loop, so it has to end before the loop.
        stack.callback(engine.close)
        read = functools.partial(reasoning_and_answer, renderer)
        service = RewardService(config.reward, sandbox=config.sandbox, read=read)
        rewards = await stack.enter_async_context(service)

        async def play(number: int, task: Task) -> float:
            group = LeasedGroup(
                group_id=number, partition="eval", attempt=0, samples=[0], task=task, min_version=Version()
            )
            rows = await runner.run(group, 0)
            for *others, last in by_role(rows):
                await rewards.score(task, last, *others)
            return sum(episode_rewards(row.header() for row in rows).values())

        scores = await gather_or_cancel(*(play(number, task) for number, task in enumerate(tasks)))
    return sum(scores) / len(scores)


def _greedy(config: RunConfig, settings: WarmStartConfig) -> EvalConfig:
    return msgspec.structs.replace(config.eval, temperature=0.0, tasks=settings.gate_tasks)


def save(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    settings: WarmStartConfig,
    result: WarmStartResult,
) -> None:
    """Write the model folder, whole or not at all; another launch may have written it first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    try:
        with written_whole(path) as partial:
            model.save_pretrained(partial)
            write_text_files(partial, model, tokenizer)
            record = msgspec.to_builtins(origin_of(settings)) | {
                "steps": result.steps,
                "gate_reward": result.gate_reward,
            }
            (partial / SFT_FILE).write_text(json.dumps(record) + "\n")
    except OSError as error:
        # If the folder exists, another launch was faster, and `prepare` checks its model.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise

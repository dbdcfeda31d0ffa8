"""Puts recorded episodes with their rewards into the queue instead of playing any (``rollout.replay``).

The tasks of the queue name the recorded groups in the order of their training (``task_of``), and it admits one batch
at a time, so every run over a recording trains the same rows in the same order.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

import msgspec

from rl_async.agent_loop.chat_formats.format import ChatFormat
from rl_async.agent_loop.episode import policy_sampling
from rl_async.configs.derived import samples_per_group
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.messages import LeasedGroup, Task, Trajectory
from rl_async.recording import KEY, RecordedGroup, Recording, place_of


class RecordedRunner:
    """Returns the recorded rows of a sample under this run's names instead of playing it."""

    def __init__(self, config: RunConfig) -> None:
        self._recording, self._reading = Recording(config.rollout.replay), asyncio.Lock()

    async def run(self, group: LeasedGroup, sample: int, images: dict[str, bytes] | None = None) -> list[Trajectory]:
        """Return a sample's rows, scored, and add their images by hash to ``images``."""
        async with self._reading:
            samples = await asyncio.to_thread(self._recording.rows, *place_of(group.task))
            if images is not None:
                shown = {medium.sha256 for row in samples[sample] for medium in row.media}
                images |= {name: self._recording.images[name] for name in shown}
        name = f"{group.group_id}.{sample}.{group.attempt}"
        return [
            msgspec.structs.replace(row, group_id=group.group_id, attempt=group.attempt, episode_id=name, activities=[])
            for row in samples[sample]
        ]


class AsRecorded:
    """Stands in for the reward service: recorded rows are scored."""

    async def score(self, task: Task, trajectory: Trajectory, *others: Trajectory, alone: bool = True) -> None:
        """Leave the rows as they are: they were scored when they were recorded."""

    async def compare(self, task: Task, episodes: Sequence[Sequence[Trajectory]]) -> None:
        """Leave the rows as they are: a comparison is part of their recorded rewards."""


def needed_groups(config: RunConfig) -> list[RecordedGroup]:
    """Return the groups of ``rollout.replay`` that this run trains, in order, by reading the list of groups alone.

    Raises ConfigError if there are too few groups, or if they or the batches differ in size from this run's.
    """
    recording, size = Recording(config.rollout.replay), samples_per_group(config)
    steps, batch = config.trainer.steps, config.data.train_batch_groups
    sizes = Counter(group.step for group in recording.groups)
    for step in range(steps):
        if step not in sizes and any(later > step for later in sizes):
            raise ConfigError(f"{KEY}={recording.folder}: its trained.jsonl lacks step {step}, and has later ones")
        if step not in sizes:
            raise ConfigError(f"{KEY}={recording.folder}: it has {step} steps, not trainer.steps={steps}")
        if sizes[step] != batch:
            raise ConfigError(
                f"{KEY}={recording.folder}: step {step} has {sizes[step]} groups, not data.train_batch_groups={batch}; "
                "its tokens would change their age"
            )
    needed = recording.groups[: steps * batch]
    for group in needed:
        if group.samples != set(range(size)):
            raise ConfigError(
                f"{KEY}={recording.folder}: group {group.group} has {len(group.samples)} samples, and this run's have "
                f"{size} (rollout.group_size={config.rollout.group_size})"
            )
    return needed


def check_recording(config: RunConfig, chat: ChatFormat | None, vocabulary: int | None = None) -> None:
    """Read all that this run trains of ``rollout.replay``.

    Raises ConfigError for rows that are missing or changed since they were trained, or sampled under another
    truncation, for tokens beyond ``vocabulary``, and for tokens that the tokenizer of ``chat`` decodes to another text.
    Either of the last two checks is skipped for None.
    """
    recording, own = Recording(config.rollout.replay), policy_sampling(config, "train")
    for group in needed_groups(config):
        rows = recording.rows(group.step, group.group)
        for row in (row for of_sample in rows.values() for row in of_sample):
            theirs = row.sampling
            if not theirs.greedy and (theirs.top_k, theirs.top_p) != (own.top_k, own.top_p):
                raise ConfigError(
                    f"{KEY}={recording.folder}: a row of group {row.group_id} was sampled with top_k={theirs.top_k}, "
                    f"top_p={theirs.top_p}, not by this run's rollout.truncation"
                )
            largest = (
                row.token_ids.max() if row.kept_tokens is None else max(row.token_ids.max(), row.kept_tokens.max())
            )
            if vocabulary is not None and not 0 <= row.token_ids.min() <= largest < vocabulary:
                raise ConfigError(
                    f"{KEY}={recording.folder}: a row of group {row.group_id} has the token {largest}, and "
                    f"model.path has {vocabulary}: another tokenizer made it"
                )
            if chat is not None:
                _check_tokens(recording, row, chat)


def _check_tokens(recording: Recording, row: Trajectory, chat: ChatFormat) -> None:
    unread = row.loss_mask.copy()
    for turn in row.turns:
        place = slice(turn.start, turn.end)
        if turn.role != "assistant" or not row.loss_mask[place].any():
            continue
        unread[place] = False
        text = chat.turn_text(row.token_ids[place].tolist())
        if text != turn.text:
            raise ConfigError(
                f"{KEY}={recording.folder}: its tokens are not of the tokenizer of model.path, which reads an answer "
                f"of group {row.group_id} as {text[:80]!r}; {turn.text[:80]!r} was recorded"
            )
    if unread.any():
        raise ConfigError(
            f"{KEY}={recording.folder}: a row of group {row.group_id} has {unread.sum()} trained tokens without a "
            "recorded text, so nothing tells whether they are of the tokenizer of model.path"
        )

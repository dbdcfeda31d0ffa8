"""Hands recorded episodes to the queue instead of playing any (``rollout.replay``), with the rewards that they got.

The tasks of the queue name the recorded groups in the order of their training (``task_of``), and it admits one batch
at a time, so every run over a recording trains the same rows in the same order.
"""

import asyncio

import msgspec

from rl_async.agent_loop.chat_formats.format import ChatFormat
from rl_async.configs.derived.samples import samples_per_group
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.messages import LeasedGroup, Task, Trajectory
from rl_async.recording import KEY, RecordedGroup, Recording, place_of


class RecordedRunner:
    """Plays nothing: returns the rows that a recording has of a sample, under the names that this run gives them."""

    def __init__(self, config: RunConfig) -> None:
        self._recording, self._reading = Recording(config.rollout.replay), asyncio.Lock()

    async def run(self, group: LeasedGroup, sample: int) -> list[Trajectory]:
        """Return a sample's rows, scored."""
        async with self._reading:
            samples = await asyncio.to_thread(self._recording.rows, *place_of(group.task))
        name = f"{group.group_id}.{sample}.{group.attempt}"
        return [
            msgspec.structs.replace(row, group_id=group.group_id, attempt=group.attempt, episode_id=name)
            for row in samples[sample]
        ]


class AsRecorded:
    """Stands in for the reward service: recorded rows are scored."""

    async def score(self, task: Task, trajectory: Trajectory, *others: Trajectory) -> None:
        """Do nothing."""


def needed_groups(config: RunConfig) -> list[RecordedGroup]:
    """Return the groups of ``rollout.replay`` that this run trains, in order.

    Raises ConfigError if there are too few, or they are of another size than this run's, by the list of them alone.
    """
    recording, size, batch = Recording(config.rollout.replay), samples_per_group(config), config.data.train_batch_groups
    needed = recording.groups[: config.trainer.steps * batch]
    if len(needed) < config.trainer.steps * batch:
        raise ConfigError(
            f"{KEY}={recording.folder}: it has {len(recording.groups)} groups, enough for "
            f"{len(recording.groups) // batch} steps, not for trainer.steps={config.trainer.steps}"
        )
    for place, group in enumerate(needed):
        if group.step != needed[0].step + place // batch:
            raise ConfigError(
                f"{KEY}={recording.folder}: its steps have another number of groups than "
                f"data.train_batch_groups={batch} (step {needed[place - 1].step}), so its tokens would change their age"
            )
        if group.samples != frozenset(range(size)):
            raise ConfigError(
                f"{KEY}={recording.folder}: group {group.group} has {len(group.samples)} samples, and this run's have "
                f"{size} (rollout.group_size={config.rollout.group_size})"
            )
    return needed


def check_recording(config: RunConfig, chat: ChatFormat) -> None:
    """Read all that this run trains of ``rollout.replay``.

    Raises ConfigError for what is missing, and for tokens that the tokenizer of ``chat`` does not read as they were.
    """
    recording = Recording(config.rollout.replay)
    for group in needed_groups(config):
        rows = recording.rows(group.step, group.group)
        if rows.keys() != group.samples:
            raise ConfigError(
                f"{KEY}={recording.folder}: its trajectories of step {group.step}, group {group.group} are of the "
                f"samples {sorted(rows)}, and {sorted(group.samples)} were trained"
            )
        for row in (row for of_sample in rows.values() for row in of_sample):
            _check_tokens(recording, row, chat)


def _check_tokens(recording: Recording, row: Trajectory, chat: ChatFormat) -> None:
    for turn in row.turns:
        place = slice(turn.start, turn.end)
        if turn.role != "assistant" or not row.loss_mask[place].any():
            continue
        text = chat.turn_text(row.token_ids[place].tolist())
        if text != turn.text:
            raise ConfigError(
                f"{KEY}={recording.folder}: its tokens are not of the tokenizer of model.path, which reads an answer "
                f"of group {row.group_id} as {text[:80]!r}; {turn.text[:80]!r} was recorded"
            )

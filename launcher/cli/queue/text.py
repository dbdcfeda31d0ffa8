"""Formats the queue's replies as text. Pure functions."""

from collections.abc import Sequence

import msgspec

from rl_async.launcher.watch.terminal import printable
from rl_async.launcher.watch.trajectory_view import reward_parts, reward_text
from rl_async.messages import ConsumerRecord, DeliveredGroup, GroupRecord, Inspection, Trajectory
from rl_async.transfer_queue.book import State


def inspection_text(report: Inspection) -> str:
    """Format the queue's status: progress, groups by state, rates, counters, dead letters."""
    status = report.status
    counts = dict(
        zip(State, (status.waiting, status.leased, status.ready, status.reserved, status.committed), strict=True)
    )
    flags = [word for word, on in (("draining", report.draining), ("finished", status.finished)) if on]
    lines = [
        ", ".join(
            [
                "nothing published" if status.published.step < 0 else f"version {status.published} published",
                f"{status.slots_used} of {status.slots} slots used",
                f"{status.admitted} groups admitted",
                f"{status.workers} workers",
                f"{nbytes(status.payload_bytes)} held",
                *([f"{report.submitted} submitted tasks wait"] if report.submitted else []),
                *flags,
            ]
        ),
        f"{'state':12}{'groups':>8}{'oldest':>10}",
    ]
    for state, count in counts.items():
        lines.append(f"{state:12}{count:8}{seconds(report.ages_s.get(state)):>10}".rstrip())
    lease = report.oldest_lease
    if lease is not None:
        lines.append(f"oldest lease: group {lease.group_id}, with {lease.worker} for {seconds(lease.age_s)}")
    rates = report.rates
    lines.append(
        f"per second, over the last minute: {rates['groups_ready']:.2f} groups ready, {rates['groups_reserved']:.2f} "
        f"reserved, {rates['rows']:.2f} rows, {nbytes(rates['bytes'])}"
    )
    if report.shards:
        lines.append("payload shards: " + ", ".join(f"{shard.shard_id} at {shard.url}" for shard in report.shards))
    counted = ", ".join(f"{name} {count}" for name, count in sorted(status.counters.items()) if count)
    lines += [f"counters: {counted}"] if counted else []
    lines += [f"dead letter: group {d.group_id}, task {d.task.task_id}: {d.error}" for d in report.dead_letters]
    lines += [_consumer(record) for record in report.consumers]
    lines += [f"kept for consumers only: {nbytes(report.kept_bytes)}"] if report.kept_bytes else []
    return printable("\n".join(lines))


def _consumer(record: ConsumerRecord) -> str:
    lost = f", {record.skipped} were dropped before it read them" if record.skipped else ""
    return f"consumer {record.name}: {record.position} groups done, {record.behind} to read{lost}"


def trained_line(group: DeliveredGroup) -> str:
    """Encode one group as JSON; lists have an entry per row, by (sample, segment)."""
    line = {
        "position": group.position,
        "step": group.step,
        "group": group.group_id,
        "task": group.task.task_id,
        "source": group.task.source,
        "samples": [header.sample for header in group.headers],
        "rewards": [header.reward for header in group.headers],
        "tokens": [header.tokens for header in group.headers],
        "finish_reasons": [header.finish_reason for header in group.headers],
    }
    return msgspec.json.encode(line).decode()


def groups_text(groups: Sequence[GroupRecord]) -> str:
    """Format groups as a table, one line each."""
    lines = [f"{'group':>14} {'state':10}{'here':>8}{'age':>10}{'bytes':>10}  {'task':24}workers"]
    for group in groups:
        lines.append(
            f"{group.group_id:>14} {group.state:10}{f'{group.here}/{group.samples}':>8}{seconds(group.age_s):>10}"
            f"{nbytes(group.nbytes):>10}  {group.task_id:24}{', '.join(group.workers)}".rstrip()
        )
    return printable("\n".join(lines))


def trajectory_text(row: Trajectory) -> str:
    """Format one row: its reward, the versions that sampled it, and its turns."""
    parts = ", ".join(f"{name} {value:g}" for name, value in row.reward_parts.items())
    versions = ", ".join(f"{run.version} for tokens {run.start} to {run.end}" for run in row.versions)
    lines = [
        f"group {row.group_id}, sample {row.sample}, segment {row.segment} of episode {row.episode_id}, "
        f"attempt {row.attempt}",
        f"reward {row.reward:g}{f' ({parts})' if parts else ''}{'' if row.scored else ', not scored'}, "
        f"{len(row.token_ids)} tokens, {int(row.loss_mask.sum())} sampled, ended by {row.finish_reason}",
        f"versions (of sampled tokens): {versions or 'none'}",
    ]
    lines += [*reward_parts(row), *([f"error: {row.error}"] if row.error else [])]
    for turn in row.turns:
        lines.append(f"--- {turn.role}{'' if turn.reward is None else f', {reward_text(turn.reward, turn.reason)}'}")
        lines.append(turn.text)
        for call in turn.tool_calls:
            lines.append(f"  {call.name}({call.arguments}) -> {call.error or call.result}")
    return printable("\n".join(lines))


def nbytes(count: float) -> str:
    """Format bytes in a unit of suitable size."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def seconds(age: float | None) -> str:
    """Format an age in seconds; empty for None."""
    return "" if age is None else f"{age:.1f} s"

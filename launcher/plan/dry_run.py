"""``rl-async launch --dry-run``: checks what can be checked without starting a process, and prints the plan."""

import shlex
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.plan.artifacts import needs_data, needs_model
from rl_async.launcher.plan.budget import STAGES
from rl_async.launcher.plan.machine import plan_here, settle_here
from rl_async.launcher.plan.planning import Plan
from rl_async.launcher.plan.ports import assign_ports
from rl_async.process.run_files import DeviceBudget, MemoryBudget


def dry_run(config: RunConfig, folder: Path, *, resume: bool = False) -> None:
    """Check the files, ports and devices of a run, and print the processes that would be started.

    Raises UserError for what would end the run at once: missing files, a taken port, a missing GPU.
    """
    config, machine = settle_here(config, folder)
    planned = plan_here(config, folder, resume=resume)
    assign_ports([wish for wish in planned.ports if wish.port])  # raises for one that is taken
    console = Console()
    console.print(plan_table(planned))
    for table in memory_tables(planned.memory):
        console.print(table)
    for line in (*machine.lines, *plan_notes(config, folder, planned)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def plan_table(planned: Plan) -> Table:
    """Lay out a plan as a table with one row per process."""
    ports = {wish.name: str(wish.port) if wish.port else "free" for wish in planned.ports}
    table = Table(title=f"{planned.mode}, weights by {planned.transport}", title_justify="left")
    for heading in ("process", "device", "port", "memory", "restarts"):
        table.add_column(heading, justify="left" if heading in ("process", "device") else "right")
    for spec in planned.processes:
        memory = "unknown" if spec.memory_bytes is None else f"{spec.memory_bytes / 2**30:.2f} GiB"
        table.add_row(spec.name, spec.device, ports.get(spec.name, ""), memory, str(spec.max_restarts))
    return table


def memory_tables(budget: MemoryBudget) -> list[Table]:
    """Lay out who has how much of a device in which stage, in GiB: a table for all devices that are planned alike."""
    alike: dict[tuple[tuple[str, ...], ...], list[DeviceBudget]] = {}
    for device in budget.devices:
        alike.setdefault(tuple(memory_rows(device)), []).append(device)
    return [_memory_table([device.device for device in devices], devices[0]) for devices in alike.values()]


def _memory_table(names: list[str], device: DeviceBudget) -> Table:
    limit = "" if device.limit is None else f", {_gib(device.limit)} GiB to plan with"
    table = Table(title=f"memory of {', '.join(names)}{limit}", title_justify="left")
    for heading in ("stage", "who", "GiB", "of these"):
        table.add_column(heading, justify="right" if heading == "GiB" else "left")
    for stage, *row in memory_rows(device):
        if stage:
            table.add_section()
        table.add_row(stage, *row)
    return table


def memory_rows(device: DeviceBudget) -> list[tuple[str, ...]]:
    """Return stage, holder, GiB and its parts, those of at least 5 MiB; processes that look alike in one row, and all
    of a device together. The stage stands in its first row."""
    rows: list[tuple[str, ...]] = []
    for stage in STAGES:
        first = len(rows)
        alike: Counter[tuple[str, str, str]] = Counter()
        for holder in device.holders:
            parts = holder.stages[stage].items()
            shown = ", ".join(f"{part} {_gib(nbytes)}" for part, nbytes in parts if nbytes >= 5 << 20)
            alike[holder.role, _gib(holder.total(stage)), shown] += 1
        for (role, total, shown), count in alike.items():
            rows.append(("", role if count == 1 else f"{role}, each of {count}", total, shown))
        if len(device.holders) > 1:
            rows.append(("", "together", _gib(device.total(stage)), ""))
        rows[first] = (stage, *rows[first][1:])
    return rows


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


def plan_notes(config: RunConfig, folder: Path, planned: Plan) -> list[str]:
    """Return the lines below the table: command lines, folder, total memory, what is made first."""
    notes = [f"{spec.name}: {shlex.join(['python', *spec.argv[1:]])}" for spec in planned.processes]
    known = [spec.memory_bytes for spec in planned.processes if spec.memory_bytes is not None]
    notes += [f"run folder: {folder}", f"memory in all, at most about: {sum(known) / 2**30:.1f} GiB"]
    if needs_data(config):
        notes.append(f"made first: {config.data.make} data for {config.data.path}")
    if needs_model(config):
        notes.append(f"made first: a warm-started model in {config.model.path}")
    notes.append("dry run: nothing was started")
    return notes

"""``rl-async launch --dry-run``: checks what can be checked without starting a process, and prints the plan."""

import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.plan.artifacts import needs_data, needs_model
from rl_async.launcher.plan.machine import plan_here
from rl_async.launcher.plan.planning import Plan
from rl_async.launcher.plan.ports import assign_ports
from rl_async.launcher.plan.spec import THREADS


def dry_run(config: RunConfig, folder: Path, *, resume: bool = False) -> None:
    """Check the files, ports and devices of a run, and print the processes that would be started.

    Raises UserError for what would end the run at once: missing files, a taken port, a missing GPU.
    """
    planned = plan_here(config, folder, resume=resume)
    assign_ports([wish for wish in planned.ports if wish.port])  # raises for one that is taken
    console = Console()
    console.print(plan_table(planned))
    for line in plan_notes(config, folder, planned):
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


def plan_notes(config: RunConfig, folder: Path, planned: Plan) -> list[str]:
    """Return the lines below the table: command lines, folder, total memory, what is made first."""
    notes = [f"{spec.name}: {shlex.join(['python', *spec.argv[1:]])}" for spec in planned.processes]
    computing = [spec for spec in (*planned.engines, *planned.trainers) if spec.device == "cpu"]
    if computing:
        notes.append(f"threads of each engine and trainer rank: {computing[0].env[THREADS]} (launcher.threads)")
    known = [spec.memory_bytes for spec in planned.processes if spec.memory_bytes is not None]
    notes += [f"run folder: {folder}", f"memory in all, at most about: {sum(known) / 2**30:.1f} GiB"]
    if needs_data(config):
        notes.append(f"made first: {config.data.make} data for {config.data.path}")
    if needs_model(config):
        notes.append(f"made first: a warm-started model in {config.model.path}")
    notes.append("dry run: nothing was started")
    return notes

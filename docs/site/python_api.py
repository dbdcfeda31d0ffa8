"""The reference of what users' programs import, from docstrings, which mkdocstrings reads without running the code."""

from pathlib import Path

INTRODUCTION = """# Python

What notebooks, scripts, your own tools, rewards, environments, losses and readers of a run import. Names of runs,
rewards, environments, messages and algorithms are in `rl_async` itself, as in `from rl_async import launch, Step`.
Everything else is internal and may change without notice.

"""
OBJECTS = {
    "Runs": [f"rl_async.launcher.handle.{name}" for name in ("launch", "load", "Run", "Sample")],
    "Agent programs": ["rl_async.gateway.Gateway", "rl_async.gateway.RemoteEpisode", "rl_async.gateway.GatewayError"],
    "Environments and tools": [
        "rl_async.agent_loop.tools.tool.Step",
        "rl_async.agent_loop.environments.session.Environment",
        "rl_async.agent_loop.environments.session.Game",
        "rl_async.agent_loop.tools.tool.Tool",
    ],
    "Rewards": [
        "rl_async.reward_loop.api.Conversation",
        "rl_async.reward_loop.api.Score",
        "rl_async.extraction.last_number",
    ],
    "The transfer queue": [
        "rl_async.transfer_queue.server.serve",
        "rl_async.transfer_queue.client.SyncQueueClient",
        "rl_async.transfer_queue.client.QueueClient",
        "rl_async.transfer_queue.client.read_batches",
        "rl_async.transfer_queue.client.read_groups",
        "rl_async.transfer_queue.client.Batch",
        "rl_async.transfer_queue.client.TrainedGroup",
        "rl_async.transfer_queue.torch_dataset.QueueDataset",
    ],
    "Messages": [
        f"rl_async.messages.{name}" for name in ("Task", "Trajectory", "Turn", "ToolCall", "Sampling", "Version")
    ],
    "Algorithms of your own": [
        "rl_async.trainer.algorithms.losses.LossInputs",
        "rl_async.trainer.algorithms.losses.SelectInputs",
        "rl_async.trainer.algorithms.losses.PolicyLoss",
        "rl_async.trainer.algorithms.advantages.AdvantageInputs",
        "rl_async.trainer.algorithms.advantages.Groups",
        "rl_async.trainer.algorithms.advantages.spread",
        "rl_async.trainer.algorithms.correction.Corrected",
    ],
    "A training loop of your own": [
        "rl_async.trainer.train.Run",
        "rl_async.trainer.batches.take_batch",
        "rl_async.trainer.update.update",
        "rl_async.trainer.update.Updated",
        "rl_async.trainer.train.begin",
        "rl_async.trainer.train.batch_metrics",
        "rl_async.trainer.checkpoints.CheckpointSchedule",
    ],
    "Sandboxes": ["rl_async.sandbox.Sandbox", "rl_async.sandbox.Workspace", "rl_async.sandbox.Result"],
    "Errors": ["rl_async.errors"],
}


def write(pages: Path) -> list[str]:
    """Write the page below ``pages``; return its path."""
    parts = [f"## {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) for title, names in OBJECTS.items()]
    (pages / "reference/python.md").write_text(INTRODUCTION + "\n\n".join(parts) + "\n")
    return ["reference/python.md"]

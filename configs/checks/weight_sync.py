"""Rules for the section `weight_sync`: transports that cannot work, and options that would have no effect."""

from rl_async.configs.derived.queue import slack
from rl_async.configs.schema.run import RunConfig


def transport(c: RunConfig) -> str | None:
    transport = c.weight_sync.transport
    if transport in ("nearest", "gloo", "nccl") and c.mode == "colocated":
        return f"weight_sync.transport={transport} does not work with --mode colocated; use auto, ipc or disk"
    if transport == "nccl" and c.model.device == "cpu":
        return "weight_sync.transport=nccl needs GPUs, and model.device=cpu; use auto, gloo or disk"
    return None


def options(c: RunConfig) -> str | None:
    """Refuse options that would have no effect or exclude each other."""
    sync = c.weight_sync
    if sync.folder and sync.transport != "disk":
        return "weight_sync.folder is only used by weight_sync.transport=disk; set both, or leave it out"
    if sync.adapters and c.trainer.lora is None:
        return "weight_sync.adapters sends the adapters of trainer.lora; set both, or leave it out"
    if sync.adapters and sync.delta:
        return "weight_sync.delta saves nothing with weight_sync.adapters, which change entirely; use one of them"
    if sync.staged and c.mode == "colocated":
        return "weight_sync.staged lets engines decode meanwhile, but with --mode colocated they sleep; leave it out"
    if sync.waves > c.rollout.engines:
        return f"weight_sync.waves={sync.waves} needs at least as many engines; rollout.engines={c.rollout.engines}"
    if sync.waves > 1 and c.mode == "colocated":
        return "weight_sync.waves lets some engines keep decoding, but with --mode colocated all sleep; leave it out"
    return None


def publish_every(c: RunConfig) -> str | None:
    batches = c.queue.max_staleness - slack(c.queue) + 1
    if c.weight_sync.every > batches:
        return (
            f"weight_sync.every={c.weight_sync.every} would deadlock: all slots are used up after "
            f"queue.max_staleness - queue.slack + 1 = {batches} steps; publish at least that often"
        )
    return None


WEIGHT_SYNC_RULES = (transport, options, publish_every)

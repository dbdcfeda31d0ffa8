"""Rules for rollout engines: how many, their flags, and what each kind can do (``configs/engines``)."""

from rl_async.configs.checks.algorithm import Rule
from rl_async.configs.derived.engines import engine_kinds, engine_traits
from rl_async.configs.schema.run import RunConfig


def _count(c: RunConfig) -> str | None:
    kinds = engine_kinds(c)
    if len(kinds) == c.rollout.engines:
        return None
    return f"rollout.engine lists {len(kinds)} kinds and rollout.engines={c.rollout.engines}; give one kind per engine"


def _args(c: RunConfig) -> str | None:
    if not c.rollout.engine_args:
        return None
    takers = [traits for traits in engine_traits(c).values() if traits.package]
    if not takers:
        return "rollout.engine_args has no effect, since rollout.engine starts the embedded engine alone; leave it out"
    if len(takers) > 1:
        titles = " and ".join(traits.title for traits in takers)
        return f"rollout.engine_args would go to {titles}, which have different flags; leave them out"
    for word in c.rollout.engine_args:
        if why := takers[0].refusal(word):
            return f"rollout.engine_args: {word} cannot be set; {why}"
    return None


def _abilities(c: RunConfig) -> str | None:
    """The mode and the options of weight sync are those that every kind supports."""
    sync = c.weight_sync
    for kind, traits in engine_traits(c).items():
        if c.mode == "colocated" and not traits.reports_sleep:
            return (
                f"rollout.engine={kind} does not go with --mode colocated: {traits.title} does not report whether it "
                "sleeps, so requests would time out while the trainer has its device; use --mode disaggregated"
            )
        if sync.transport != "auto" and sync.transport not in traits.transports:
            return (
                f"rollout.engine={kind} does not go with weight_sync.transport={sync.transport}; "
                f"{traits.title} receives weights by {', '.join(traits.transports)}"
            )
        for option in ("delta", "staged", "adapters"):
            if getattr(sync, option) and not traits.holds_weights:
                return (
                    f"rollout.engine={kind} does not go with weight_sync.{option}, which needs engines that keep a "
                    f"copy of the weights; {traits.title} keeps none"
                )
    return None


ENGINE_RULES: tuple[Rule, ...] = (_count, _args, _abilities)

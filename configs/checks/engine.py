"""Rules for rollout engines: how many, their flags, and what each kind can do (``configs/engines``)."""

from rl_async.configs.checks.algorithm import Rule
from rl_async.configs.derived.engines import engine_kinds, engine_traits
from rl_async.configs.engines import ENGINES
from rl_async.configs.engines.traits import PARALLEL
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


def _lending(c: RunConfig) -> str | None:
    """Devices can be lent to engines that sleep, and that have no trainer rank in their group on the same device."""
    if not c.trainer.lend_devices:
        return None
    kind = engine_kinds(c)[0]
    if c.mode == "colocated":
        return "trainer.lend_devices has no effect with --mode colocated, where engines have those devices anyway"
    if not ENGINES[kind].reports_sleep:
        return f"trainer.lend_devices needs engines that report whether they sleep; rollout.engine={kind} does not"
    if c.weight_sync.transport == "nccl":
        return "trainer.lend_devices does not go with weight_sync.transport=nccl, which refuses two ranks on one GPU"
    if c.trainer.ranks < c.rollout.ranks:
        return (
            f"trainer.lend_devices: the devices of trainer.ranks={c.trainer.ranks} do not suffice for an engine of "
            f"{c.rollout.ranks} ranks (rollout.tensor_parallel * rollout.pipeline_parallel)"
        )
    return None


def _ranks(c: RunConfig) -> str | None:
    """Every kind can divide a model among ranks as configured, and experts go to the ranks that there are."""
    rollout = c.rollout
    for key in PARALLEL:
        number = getattr(rollout, key.removeprefix("rollout."))
        for kind, traits in engine_traits(c).items():
            if number > 1 and key not in traits.divides:
                able = " or ".join(name for name, them in ENGINES.items() if key in them.divides)
                return f"{key}={number} does not go with rollout.engine={kind}; use rollout.engine={able}"
            if key == "rollout.expert_parallel" and traits.expert_flags and number not in (1, rollout.tensor_parallel):
                return (
                    f"{key}={number}: {traits.title} divides experts among all ranks of a stage or none; use 1 or "
                    f"rollout.tensor_parallel={rollout.tensor_parallel}"
                )
    if rollout.tensor_parallel % rollout.expert_parallel:
        return (
            f"rollout.expert_parallel={rollout.expert_parallel} must divide rollout.tensor_parallel="
            f"{rollout.tensor_parallel}"
        )
    return None


def _quantization(c: RunConfig) -> str | None:
    wanted = c.rollout.quantization
    if wanted == "none":
        return None
    for kind, traits in engine_traits(c).items():
        key = f"rollout.quantization={wanted}"
        if wanted not in traits.quantization:
            able = " or ".join(name for name, them in ENGINES.items() if wanted in them.quantization)
            return f"{key} does not go with rollout.engine={kind}; use rollout.engine={able}"
        if c.model.dtype not in ("auto", *traits.quantized_dtypes):
            dtypes = " or ".join(traits.quantized_dtypes)
            return f"{key} with rollout.engine={kind} needs model.dtype={dtypes}, not {c.model.dtype}"
    return None


ENGINE_RULES: tuple[Rule, ...] = (_count, _args, _abilities, _lending, _ranks, _quantization)

"""Rules for ``trainer.backend=megatron``: parallel sizes that fit the ranks, and what the backend lacks."""

from rl_async.configs.schema.run import RunConfig

MEGATRON_ONLY = (  # sizes in trainer
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "expert_parallel",
)


def data_parallel(c: RunConfig) -> int:
    """Return the number of data-parallel ranks: each gets a different part of a mini-batch's rows.

    Ranks of Megatron that hold one copy of the model together count once, as do ranks that share rows.
    """
    t = c.trainer
    return max(t.ranks // (t.tensor_parallel * t.pipeline_parallel * t.sequence_parallel), 1)


def sharing(c: RunConfig) -> str | None:
    """Refuse parallel sizes that the backend lacks or that do not divide the ranks."""
    t = c.trainer
    sizes = {key: getattr(t, key) for key in MEGATRON_ONLY if getattr(t, key) > 1}
    if t.backend != "megatron":
        for key, size in sizes.items():
            return (
                f"trainer.{key}={size} needs trainer.backend=megatron; fsdp2 shards the weights among all "
                "trainer.ranks by itself"
            )
        return None
    model_ranks = t.tensor_parallel * t.pipeline_parallel * t.sequence_parallel
    if t.ranks % model_ranks:
        return (
            f"trainer.ranks={t.ranks} must be a multiple of {model_ranks}, the ranks that train the same rows: "
            f"trainer.tensor_parallel={t.tensor_parallel} times trainer.pipeline_parallel={t.pipeline_parallel} times "
            f"trainer.sequence_parallel={t.sequence_parallel}"
        )
    stage = t.ranks // t.pipeline_parallel
    if stage % t.expert_parallel:
        return (
            f"trainer.expert_parallel={t.expert_parallel} must divide the {stage} ranks of a pipeline stage, "
            f"trainer.ranks={t.ranks} over trainer.pipeline_parallel={t.pipeline_parallel}"
        )
    if t.virtual_pipeline > 1 and t.pipeline_parallel < 3:
        return (
            f"trainer.virtual_pipeline={t.virtual_pipeline} needs a trainer.pipeline_parallel of 3 or more: with two "
            "stages, Megatron-Core's interleaved schedule confuses activations with gradients"
        )
    return None


def megatron(c: RunConfig) -> str | None:
    """Refuse what this backend does not support."""
    if c.trainer.backend != "megatron":
        return None
    if c.algorithm.kl.coef > 0 and c.algorithm.kl.estimator == "full":
        return (
            "algorithm.kl.estimator=full needs full distributions, and with trainer.backend=megatron no rank holds "
            "the whole vocabulary; use another estimator"
        )
    return None

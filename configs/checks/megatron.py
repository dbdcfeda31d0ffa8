"""Rules for how trainer ranks share a model: which sizes go together, and what ``trainer.backend=megatron`` needs."""

from rl_async.configs.schema.run import RunConfig

SHARING = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel")


def data_parallel(c: RunConfig) -> int:
    """How many parts a mini-batch's rows are dealt out to: Megatron's copies of the model, or FSDP's ranks, of which
    those that share rows count once."""
    t = c.trainer
    return max(t.ranks // (t.tensor_parallel * t.pipeline_parallel * t.sequence_parallel), 1)


def sharing(c: RunConfig) -> str | None:
    """The rule for the sizes."""
    t = c.trainer
    asked = {key: getattr(t, key) for key in SHARING if getattr(t, key) > 1}
    if t.backend != "megatron":
        for key, size in asked.items():
            return (
                f"trainer.{key}={size} needs trainer.backend=megatron; trainer.backend=fsdp2 shards the weights among "
                "all trainer.ranks by itself"
            )
        return None
    cell = t.tensor_parallel * t.pipeline_parallel
    if t.ranks % cell:
        return (
            f"trainer.ranks={t.ranks} does not divide into copies of the model of trainer.tensor_parallel="
            f"{t.tensor_parallel} times trainer.pipeline_parallel={t.pipeline_parallel} ranks; use a multiple of {cell}"
        )
    if data_parallel(c) % t.expert_parallel:
        return (
            f"trainer.expert_parallel={t.expert_parallel} shares experts among the data-parallel ranks, and "
            f"trainer.ranks={t.ranks} leaves {data_parallel(c)} of them; use a multiple"
        )
    if t.virtual_pipeline > 1 and t.pipeline_parallel < 3:
        return (
            f"trainer.virtual_pipeline={t.virtual_pipeline} needs trainer.pipeline_parallel of 3 or more: between two "
            "ranks Megatron-Core's interleaved schedule would mix up what goes forward and what goes back"
        )
    return None


def megatron(c: RunConfig) -> str | None:
    """The rule for what that backend lacks."""
    if c.trainer.backend != "megatron":
        return None
    if c.model.dtype != "float32":
        return f"trainer.backend=megatron computes in float32 as yet, and model.dtype={c.model.dtype}; use fsdp2"
    if c.critic is not None:
        return "trainer.backend=megatron has no value head, which critic asks for; use fsdp2"
    if c.algorithm.kl.coef > 0 and c.algorithm.kl.estimator == "full":
        return (
            "algorithm.kl.estimator=full needs whole distributions, and with trainer.backend=megatron no rank holds "
            "the whole vocabulary; use another estimator"
        )
    return None

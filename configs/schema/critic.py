"""The critic: a model of the expected return, for advantages that need one."""

from typing import Annotated, Literal

from msgspec import Meta

from rl_async.configs.base import Config, Count, doc

NEEDS_CRITIC = ("gae",)  # advantage estimators that read a critic's values


class CriticConfig(Config, frozen=True):
    """What is not here (AdamW's betas and weight decay, mini-batches) is the trainer's."""

    path: Annotated[
        str | None,
        doc("Model that the critic starts from, or the `critic` folder of a checkpoint; null: model.path."),
    ] = None
    shared: Annotated[
        bool, doc("A value head on the policy's own backbone, trained with it by one loss, instead of a second model.")
    ] = False
    value_coef: Annotated[float, Meta(gt=0, description="shared: weight of the value loss beside the policy's.")] = 0.5
    clip: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        doc("Values that moved further than this within a step get no gradient; in units of reward; null: off."),
    ] = 0.5
    learning_rate: Annotated[float, Meta(gt=0, description="Peak learning rate of AdamW; shared: the trainer's.")] = (
        1e-5
    )
    schedule: Annotated[Literal["constant", "linear", "cosine"], doc("As trainer.schedule; shared: the trainer's.")] = (
        "constant"
    )
    lr_warmup_steps: Annotated[Count, doc("Optimizer steps of linear warm-up; shared: the trainer's.")] = 0
    grad_clip: Annotated[float, Meta(gt=0, description="Gradient norm is clipped to this; shared: the trainer's.")] = (
        1.0
    )
    warmup_steps: Annotated[Count, doc("Trainer steps, from the run's first, in which only the critic trains.")] = 0

"""What happens when an engine does not sample from the weights that the trainer gave it."""

from typing import Annotated, Literal

from msgspec import Meta

from rl_async.configs.schema.base import Config, Positive, doc


class MismatchConfig(Config, frozen=True):
    """After a publication every engine samples a few tokens, and the trainer computes their log-probabilities."""

    action: Annotated[
        Literal["off", "warn", "stop", "resync"],
        doc("Beyond the limit: log a warning, end the run, or send the weights again and end the run if that is vain."),
    ] = "warn"
    limit: Annotated[
        float, Meta(gt=0, description="Largest mean of |log pi(trainer) - log pi(engine)| over an engine's tokens.")
    ] = 0.05
    every: Annotated[
        Positive, doc("Compare after the first and then every this many publications; the trainer waits for engines.")
    ] = 5
    tokens: Annotated[Positive, doc("Tokens that each engine samples for a comparison.")] = 32

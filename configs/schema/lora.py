"""Low-rank adapters in place of whole weights."""

from typing import Annotated

from rl_async.configs.schema.base import Config, Positive, doc


class LoraConfig(Config, frozen=True):
    rank: Annotated[Positive, doc("Rank of each adapter's two matrices.")] = 16
    alpha: Annotated[Positive, doc("An adapter's product counts alpha / rank.")] = 32
    targets: Annotated[
        tuple[str, ...], doc("Names of the linear layers that get one, such as q_proj; empty: all in the decoder.")
    ] = ()

    @property
    def scale(self) -> float:
        """What an adapter's product counts."""
        return self.alpha / self.rank

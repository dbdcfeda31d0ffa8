"""Low-rank adapters in place of whole weights."""

from typing import Annotated

from msgspec import Meta

from rl_async.configs.base import Config, Positive, doc


class LoraConfig(Config, frozen=True):
    rank: Annotated[Positive, doc("Rank of each adapter's two matrices.")] = 16
    alpha: Annotated[float, Meta(gt=0, description="An adapter's product counts alpha / rank.")] = 32.0
    targets: Annotated[
        tuple[str, ...], doc("Names of the linear layers that get one, such as q_proj; empty: all in the decoder.")
    ] = ()

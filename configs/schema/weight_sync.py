"""Section `weight_sync`: how engines get new weights, and how they are checked afterwards."""

from typing import Annotated, Literal

from msgspec import Meta

from rl_async.configs.base import Config, Positive, Seconds, doc


class MismatchConfig(Config, frozen=True):
    """Checks that engines sample from the published weights: each samples a few tokens, and the trainer computes their
    log-probabilities."""

    action: Annotated[
        Literal["off", "warn", "stop", "resync"],
        doc(
            "Beyond the limit: log a warning, end the run, or send the weights again and end the run if that fails too."
        ),
    ] = "warn"
    limit: Annotated[
        float, Meta(gt=0, description="Largest mean of |log pi(trainer) - log pi(engine)| over an engine's tokens.")
    ] = 0.05
    every: Annotated[
        Positive,
        doc("Compare after the first and then after every this many publications; the trainer waits meanwhile."),
    ] = 5
    tokens: Annotated[Positive, doc("Tokens that each engine samples for a comparison.")] = 32


class WeightSyncConfig(Config, frozen=True):
    transport: Annotated[
        Literal["auto", "nearest", "gloo", "ipc", "nccl", "disk"],
        doc(
            "auto: ipc when colocated, else nearest, or gloo if an engine lacks it. nearest: shared memory if all "
            "engines are on the trainer's machine, else gloo. disk: files in weight_sync.folder. nccl: GPU to GPU, "
            "never run yet."
        ),
    ] = "auto"
    folder: Annotated[str, doc("disk: folder shared by trainer and engines; empty: weights/ in the run folder.")] = ""
    delta: Annotated[
        bool,
        doc(
            "Send only what changed; an engine that lacks the last version gets everything. Engines keep one host copy."
        ),
    ] = False
    staged: Annotated[
        bool, doc("Engines keep decoding while they receive and pause only to load. Engines keep one host copy.")
    ] = False
    adapters: Annotated[
        bool,
        doc("With trainer.lora: send only adapters; engines keep a host copy of the base weights to add them to."),
    ] = False
    waves: Annotated[
        Positive, doc("Update engines in this many groups, one after another, so that the others keep decoding.")
    ] = 1
    bucket_bytes: Annotated[Positive, doc("Size of a bucket; a larger tensor is split.")] = 64 << 20
    timeout_s: Annotated[Seconds, doc("Deadline of one engine's update; beyond it the engine is dropped.")] = 60.0
    sync_timeout_s: Annotated[
        Seconds, doc("Deadline of the update of all engines; those that are not done by then are dropped.")
    ] = 240.0
    every: Annotated[Positive, doc("Publish every this many steps; at most max_staleness + 1.")] = 1
    mismatch: MismatchConfig = MismatchConfig()

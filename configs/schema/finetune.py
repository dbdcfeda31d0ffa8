"""Supervised fine-tuning on conversations: what ``rl-async sft`` trains on, for how long, and where the model goes."""

from typing import Annotated, Literal

from msgspec import Meta

from rl_async.configs.base import Config, Count, Fraction, Positive, doc


class FinetuneConfig(Config, frozen=True):
    """The conversations are in data.path, and those to measure on in data.eval_path. What is not here (ranks, token
    budget, checkpoints, AdamW's betas) is the trainer's."""

    out: Annotated[
        str,
        doc("New folder for the model. Checkpoints and metrics go beside it, into OUT.run."),
    ]
    epochs: Annotated[Positive, doc("Passes over the conversations.")] = 1
    batch_size: Annotated[Positive, doc("Conversations per step, over all ranks.")] = 32
    steps: Annotated[Count, doc("Stop after this many steps; 0: after the epochs.")] = 0
    learning_rate: Annotated[float, Meta(gt=0, description="Peak learning rate of AdamW.")] = 1e-5
    schedule: Annotated[Literal["constant", "linear", "cosine"], doc("After warm-up; falls to 0 at the end.")] = (
        "cosine"
    )
    warmup: Annotated[Fraction, doc("Share of the steps in which the learning rate rises.")] = 0.03
    held_out: Annotated[
        Fraction, doc("Share of the conversations kept to measure the loss on, if data.eval_path is null; 0: none.")
    ] = 0.05
    eval_every: Annotated[
        Count, doc("Steps between measurements on the held-out conversations; 0: only before and after.")
    ] = 50
    max_tokens: Annotated[Count, doc("Longest conversation, in tokens; 0: as long as the model's positions go.")] = 0
    too_long: Annotated[
        Literal["refuse", "skip"], doc("What becomes of longer conversations; skipped ones are counted.")
    ] = "refuse"


class WarmStartConfig(Config, frozen=True):
    demos_path: Annotated[str, doc("Demonstrations: a `messages` column of chat messages.")]
    learning_rate: Annotated[
        float, Meta(gt=0, description="AdamW, after 30 steps of warm-up; halved when greedy reward stops rising.")
    ] = 3e-3
    batch_size: Annotated[Positive, doc("Demonstrations per step.")] = 48
    max_steps: Annotated[Positive, doc("Give up after this many steps.")] = 1500
    min_steps: Annotated[Count, doc("No check before this many steps.")] = 200
    check_every: Annotated[Positive, doc("Steps between greedy checks.")] = 50
    gate: Annotated[Fraction, doc("Stop when greedy reward on held-out tasks reaches this.")] = 0.9
    gate_tasks: Annotated[Positive, doc("Held-out tasks per check.")] = 64
    hidden_size: Annotated[Positive, doc("Width of the tiny model.")] = 64
    layers: Annotated[Positive, doc("Layers of the tiny model.")] = 2
    vocab_size: Annotated[Positive, doc("Largest size of the tokenizer trained on the demonstrations.")] = 200
    seed: Annotated[int, doc("Seed of the tiny model and of the demonstrations' order.")] = 0

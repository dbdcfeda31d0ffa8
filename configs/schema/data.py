"""Sections `model` and `data`: the model that a run starts from, and its tasks."""

from typing import Annotated, Literal

from msgspec import Meta

from rl_async.configs.base import Config, Count, Positive, doc


class ModelConfig(Config, frozen=True):
    path: Annotated[str, doc("Folder of a Hugging Face causal LM with its tokenizer; `sft` makes it if it is missing.")]
    dtype: Annotated[Literal["float32", "bfloat16"], doc("Type of the weights in trainer and engines.")] = "float32"
    device: Annotated[Literal["auto", "cpu", "cuda"], doc("auto: cuda if there is one.")] = "auto"


Weight = Annotated[float, Meta(ge=0)]


class DataSource(Config, frozen=True):
    path: Annotated[str, doc("Parquet or JSONL in verl's columns, or reasoning_gym:NAME.")]
    weight: Annotated[float, Meta(gt=0, description="Share of the tasks drawn from this source.")] = 1.0
    schedule: Annotated[
        tuple[tuple[Count, Weight], ...],
        doc("Curriculum: [[step, weight], ...] in place of weight, with a straight line between these steps."),
    ] = ()


class DataConfig(Config, frozen=True):
    path: Annotated[
        str | tuple[DataSource, ...],
        doc(
            "Training tasks: Parquet or JSONL in verl's columns, reasoning_gym:NAME, or a list of {path, weight} or "
            "{path, schedule}."
        ),
    ]
    eval_path: Annotated[str | None, doc("Held-out tasks; null: no evaluation.")] = None
    make: Annotated[
        Literal["calculator", "shop", "sort"] | None, doc("Generator that writes path and eval_path if missing.")
    ] = None
    train_batch_groups: Annotated[Positive, doc("Groups (tasks) per trainer step.")] = 24
    shuffle: Annotated[bool, doc("Shuffle with the run's seed, differently in each epoch.")] = True
    max_prompt_tokens: Annotated[Positive, doc("Longer prompts are refused, naming the row.")] = 1024

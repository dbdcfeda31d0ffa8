"""Sections `model` and `data`: the model that a run starts from, and the tasks it trains on."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rl_async.configs.base import Config, Count, Positive, doc
from rl_async.extraction import Extraction

ComputeType = Literal["float32", "bfloat16"]


class ModelConfig(Config, frozen=True):
    path: Annotated[
        str,
        doc(
            "Hugging Face causal LM with its tokenizer: a folder, an id of the Hub (OWNER/NAME, OWNER/NAME@REVISION; "
            "modelscope:OWNER/NAME), a GGUF file, or package:NAME, an installed package with one; a warm start makes "
            "that of warm_start.out."
        ),
    ]
    dtype: Annotated[
        Literal["auto"] | ComputeType,
        doc(
            "Type of the weights in the trainer, which keeps float32 masters, and in the engines. auto: bfloat16 on "
            "accelerators that have it; on a CPU the type that it multiplies faster, measured at the start of a run."
        ),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "gpu"], doc("auto: a GPU if there is one.")] = "auto"


Weight = Annotated[float, Meta(ge=0)]


class DataSource(Config, frozen=True):
    path: Annotated[str, doc("As data.path, for one data set.")]
    weight: Annotated[float, Meta(gt=0, description="Share of the tasks drawn from this source.")] = 1.0
    schedule: Annotated[
        tuple[tuple[Count, Weight], ...],
        doc("Curriculum in place of weight: [[step, weight], ...], interpolated linearly between these steps."),
    ] = ()
    system: Annotated[
        str, doc("System message put before each prompt, in place of its own; {column} is filled in.")
    ] = ""
    prompt: Annotated[
        str,
        doc("Template of the last user message, e.g. '{question} Think first.'; {prompt} is the row's own, if any."),
    ] = ""
    ground_truth: Annotated[str, doc("Template of the ground truth, e.g. '{answer}'; empty: reward_model's.")] = ""
    ground_truth_extract: Annotated[
        Extraction, doc("What of the ground truth counts, as extract of reward.functions, e.g. ['regex:#### (.*)'].")
    ] = ()
    parameters: Annotated[
        dict[str, Any], doc("Parameters of a reasoning_gym data set, e.g. {min_terms: 2, max_terms: 3}.")
    ] = msgspec.field(default_factory=dict)


class DataConfig(Config, frozen=True):
    path: Annotated[
        str | tuple[DataSource, ...],
        doc(
            "Training tasks in verl's columns: Parquet or JSONL, as a file, a folder or a pattern (train-*.parquet); "
            "OWNER/NAME:SPLIT of the Hugging Face Hub; reasoning_gym:NAME; or a list of {path, weight, ...} with "
            "templates for rows of other columns (docs/how-to/models_and_data.md)."
        ),
    ]
    eval_path: Annotated[
        str | tuple[DataSource, ...] | None, doc("Held-out tasks, as data.path; null: no evaluation.")
    ] = None
    make: Annotated[
        Literal["calculator", "shop", "market", "sort", "code", "order", "sums"] | None,
        doc("Generator that writes path and eval_path if they are missing."),
    ] = None
    train_batch_groups: Annotated[Positive, doc("Groups (tasks) per trainer step.")] = 24
    shuffle: Annotated[bool, doc("Shuffle tasks, in another order each epoch, from the run's seed.")] = True
    max_prompt_tokens: Annotated[Positive, doc("A longer prompt is an error that names its row.")] = 1024
    trust_code: Annotated[
        bool,
        doc(
            "Let agent_name and tools of a task, from the data or from a client of the queue, load any path.py:name; "
            "false: only what agent.loop and agent.tools name."
        ),
    ] = False

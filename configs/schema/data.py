"""Sections `model`, `data`, `finetune` and `warm_start`: the model and the data that a run starts from.

``rl-async sft`` fine-tunes on conversations (`finetune`); `warm_start` makes the model of a preset.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rl_async.configs.schema import Config, Count, Fraction, Positive, doc
from rl_async.extraction import Extraction

Above = Annotated[float, Meta(gt=0)]
ComputeType = Literal["float32", "bfloat16"]


# The key of a config.json that names Transformers' implementation of attention for the trainer.
ATTENTION_KEY = "rl_async_attention"
# Its value for the kernels of the flash-attn package, on packed rows as those of the trainer's own attention.
FLASH_ATTN = "flash_attn"
# For each kind of rotary embedding, the options that it needs, and those that it may have.
ROPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (("factor",), ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
}


class RopeConfig(Config, frozen=True):
    """The rotary embedding in place of the model's, by the names in its config.json."""

    rope_theta: Annotated[Above | None, doc("Base of the frequencies; null: the model's.")] = None
    rope_type: Annotated[
        Literal["default", "linear", "dynamic", "yarn", "llama3"] | None,
        doc("Scaling for longer contexts, with the options below; null: the model's."),
    ] = None
    factor: Annotated[Above | None, doc("How many times longer the context gets.")] = None
    original_max_position_embeddings: Annotated[
        Positive | None, doc("Positions that the model was trained on; null: those in its config.json.")
    ] = None
    attention_factor: Annotated[Above | None, doc("yarn: factor of the scores; null: by the paper.")] = None
    beta_fast: Annotated[Above | None, doc("yarn: turns beyond which a frequency stays.")] = None
    beta_slow: Annotated[Above | None, doc("yarn: turns below which a frequency is interpolated.")] = None
    low_freq_factor: Annotated[
        Above | None, doc("llama3: wavelengths beyond the positions divided by this are scaled.")
    ] = None
    high_freq_factor: Annotated[Above | None, doc("llama3: wavelengths below the positions divided by this stay.")] = (
        None
    )

    @property
    def options(self) -> dict[str, float]:
        """The options of the scaling that are given."""
        names = self.__struct_fields__[2:]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class OverrideConfig(Config, frozen=True):
    """Changes to the config.json of ``model.path``, for the trainer and all engines."""

    rope: Annotated[RopeConfig | None, doc("The rotary embedding; null: the model's.")] = None
    attention: Annotated[
        Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attn"] | None,
        doc(
            "fsdp2: Transformers' implementation of attention, on padded rows; engines keep their own. null: that of "
            "trainer/attention.py, on packed rows. flash_attn: the same with kernels of FlashAttention's own package, "
            "3 where it is installed, else 2; in bfloat16 on GPUs."
        ),
    ] = None


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
    override: Annotated[OverrideConfig | None, doc("Changes to the model's config.json; null: none.")] = None


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


class CurriculumConfig(Config, frozen=True):
    """Which tasks are trained, by the mean reward of a task's newest group, and in which order."""

    easy: Annotated[
        float | None, doc("Tasks whose mean reward is this or more are passed over from then on; null: none.")
    ] = None
    hard: Annotated[
        float | None, doc("Tasks whose mean reward is this or less are passed over from then on; null: none.")
    ] = None
    again: Annotated[
        Fraction, doc("Chance that a task which would be passed over is trained, and so measured, again.")
    ] = 0.0
    by_length: Annotated[bool, doc("In the first epoch, tasks with shorter prompts come first.")] = False


class DataConfig(Config, frozen=True):
    path: Annotated[
        str | tuple[DataSource, ...],
        doc(
            "Training tasks in verl's columns: Parquet, JSONL or CSV; a file, a folder or a pattern (train-*.parquet); "
            "OWNER/NAME:SPLIT of the Hugging Face Hub; reasoning_gym:NAME; or a list of {path, weight, ...} with "
            "templates for rows of other columns (docs/how-to/models_and_data.md)."
        ),
    ]
    eval_path: Annotated[
        str | tuple[DataSource, ...] | None, doc("Held-out tasks, as data.path; null: no evaluation.")
    ] = None
    make: Annotated[
        Literal["calculator", "shop", "market", "sort", "code", "order", "sums", "digits", "noise", "grid"] | None,
        doc("Generator that writes path and eval_path if they are missing."),
    ] = None
    train_batch_groups: Annotated[Positive, doc("Groups (tasks) per trainer step.")] = 24
    curriculum: Annotated[
        CurriculumConfig | None, doc("Tasks chosen by rewards or length; by data set: path's schedule. null: none.")
    ] = None
    shuffle: Annotated[bool, doc("Shuffle tasks, in another order each epoch, from the run's seed.")] = True
    max_prompt_tokens: Annotated[Positive, doc("A longer prompt is an error that names its row.")] = 1024
    trust_code: Annotated[
        bool,
        doc(
            "Let agent_name and tools of a task, from the data or from a client of the queue, load any path.py:name; "
            "false: only what agent.loop and agent.tools name."
        ),
    ] = False


class PreferenceConfig(Config, frozen=True):
    """Direct preference optimisation: an example is a pair, of which the policy learns to prefer the first."""

    beta: Annotated[
        float, Meta(gt=0, description="How strongly the policy is tied to the model that training starts from.")
    ] = 0.1
    loss: Annotated[
        Literal["sigmoid", "hinge", "ipo"],
        doc("sigmoid: DPO; hinge: SLiC's; ipo: a squared distance, with log-probabilities per token."),
    ] = "sigmoid"
    label_smoothing: Annotated[
        float, Meta(ge=0, lt=0.5, description="sigmoid: probability that a pair is the wrong way round.")
    ] = 0.0


class FinetuneConfig(Config, frozen=True):
    """Fine-tuning on the conversations in data.path, measured on those in data.eval_path.

    Ranks, token budget, checkpoints and AdamW's betas come from the section trainer.
    """

    out: Annotated[str, doc("New folder for the model. Checkpoints and metrics go into OUT.run beside it.")]
    epochs: Annotated[Positive, doc("Passes over the conversations.")] = 1
    batch_size: Annotated[Positive, doc("Conversations per step, over all ranks.")] = 32
    steps: Annotated[Count, doc("Stop after this many steps; 0: after the epochs.")] = 0
    learning_rate: Annotated[float, Meta(gt=0, description="Peak learning rate of AdamW.")] = 1e-5
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], doc("Learning rate after warm-up; linear and cosine fall to 0.")
    ] = "cosine"
    warmup: Annotated[Fraction, doc("Share of the steps during which the learning rate rises.")] = 0.03
    held_out: Annotated[
        Fraction, doc("Share of the conversations held out to measure the loss on, if data.eval_path is null; 0: none.")
    ] = 0.05
    eval_every: Annotated[
        Count, doc("Steps between measurements on the held-out conversations; 0: only before and after.")
    ] = 50
    max_tokens: Annotated[Count, doc("Longest conversation, in tokens; 0: as long as the model's positions go.")] = 0
    too_long: Annotated[
        Literal["refuse", "skip"], doc("Longer conversations are an error, or are skipped and counted.")
    ] = "refuse"
    preferences: Annotated[
        PreferenceConfig | None,
        doc("The data are pairs, in columns chosen and rejected (DPO); null: conversations to imitate."),
    ] = None

    @property
    def each(self) -> int:
        """How many rows an example has."""
        return 1 if self.preferences is None else 2


class PretrainedConfig(Config, frozen=True):
    """A pretrained model to fine-tune on the demonstrations, as ``rl-async sft`` does."""

    path: Annotated[
        str,
        doc("A folder, an id of the Hub (OWNER/NAME), a GGUF file, or package:NAME, an installed package with one."),
    ]
    epochs: Annotated[Positive, doc("Passes over the demonstrations.")] = 1
    batch_size: Annotated[Positive, doc("Demonstrations per step, over all ranks.")] = 32
    learning_rate: Annotated[float, Meta(gt=0, description="Peak learning rate of AdamW.")] = 1e-5


class WarmStartConfig(Config, frozen=True):
    """Trains a tokenizer and a tiny model on demonstrations, until greedy reward reaches ``gate``.

    With ``pretrained`` that model is fine-tuned on them instead.
    """

    demos_path: Annotated[str, doc("Demonstrations: a `messages` column of chat messages.")]
    out: Annotated[
        str, doc("Folder of the model that it makes if model.path is the same and missing; empty: makes none.")
    ] = ""
    pretrained: Annotated[
        PretrainedConfig | None, doc("The model to fine-tune; null: makes a tiny one, by the keys below.")
    ] = None
    learning_rate: Annotated[
        float, Meta(gt=0, description="Of AdamW after 30 steps of warm-up; halved when greedy reward stops rising.")
    ] = 3e-3
    batch_size: Annotated[Positive, doc("Demonstrations per step.")] = 48
    max_steps: Annotated[Positive, doc("Fail after this many steps without reaching gate.")] = 1500
    min_steps: Annotated[Count, doc("Steps before the first check.")] = 200
    check_every: Annotated[Positive, doc("Steps between checks of greedy reward.")] = 50
    gate: Annotated[Fraction, doc("Stop when greedy reward on held-out tasks reaches this.")] = 0.9
    gate_tasks: Annotated[Positive, doc("Held-out tasks per check.")] = 64
    hidden_size: Annotated[Positive, doc("Width of the tiny model.")] = 64
    layers: Annotated[Positive, doc("Layers of the tiny model.")] = 2
    experts: Annotated[
        Count, doc("Experts in each layer of the tiny model, two of them for each token; 0: one MLP for all tokens.")
    ] = 0
    vision: Annotated[
        bool, doc("Whether the tiny model reads images, 16 x 16 pixels a token: a Qwen2.5-VL in place of a Qwen3.")
    ] = False
    vocab_size: Annotated[Positive, doc("Largest size of the tokenizer trained on the demonstrations.")] = 200
    seed: Annotated[int, doc("Seed of the tiny model and of the demonstrations' order.")] = 0

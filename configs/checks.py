"""Rules that refuse configs which cannot work, before anything starts.

A rule takes the RunConfig and returns a message that names the keys and the way out, or None. ``check``, which the
loader calls, raises ConfigError with the messages of all broken rules. To add a rule, write it beside those of its
section and add it to that section's tuple or to ``RULES``.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import regex

from rl_async.configs.derived import (
    GENERATED_PREFIX,
    MODELLED_USERS,
    argv_of,
    engine_kinds,
    engine_traits,
    eval_parts,
    is_encrypted,
    labels,
    parts,
    plays_harbor,
    points_of,
    redis_of,
    samples_per_group,
    slack,
    weight_at,
    why_adapters_are_not_loaded,
)
from rl_async.configs.engines import ENGINES, PARALLEL
from rl_async.configs.schema.algorithm import (
    ADAPTIVE_LIMIT,
    ADVANTAGES,
    BY_CRITIC,
    LOSSES,
    PRESETS,
    Advantage,
    AdvantageOptions,
    AlgorithmConfig,
    Correction,
    CorrectionOptions,
    CriticConfig,
    Loss,
    LossOptions,
    ShapingConfig,
    TeacherConfig,
    advantage_needs,
    band,
    limits,
    read_options,
    resolve,
)
from rl_async.configs.schema.data import FLASH_ATTN, ROPES, DataConfig, DataSource, WarmStartConfig
from rl_async.configs.schema.rollout import DATA_PARALLEL, NODES, AgentConfig, McpServerConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.configs.suggestions import hint, nearest
from rl_async.errors import ConfigError
from rl_async.extraction import REGEX, Extraction, compiled
from rl_async.extraction import RULES as EXTRACTION_RULES
from rl_async.userload import is_user_reference

# Returns the problem of a config, or None.
Rule = Callable[[RunConfig], str | None]


def _names(c: RunConfig) -> str | None:
    a = c.algorithm
    known = (("advantage", a.advantage, ADVANTAGES), ("loss", a.loss, LOSSES), ("correction", a.correction, PRESETS))
    for key, name, names in known:
        if name not in names and not is_user_reference(name):
            return f"algorithm.{key}: no {name!r}{hint(f'algorithm.{key}', name) or nearest(name, names)}"
    return None


def _correction(c: RunConfig) -> str | None:
    if c.algorithm.correction not in PRESETS:
        # ``_names`` reports this.
        return None
    try:
        correction = resolve(c.algorithm.correction, c.algorithm.correction_options)
    except ConfigError as error:
        return str(error)
    rules = (_correction_loss, _double_weight, _row_weight, _bypass, _excludes_everything)
    return next((message for rule in rules if (message := rule(c.algorithm, correction))), None)


def _correction_loss(a: AlgorithmConfig, correction: Correction) -> str | None:
    if correction.loss is not None and a.loss not in (AlgorithmConfig().loss, correction.loss):
        return (
            f"algorithm.correction={a.correction} brings its own loss, {correction.loss}, and algorithm.loss={a.loss} "
            "asks for another; leave algorithm.loss out, or choose a correction without a loss"
        )
    return None


def _double_weight(a: AlgorithmConfig, correction: Correction) -> str | None:
    if _loss(a, correction).behaviour == "weighs" and correction.weight != "none":
        return (
            f"algorithm.loss={a.loss} multiplies by pi_old/mu itself, and algorithm.correction={a.correction} would "
            "weigh tokens again; use algorithm.correction=disabled, or algorithm.loss=ppo"
        )
    return None


def _row_weight(a: AlgorithmConfig, correction: Correction) -> str | None:
    if _loss(a, correction).weighs_rows and correction.weight == "sequence":
        return (
            f"algorithm.loss={a.loss} multiplies the weights of a row's tokens, and the weight=sequence of "
            f"algorithm.correction={a.correction} would count for each of them; use weights of tokens, such as "
            "algorithm.correction=decoupled_token_is, or none"
        )
    return None


def _bypass(a: AlgorithmConfig, correction: Correction) -> str | None:
    if correction.proximal == "recompute":
        return None
    if correction.normalise:
        return (
            f"algorithm.correction_options.normalise needs the mean weight of the whole batch, and with "
            f"algorithm.correction={a.correction} weights follow from the policy as it changes from mini-batch to "
            "mini-batch; use a decoupled correction"
        )
    loss, traits = correction.loss or a.loss, _loss(a, correction)
    if traits.behaviour != "unused":
        does = {"weighs": "weighs tokens by pi_old/mu", "limits": "limits how far pi_old is from mu"}[traits.behaviour]
        return (
            f"algorithm.loss={loss} {does}, and algorithm.correction={a.correction} takes mu for pi_old, so that they "
            "never differ; use a decoupled correction, or algorithm.correction=disabled"
        )
    if correction.weight != "none" and traits.uses_ratio:
        return (
            f"algorithm.correction_options.weight={correction.weight} with algorithm.correction={a.correction} would "
            f"correct twice, since the ratio of algorithm.loss={loss} is pi/mu already; use a decoupled or a bypass_pg "
            "correction"
        )
    return None


def _loss(a: AlgorithmConfig, correction: Correction) -> Loss:
    """Traits of the loss that trains; the default ones for a user's own."""
    return LOSSES.get(correction.loss or a.loss, Loss())


def _excludes_everything(a: AlgorithmConfig, correction: Correction) -> str | None:
    """On-policy data has r = 1 everywhere, and must train."""
    key = "algorithm.correction_options"
    kept = {f"{key}.band={correction.band}": band(correction.band)} if correction.band is not None else {}
    for name, limit in correction.reject.items():
        if name.endswith("k1"):
            kept[f"{key}.reject {name}: {limit}"] = limits(name, limit)
    for place, (low, high) in kept.items():
        if not low <= 1 <= high:
            return f"{place} leaves out r = 1, so that data of the policy itself would never train"
    if correction.age_weights and correction.age_weights[0] == 0:
        return f"{key}.age_weights gives 0 to tokens of age 0, so that data of the policy itself would never train"
    return None


def _never_acts(c: RunConfig) -> str | None:
    if c.algorithm.norm_length is not None and c.algorithm.aggregation != "seq-mean-token-sum-norm":
        return (
            f"algorithm.norm_length does nothing with algorithm.aggregation={c.algorithm.aggregation}; use "
            "seq-mean-token-sum-norm"
        )
    age, options = c.algorithm.correction_options.max_age, c.algorithm.loss_options
    if isinstance(age, int) and age >= c.queue.max_staleness:
        return (
            f"algorithm.correction_options.max_age={age} never acts: no token is trained that is more than "
            f"queue.max_staleness={c.queue.max_staleness} steps old"
        )
    for low, high in LOSSES.get(c.algorithm.loss, Loss()).ascending:
        if getattr(options, low) >= getattr(options, high):
            return (
                f"algorithm.loss_options: no value is above {low}={getattr(options, low):g} and below "
                f"{high}={getattr(options, high):g}; raise {high}"
            )
    return None


def _options(c: RunConfig) -> str | None:
    """An option that the chosen formula does not read would change nothing."""
    a, defaults = c.algorithm, {"advantage_options": AdvantageOptions(), "loss_options": LossOptions()}
    for section, read in read_options(a.advantage, a.loss, a.correction).items():
        options, default = getattr(a, section), defaults[section]
        for name in sorted(set(options.__struct_fields__) - read):
            if getattr(options, name) != getattr(default, name):
                what = section.removesuffix("_options")
                known = f"its options: {', '.join(sorted(read))}" if read else "it has no options"
                return f"algorithm.{section}.{name} is no option of algorithm.{what}={getattr(a, what)}; {known}"
    return None


def _user_correction(c: RunConfig) -> str | None:
    a = c.algorithm
    if is_user_reference(a.correction) and a.correction_options != CorrectionOptions():
        return (
            f"algorithm.correction_options changes a preset, and algorithm.correction={a.correction} is your own; "
            "put its numbers into your function"
        )
    return None


def _group_size(c: RunConfig) -> str | None:
    name = c.algorithm.advantage
    used = c.algorithm.uses_rewards and name in ADVANTAGES
    if used and ADVANTAGES[name].compares_group and c.rollout.group_size < 2:
        return f"algorithm.advantage={name} compares the members of a group; rollout.group_size must be at least 2"
    return None


def _reward_parts(c: RunConfig) -> str | None:
    a, shaping = c.algorithm, c.algorithm.shaping
    if "parts" not in advantage_needs(a.advantage):
        return None
    unknown = a.advantage_options.gdpo_weights.keys() - {term.name for term in c.reward.functions}
    if unknown:
        return f"algorithm.advantage_options.gdpo_weights: {sorted(unknown)[0]!r} is none of reward.functions"
    ignored = {
        "algorithm.kl.place=reward": a.kl.place == "reward" and a.kl.coef > 0,
        "algorithm.shaping.overlong": shaping.overlong is not None,
        "algorithm.shaping.length": shaping.length is not None,
        "algorithm.shaping.reward_scale": shaping.reward_scale != "none",
        "algorithm.shaping.reward_clip": shaping.reward_clip is not None,
    }
    for key, is_set in ignored.items():
        if is_set:
            return (
                f"algorithm.advantage={a.advantage} learns from the parts of the reward, and {key} changes only their "
                "sum, so it would have no effect; leave it out, or choose another advantage"
            )
    return None


def _filtered_baselines(c: RunConfig) -> str | None:
    name = c.algorithm.advantage
    if "sum_squares" in advantage_needs(name) and c.algorithm.shaping.overlong_filter:
        return (
            f"algorithm.advantage={name} takes its baseline from the tokens that train, and "
            "algorithm.shaping.overlong_filter would take whole trajectories out of it; use one of them"
        )
    return None


def _sum_squares(c: RunConfig) -> str | None:
    name, preset = c.algorithm.advantage, PRESETS.get(c.algorithm.correction)
    if "sum_squares" in advantage_needs(name) and preset is not None and preset.proximal == "behaviour":
        return (
            f"algorithm.advantage={name} needs the distribution of pi_old, and algorithm.correction="
            f"{c.algorithm.correction} spares the pass that would give it; use a decoupled correction"
        )
    return None


def _kl(c: RunConfig) -> str | None:
    kl = c.algorithm.kl
    if kl.estimator == "full" and "reference" in advantage_needs(c.algorithm.advantage):
        return (
            f"algorithm.advantage={c.algorithm.advantage} needs the reference's log-probabilities before the loss, and "
            "algorithm.kl.estimator=full only runs the reference inside it; use another estimator"
        )
    if kl.estimator == "full" and kl.place == "reward":
        return (
            "algorithm.kl.estimator=full needs both distributions over the vocabulary, which no token's reward keeps; "
            "use algorithm.kl.place=loss, or another estimator"
        )
    if kl.unbiased and (kl.place == "reward" or kl.estimator not in ("k1", "k3")):
        return (
            f"algorithm.kl.unbiased changes the gradient of k1 and k3 in the loss, and this is {kl.estimator} in the "
            f"{kl.place}; leave it out, or choose those"
        )
    unread = kl.reference_path is not None and not c.algorithm.uses_reference
    if kl.coef == 0 and (kl.unbiased or kl.adaptive or unread):
        key = "unbiased" if kl.unbiased else "adaptive" if kl.adaptive else "reference_path"
        return f"algorithm.kl.{key} does nothing while algorithm.kl.coef=0; set algorithm.kl.coef"
    rows = c.data.train_batch_groups * c.rollout.group_size
    if kl.adaptive and kl.adaptive.horizon <= ADAPTIVE_LIMIT * rows:
        return (
            f"algorithm.kl.adaptive.horizon={kl.adaptive.horizon} with {rows} trajectories per step could make the "
            f"coefficient negative in one step; use more than {ADAPTIVE_LIMIT * rows:.0f}"
        )
    if kl.place == "reward" and kl.estimator.endswith("+"):
        return (
            f"algorithm.kl.estimator={kl.estimator} differs by its gradient, and a reward has none; use it in the loss"
        )
    return None


def _teacher(c: RunConfig) -> str | None:
    teacher = c.algorithm.teacher
    if teacher is None:
        return None
    if not teacher.models:
        return (
            "algorithm.teacher needs algorithm.teacher.path, a folder, or algorithm.teacher.endpoint, a server, or "
            "algorithm.teacher.hint, with which the policy teaches itself"
        )
    for key, model in teacher.models.values():
        itself = model is teacher and teacher.hint is not None
        if model.path is not None and model.endpoint is not None:
            return f"{key}.path and {key}.endpoint are two teachers of the same tasks; leave one of them out"
        if model.path is None and model.endpoint is None and not itself:
            return f"{key} needs {key}.path, a folder, or {key}.endpoint, a server"
    if teacher.beta != TeacherConfig().beta and teacher.divergence != "jsd":
        return f"algorithm.teacher.beta does nothing with algorithm.teacher.divergence={teacher.divergence}; use jsd"
    if teacher.top_k is not None and not teacher.whole:
        return "algorithm.teacher.top_k does nothing with algorithm.teacher.divergence=sampled; use another divergence"
    if teacher.hint is not None and not re.search(r"{(ground_truth|feedback)}", teacher.hint):
        return "algorithm.teacher.hint tells every answer the same; use {ground_truth} or {feedback} in it"
    for key in teacher.endpoints:
        if teacher.whole and teacher.top_k is None:
            return (
                f"algorithm.teacher.divergence={teacher.divergence} compares whole distributions, and {key} gives "
                "log-probabilities of some tokens; set algorithm.teacher.top_k (at most the server's --max-logprobs), "
                "or use sampled, or algorithm.teacher.path"
            )
        if c.rollout.temperature != 1:
            return (
                f"{key} scores at temperature 1, not at rollout.temperature="
                f"{c.rollout.temperature:g}; use 1, or algorithm.teacher.path"
            )
        if c.trainer.sequence_parallel * c.trainer.tensor_parallel * c.trainer.pipeline_parallel > 1:
            return (
                f"{key} needs trainer ranks that have rows of their own; set "
                "trainer.sequence_parallel, tensor_parallel and pipeline_parallel to 1, or use algorithm.teacher.path"
            )
    if not teacher.rewards:
        if c.critic is not None:
            return "critic learns from rewards, which algorithm.teacher.rewards=false leaves out; use one of the two"
        if c.algorithm.shaping.dynamic_sampling:
            return (
                "algorithm.shaping.dynamic_sampling drops groups whose rewards are all equal, and a teacher teaches "
                "those, too; leave it out, or use algorithm.teacher.rewards=true"
            )
    return None


# Settings of the section `critic` that only a model of values reads.
OF_VALUES = ("shared", "value_coef", "clip", "lam")


def _critic(c: RunConfig) -> str | None:
    name, options = c.algorithm.advantage, c.algorithm.advantage_options
    if options.lam_alpha is not None and options.lam != AdvantageOptions().lam:
        return (
            "algorithm.advantage_options.lam_alpha makes lambda of each row's length, so that "
            f"algorithm.advantage_options.lam={options.lam:g} would do nothing; leave one of them out"
        )
    if advantage_needs(name) & BY_CRITIC and c.critic is None:
        return f"algorithm.advantage={name} needs the model of a section critic; add one, or critic={{}}"
    if c.critic is None:
        return None
    if name in ADVANTAGES and not advantage_needs(name) & BY_CRITIC:
        return f"algorithm.advantage={name} does not use a critic; use algorithm.advantage=gae, or critic=null"
    if "process" in advantage_needs(name):
        plain = CriticConfig()
        if changed := [key for key in OF_VALUES if getattr(c.critic, key) != getattr(plain, key)]:
            return f"critic.{changed[0]} is of a model of values, and algorithm.advantage={name} trains one of rewards"
        if c.trainer.backend != "fsdp2":
            return f"algorithm.advantage={name} needs trainer.backend=fsdp2, not {c.trainer.backend}"
    if c.critic.shared and c.critic.path is not None:
        return "critic.path names a second model, but critic.shared=true has none; use critic.shared=false"
    return None


def _critic_warmup(c: RunConfig) -> str | None:
    if c.critic is None or c.critic.warmup_steps == 0:
        return None
    if c.critic.shared:
        return (
            "critic.warmup_steps would train the policy's backbone too, as critic.shared=true; use "
            "critic.shared=false, or critic.warmup_steps=0"
        )
    if c.critic.warmup_steps >= c.trainer.steps:
        return f"critic.warmup_steps={c.critic.warmup_steps} leaves the policy none of trainer.steps={c.trainer.steps}"
    return None


def _dynamic_sampling(c: RunConfig) -> str | None:
    a = c.algorithm
    if a.shaping.dynamic_sampling and a.advantage in ADVANTAGES and not ADVANTAGES[a.advantage].needs_contrast:
        return (
            f"algorithm.shaping.dynamic_sampling drops groups whose rewards are all equal, but "
            f"algorithm.advantage={a.advantage} can learn from those; use one of the two"
        )
    if a.shaping.dynamic_sampling and samples_per_group(c) < 2:
        return (
            "algorithm.shaping.dynamic_sampling drops groups whose rewards are all equal, and those of a group of one "
            "always are; rollout.group_size must be at least 2"
        )
    return None


def _overlong(c: RunConfig) -> str | None:
    overlong = c.algorithm.shaping.overlong
    if overlong is not None and overlong.cache_tokens > overlong.max_tokens:
        return (
            f"algorithm.shaping.overlong.cache_tokens={overlong.cache_tokens} is more than "
            f"algorithm.shaping.overlong.max_tokens={overlong.max_tokens}; the penalty would begin below no tokens at "
            "all"
        )
    return None


ALGORITHM_RULES: tuple[Rule, ...] = (
    _names,
    _correction,
    _options,
    _user_correction,
    _group_size,
    _reward_parts,
    _filtered_baselines,
    _never_acts,
    _sum_squares,
    _kl,
    _teacher,
    _critic,
    _critic_warmup,
    _dynamic_sampling,
    _overlong,
)


def _count(c: RunConfig) -> str | None:
    kinds = engine_kinds(c)
    if len(kinds) == c.rollout.engines:
        return None
    return f"rollout.engine lists {len(kinds)} kinds and rollout.engines={c.rollout.engines}; give one kind per engine"


def _args(c: RunConfig) -> str | None:
    if not c.rollout.engine_args:
        return None
    kinds = engine_traits(c).values()
    takers = [traits for traits in kinds if traits.package] or list(kinds)
    if len(takers) > 1:
        titles = " and ".join(traits.title for traits in takers)
        return f"rollout.engine_args would go to {titles}, which have different flags; leave them out"
    for word in c.rollout.engine_args:
        if why := takers[0].refusal(word):
            return f"rollout.engine_args: {word} cannot be set; {why}"
    if c.rollout.data_parallel < 1:
        return f"rollout.engine_args: {DATA_PARALLEL} needs a number of copies"
    if c.rollout.data_parallel > 1 and len(engine_traits(c)) > 1:
        return f"rollout.engine_args: {DATA_PARALLEL} needs engines of one kind"
    return _nodes(c) if c.rollout.nodes != 1 else None


def _nodes(c: RunConfig) -> str | None:
    """Say why an engine of several nodes cannot be, if it cannot."""
    place, rollout = f"rollout.engine_args: {NODES}", c.rollout
    if not rollout.nodes or rollout.ranks % rollout.nodes:
        return (
            f"{place} must divide the {rollout.ranks} ranks of an engine (rollout.tensor_parallel * "
            "rollout.pipeline_parallel); copies of the model are rollout.engines"
        )
    if rollout.data_parallel > 1:
        return f"{place} does not go with {DATA_PARALLEL}, whose copies share a machine; use rollout.engines"
    if len(engine_traits(c)) > 1:
        return f"{place} needs engines of one kind"
    if c.mode == "colocated" or c.trainer.lend_devices or c.weight_sync.transport == "ipc":
        return (
            f"{place} does not go with --mode colocated, trainer.lend_devices and weight_sync.way=ipc, which "
            "keep an engine on the trainer's machine; use --mode disaggregated and weight_sync.way=auto"
        )
    return None


def _abilities(c: RunConfig) -> str | None:
    """The mode and the options of weight sync are those that every kind supports."""
    sync = c.weight_sync
    for kind, traits in engine_traits(c).items():
        if sync.transport != "auto" and sync.transport not in traits.transports:
            return (
                f"rollout.engine={kind} does not go with weight_sync.way={sync.transport}; "
                f"{traits.title} receives weights by {', '.join(traits.transports)}"
            )
        held = [f"way={option}" for option in sync.options if option != "waves"]
        for option in [*held, *(["adapters=add"] if sync.adapters == "add" else [])]:
            if not traits.holds_weights:
                return (
                    f"rollout.engine={kind} does not go with weight_sync.{option}, which needs engines that keep a "
                    f"copy of the weights; {traits.title} keeps none"
                )
    return None


def _lending(c: RunConfig) -> str | None:
    """Devices can be lent to engines that sleep, and that have no trainer rank in their group on the same device."""
    if not c.trainer.lend_devices:
        return None
    if c.mode == "colocated":
        return "trainer.lend_devices has no effect with --mode colocated, where engines have those devices anyway"
    if c.weight_sync.transport == "nccl":
        return "trainer.lend_devices does not go with weight_sync.way=nccl, which refuses two ranks on one GPU"
    if c.trainer.ranks < c.rollout.ranks:
        return (
            f"trainer.lend_devices: the devices of trainer.ranks={c.trainer.ranks} do not suffice for an engine of "
            f"{c.rollout.ranks} ranks (rollout.tensor_parallel * rollout.pipeline_parallel)"
        )
    return None


def _ranks(c: RunConfig) -> str | None:
    """Every kind can divide a model among ranks as configured, and experts go to the ranks that there are."""
    rollout = c.rollout
    whole = rollout.tensor_parallel * rollout.data_parallel
    for key in PARALLEL:
        number = getattr(rollout, key.removeprefix("rollout."))
        for kind, traits in engine_traits(c).items():
            if number > 1 and key not in traits.divides:
                able = " or ".join(name for name, them in ENGINES.items() if key in them.divides)
                return f"{key}={number} does not go with rollout.engine={kind}; use rollout.engine={able}"
            if key == "rollout.expert_parallel" and traits.expert_flags and number not in (1, whole):
                return (
                    f"{key}={number}: {traits.title} divides experts among all ranks of a stage or none; use 1 or "
                    f"{whole} (rollout.tensor_parallel={rollout.tensor_parallel} times {DATA_PARALLEL})"
                )
    if whole % rollout.expert_parallel:
        return (
            f"rollout.expert_parallel={rollout.expert_parallel} must divide rollout.tensor_parallel="
            f"{rollout.tensor_parallel}"
        )
    return None


def _quantization(c: RunConfig) -> str | None:
    wanted = c.rollout.quantization
    if wanted == "none":
        return None
    for kind, traits in engine_traits(c).items():
        key = f"rollout.quantization={wanted}"
        if wanted not in traits.quantization:
            able = " or ".join(name for name, them in ENGINES.items() if wanted in them.quantization)
            return f"{key} does not go with rollout.engine={kind}; use rollout.engine={able}"
        if c.model.dtype not in ("auto", *traits.quantized_dtypes):
            dtypes = " or ".join(traits.quantized_dtypes)
            return f"{key} with rollout.engine={kind} needs model.dtype={dtypes}, not {c.model.dtype}"
    return None


def _truncation(c: RunConfig) -> str | None:
    """Engines name the tokens that were kept, and every model of the trainer renormalises over them."""
    if c.rollout.truncation is None:
        return None
    for kind, traits in engine_traits(c).items():
        if not traits.names_kept_tokens:
            able = " or ".join(name for name, them in ENGINES.items() if them.names_kept_tokens)
            return (
                f"rollout.truncation: rollout.engine={kind} does not name the tokens that were kept; use "
                f"rollout.engine={able}"
            )
    whole = {
        "trainer.backend=megatron": c.trainer.backend == "megatron",
        "algorithm.teacher": c.algorithm.teacher is not None,
        "algorithm.kl.estimator=full": c.algorithm.keeps_distributions,
        "algorithm.advantage=prime": c.algorithm.advantage == "prime",
    }
    for key, there in whole.items():
        if there:
            return f"rollout.truncation: {key} needs distributions over the whole vocabulary; leave one of them out"
    return None


ENGINE_RULES: tuple[Rule, ...] = (_count, _args, _abilities, _lending, _ranks, _quantization, _truncation)


# Keys of `agent` that only agent workers read.
WORKERS_KEYS = (
    *(
        "loop",
        "environment",
        "environment_hosts",
        "max_turns",
        "max_parallel_calls",
        "on_timeout",
        "tool_timeout_s",
        "tool_response_tokens",
    ),
    *("workers", "concurrency"),
)
# Keys of algorithm.shaping that treat an episode as one row.
PER_ROW_SHAPING = ("overlong_filter", "reward_scale", "resample")


def gateway_problem(c: RunConfig) -> str | None:
    """Say why agent programs cannot play the episodes of this config; None if they can."""
    name = c.algorithm.advantage
    if "parts" in ADVANTAGES.get(name, Advantage()).needs:
        return (
            f"algorithm.advantage={name} needs every named part of the reward, and an agent program may post a reward "
            "without parts; with a gateway use another estimator, such as grpo or rloo"
        )
    if c.agent.mcp:
        return (
            "agent.mcp gives tools to agent workers; agent programs behind a gateway connect to MCP servers themselves"
        )
    return _row_problem(c, "behind a gateway")


def _row_problem(c: RunConfig, where: str) -> str | None:
    name = c.algorithm.advantage
    if ADVANTAGES.get(name, Advantage()).row_is_episode:
        return (
            f"algorithm.advantage={name} compares single rows, and an episode {where} may have several; use another "
            "estimator, such as grpo or rloo"
        )
    default = ShapingConfig()
    for key in PER_ROW_SHAPING:
        if getattr(c.algorithm.shaping, key) != getattr(default, key):
            return (
                f"algorithm.shaping.{key} treats every row as an episode, and an episode {where} may have several; "
                "leave it out"
            )
    return None


def gateway(c: RunConfig) -> str | None:
    """Apply ``gateway_problem`` to configs that start a gateway themselves, and refuse what only workers could do."""
    if c.agent.gateway is None:
        return None
    for pattern in c.agent.gateway.untrained:
        try:
            re.compile(pattern)
        except re.error as error:
            return f"agent.gateway.untrained: {pattern!r} is not a regular expression: {error}"
    if plays_itself(c):
        if not (c.agent.environment or "").startswith("verifiers:"):
            return (
                f"agent.environment_hosts.python: agent.environment={c.agent.environment} does not play through a "
                "gateway, as verifiers:NAME does; leave out agent.environment_hosts.python and agent.gateway"
            )
    elif c.agent.environment is not None:
        return (
            f"agent.environment={c.agent.environment} has no effect with agent.gateway: agent programs bring their own "
            "tools and state; set agent.environment=null, or leave out agent.gateway (verifiers:NAME plays through it "
            "in a Python of its own: agent.environment_hosts.python)"
        )
    if is_user_reference(c.agent.loop):
        return (
            f"agent.loop={c.agent.loop} has no effect with agent.gateway: agent programs are the loop; leave it out, "
            "or leave out agent.gateway"
        )
    return gateway_problem(c)


def without_effect(c: RunConfig) -> list[str]:
    """Return the keys of `agent` that are not at their defaults and that nothing in a run with a gateway reads."""
    if c.agent.gateway is None:
        return []
    default, read = AgentConfig(), ("environment", "environment_hosts", "concurrency") if plays_itself(c) else ()
    keys = [key for key in WORKERS_KEYS if key not in read]
    return [f"agent.{key}" for key in keys if getattr(c.agent, key) != getattr(default, key)]


def plays_itself(c: RunConfig) -> bool:
    """Whether the environment plays the episodes through the run's gateway, in a Python of its own."""
    hosts = c.agent.environment_hosts
    return c.agent.gateway is not None and hosts is not None and bool(hosts.python)


def past_reasoning(c: RunConfig) -> str | None:
    """Refuse algorithms that take rows for episodes where dropped reasoning makes several rows of one."""
    past = c.agent.past_reasoning
    return None if past == "keep" else _row_problem(c, f"with agent.past_reasoning={past}")


NAME = re.compile(r"[A-Za-z0-9_-]{0,32}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def mcp(c: RunConfig) -> str | None:
    servers = c.agent.mcp
    names = [server.name for server in servers if server.name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        return f"agent.mcp: two servers are named {twice!r}; names tell servers and their tools apart"
    return next(filter(None, (_problem(server, f"agent.mcp[{place}]") for place, server in enumerate(servers))), None)


def _problem(server: McpServerConfig, key: str) -> str | None:
    if not NAME.fullmatch(server.name):
        return f"{key}.name may have up to 32 letters, digits, - and _, not {server.name!r}"
    for variable in (*server.env_from, *server.headers_from.values()):
        if not VARIABLE.fullmatch(variable):
            return f"{key}: env_from and headers_from hold NAMES of environment variables, never values"
    if bool(server.command) == bool(server.url):
        return f"{key} needs either command or url"
    return _url_problem(server, key) if server.url else _command_problem(server, key)


def _command_problem(server: McpServerConfig, key: str) -> str | None:
    if server.headers_from:
        return f"{key}.headers_from goes with url; a command gets variables by env or env_from"
    try:
        argv = argv_of(server)
    except ValueError as error:
        return f"{key}.command cannot be split into words: {error}"
    return None if argv and argv[0] else f"{key}.command names no program"


def _url_problem(server: McpServerConfig, key: str) -> str | None:
    if server.env or server.env_from:
        return f"{key}.env and env_from go with command; a server at a url gets headers by headers_from"
    parts = urlsplit(server.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"{key}.url: {server.url!r} is not an address such as http://127.0.0.1:8000/mcp"
    if parts.username or parts.password:
        return f"{key}.url holds a user or a password; put them into a variable for headers_from"
    return None


def unrewarded(c: RunConfig) -> str | None:
    """Say that nothing can teach a new run: it has no scorers, no agent programs, no record and no rewards of turns.

    The user's own loops, tools and estimators, and environments, may reward turns or need no reward; a teacher, a
    reference model and a penalty for length teach without one. An evaluation needs none either, so this is not among
    the rules.
    """
    elsewhere = c.finetune or c.rollout.replay or c.agent.gateway or c.agent.environment or c.data.trust_code
    shaping = c.algorithm.shaping
    reshaped = shaping.overlong is not None or shaping.length is not None
    shaped = c.algorithm.kl.coef > 0 or reshaped or c.algorithm.teacher is not None
    named = (c.agent.loop, *c.agent.tools, c.algorithm.advantage, c.algorithm.loss)
    if c.reward.functions or elsewhere or shaped or any(map(is_user_reference, named)):
        return None
    return (
        "reward.functions=[] and nothing else gives rewards, so every episode would be worth 0 and teach nothing; name "
        "a scorer, such as exact_answer, or what rewards turns or episodes itself: agent.environment, agent.gateway, "
        "or an agent.loop or agent.tools of your own"
    )


def servers(c: RunConfig) -> str | None:
    """Require the sections of the scorers that ask a server, and URLs and names of variables without secrets."""
    used = {term.name for term in c.reward.functions}
    if "reward_model" in used and c.reward.model is None:
        return "reward.functions: reward_model needs reward.model.path, the folder of a sequence classifier"
    if "judge" in used and c.reward.judge is None:
        return "reward.functions: judge needs reward.judge.url and reward.judge.model"
    if "environment" in used and c.agent.environment is None:
        return "reward.functions: environment is the reward that agent.environment gives; name that, or another scorer"
    model, judge, user = c.reward.model, c.reward.judge, c.agent.user
    if (c.agent.environment in MODELLED_USERS) != (user is not None):
        return (
            f"agent.environment={' or '.join(MODELLED_USERS)} and agent.user, with the user's role in system, need one "
            "another"
        )
    if user is not None and bool(user.url) != bool(user.model):
        return "agent.user.url and agent.user.model name a server and its model; leave both out for the policy itself"
    if user is not None and user.highest <= user.lowest:
        return f"agent.user.highest={user.highest:g} must be above agent.user.lowest={user.lowest:g}"
    opponents = [(f"agent.opponents.{role}", opponent) for role, opponent in c.agent.opponents.items()]
    if opponents and c.agent.environment is None:
        return "agent.opponents play roles of agent.environment; name one, or leave them out"
    for section, opponent in opponents:
        if bool(opponent.url) != bool(opponent.model):
            return (
                f"{section}.url and {section}.model name a server and its model; leave both out for the policy itself"
            )
    of_users = (("agent.user", user), *opponents, ("eval.endpoint", c.eval.endpoint))
    sections = (("reward.model", model), ("reward.judge", judge), *of_users)
    urls = {f"{name}.url": section.url for name, section in sections if section is not None}
    for key, url in urls.items():
        if url and not re.fullmatch(r"https?://[^\s@?#]+", url):
            return f"{key} must be http://... or https://..., without a password and without a query"
    names = {name: section.api_key_env for name, section in sections if section is not None}
    for section, name in names.items():
        if name and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
            return f"{section}.api_key_env is the NAME of an environment variable (capitals), never the key itself"
    return None


def judge(c: RunConfig) -> str | None:
    judge = c.reward.judge
    if judge is None:
        return None
    if "{response}" not in judge.template and "{conversation}" not in judge.template:
        return "reward.judge.template must contain {response} or {conversation}, else the judge sees nothing to grade"
    if judge.compare and "{other}" not in judge.prompt:
        return "reward.judge.template needs {other} where reward.judge.compare=true, else the judge sees one answer"
    if judge.highest <= judge.lowest:
        return f"reward.judge.highest={judge.highest:g} must be above reward.judge.lowest={judge.lowest:g}"
    return None


def extraction(c: RunConfig) -> str | None:
    for term in c.reward.functions:
        if term.extract and term.name == "judge" and c.reward.judge is not None and c.reward.judge.compare:
            return "reward.functions: extract has no effect on a judge that compares answers; leave it out"
        if term.extract and term.name == "reward_model":
            return "reward.functions: extract has no effect on reward_model, which reads the conversation; leave it out"
        if problem := chain_problem(term.extract):
            return f"reward.functions: extract of {term.name}: {problem}"
    return None


def chain_problem(chain: Extraction) -> str | None:
    """Say what is wrong with the first rule of a chain that is none; None if all are rules."""
    rules = (name for step in chain for name in ((step,) if isinstance(step, str) else step))
    return next((problem for rule in rules if (problem := _rule_problem(rule))), None)


def _rule_problem(rule: str) -> str | None:
    if rule.startswith(REGEX):
        try:
            compiled(rule)
        except regex.error as error:
            return f"{rule} is not a regular expression: {error}"
        return None
    known = f"{', '.join(EXTRACTION_RULES)} or {REGEX}PATTERN"
    return None if rule in EXTRACTION_RULES else f"no rule {rule!r}; write one of {known}"


REWARD_RULES = (servers, judge, extraction)


def curriculum(c: RunConfig) -> str | None:
    if (chosen := c.data.curriculum) is not None:
        key = "data.curriculum"
        if chosen.easy is None and chosen.hard is None:
            if chosen.again or not chosen.by_length:
                return f"{key} has no effect without {key}.easy, {key}.hard or {key}.by_length; give one"
        elif chosen.easy is not None and chosen.hard is not None and chosen.hard >= chosen.easy:
            return f"{key}.hard={chosen.hard:g} must be below {key}.easy={chosen.easy:g}"
        if chosen.by_length and any(source.path.startswith(GENERATED_PREFIX) for source in parts(c.data)):
            return f"{key}.by_length needs rows of files, and generated data are endless; leave it out"
    sources = parts(c.data)
    for name, source in zip(labels(c.data), sources, strict=True):
        steps = [step for step, _ in source.schedule]
        if steps != sorted(set(steps)):
            return f"data.path: the schedule of {name} must have increasing steps, not {steps}"
        if steps and source.weight != 1.0:
            return f"data.path: {name} has a schedule, so its weight={source.weight:g} has no effect; leave it out"
        if steps and len(sources) == 1:
            return f"data.path: the schedule of {name} has no effect, since there is no other data set"
    # Between these steps interpolation cannot give 0.
    for step in sorted({step for source in sources for step, _ in points_of(source)}):
        if not any(weight_at(points_of(source), step) for source in sources):
            return f"data.path: at step {step} every data set has weight 0; give one a positive weight"
    return None


def make(c: RunConfig) -> str | None:
    if c.data.make and not isinstance(c.data.path, str):
        several = "and data.path lists several; set data.make=null for data of yours"
        return f"data.make={c.data.make} writes one file, {several}"
    return None


def templates(c: RunConfig) -> str | None:
    for source in (*parts(c.data), *eval_parts(c.data)):
        if source.parameters and not source.path.startswith(GENERATED_PREFIX):
            return f"data: parameters of {source.path} have no effect; they are those of a reasoning_gym data set"
        if problem := chain_problem(source.ground_truth_extract):
            return f"data: ground_truth_extract of {source.path}: {problem}"
    if any(source.schedule for source in eval_parts(c.data)):
        return "data.eval_path: a schedule has no effect on held-out tasks; give a weight"
    return None


def no_room(c: RunConfig) -> str | None:
    """Say that prompts pass ``data.max_prompt_tokens`` whose samples will fail; None at its default, and if none do.

    Only what to expect, and no rule: there need not be such prompts.
    """
    longest, limit = c.data.max_prompt_tokens, c.agent.max_tokens
    if c.rollout.replay or longest < limit or longest == DataConfig(path="").max_prompt_tokens:
        return None
    return (
        f"data.max_prompt_tokens={longest}: a prompt of {limit} tokens or more leaves no room to answer within "
        f"agent.max_tokens={limit}, and its samples fail; lower the former, or raise the latter"
    )


def override(c: RunConfig) -> str | None:
    """Refuse options of the rotary embedding without its kind, and attention that the backend does not have."""
    changes, key = c.model.override, "model.override"
    if changes is None:
        return None
    if changes.attention is not None and c.trainer.backend != "fsdp2":
        return f"{key}.attention needs trainer.backend=fsdp2, not {c.trainer.backend}"
    if (rope := changes.rope) is None:
        return None
    needed, other = ROPES[rope.rope_type] if rope.rope_type else ((), ())
    if missing := [name for name in needed if name not in rope.options]:
        return f"{key}.rope.rope_type={rope.rope_type} needs {key}.rope.{missing[0]}"
    if unread := [name for name in rope.options if name not in (*needed, *other)]:
        return f"{key}.rope.{unread[0]} has no effect with rope_type={rope.rope_type}; leave it out"
    return None


DATA_RULES = (curriculum, make, templates, override)


def journal(c: RunConfig) -> str | None:
    if not re.fullmatch(r"rediss?://[^\s@?#]+", redis_of(c).url):
        return (
            "queue.redis.url must be redis://HOST:PORT/NUMBER or rediss://..., without a password, which belongs in "
            "the environment variable RL_ASYNC_REDIS_PASSWORD"
        )
    return None


def access(c: RunConfig) -> str | None:
    """Require an address that can be bound as it stands, and a port that has an effect."""
    try:
        ipaddress.IPv4Address(c.queue.host)
    except ValueError:
        return f"queue.host={c.queue.host} must be an IPv4 address: 127.0.0.1, 0.0.0.0, or one of this machine's"
    if c.queue.port and not is_encrypted(c.queue):
        return "queue.port has no effect on a queue that clients reach by a socket file; also set queue.curve=always"
    return None


def shards(c: RunConfig) -> str | None:
    queue = c.queue
    if queue.shards and queue.host == "0.0.0.0":
        return "queue.shards advertises the shards' address to workers; set queue.host to one that they can reach"
    if not queue.shards and queue.replicas > 1:
        return f"queue.replicas={queue.replicas} are copies on payload shards, and queue.shards=0; set both"
    if queue.shards and queue.replicas > queue.shards:
        return f"queue.replicas={queue.replicas} needs at least as many shards; queue.shards={queue.shards}"
    return None


def sampling(c: RunConfig) -> str | None:
    """Refuse sampling policies that would have no choice, and windows that hold no batch."""
    queue, batch = c.queue, c.data.train_batch_groups
    spare = slack(queue)
    if queue.sampling != "fifo" and queue.max_staleness <= spare:
        return (
            f"queue.sampling={queue.sampling} with queue.max_staleness={queue.max_staleness} has nothing to choose "
            "from: a batch may pass over a ready group for one step, so it needs a queue.max_staleness of 2 or more"
        )
    slots = (queue.max_staleness - spare + 1) * batch
    if queue.sampling == "quota" and len(parts(c.data)) == 1:
        return "queue.sampling=quota needs data.path to be a list of data sets, {path, weight} each; it is a single one"
    if queue.window and not batch <= queue.window < slots:
        return (
            f"queue.window={queue.window} must be at least one batch (data.train_batch_groups={batch}) and less than "
            f"the {slots} groups that are alive at most (queue.max_staleness={queue.max_staleness}); 0: no window"
        )
    return None


QUEUE_RULES = (journal, access, shards, sampling)


def transport(c: RunConfig) -> str | None:
    transport, way = c.weight_sync.transport, c.weight_sync.way
    if not isinstance(way, str) and (len(way) < 2 or len({*way}) < len(way)):
        return "weight_sync.way is a word, or a list of several different words, such as [gloo,staged]"
    if len(c.weight_sync.transports) + ("auto" in way) > 1:
        return f"weight_sync.way={','.join(way)} names more than one transport; keep one"
    if transport in ("nearest", "nccl") and c.mode == "colocated":
        return f"weight_sync.way={transport} does not work with --mode colocated; use auto, ipc, gloo or disk"
    if transport == "nccl" and c.model.device == "cpu":
        return "weight_sync.way=nccl needs GPUs, and model.device=cpu; use auto, gloo or disk"
    return None


def options(c: RunConfig) -> str | None:
    """Refuse options that would have no effect or exclude each other."""
    sync = c.weight_sync
    if sync.folder and sync.transport != "disk":
        return "weight_sync.folder is only used by weight_sync.way=disk; set both, or leave it out"
    if sync.adapters != "auto" and c.trainer.lora is None:
        return "weight_sync.adapters is for the adapters of trainer.lora; set both, or leave it out"
    if c.trainer.lora is not None and c.trainer.vision_learning_rate:
        return "trainer.lora trains adapters of the language model alone; leave trainer.vision_learning_rate out"
    if sync.adapters in ("load", "add") and sync.delta:
        return "weight_sync.way=delta saves nothing with weight_sync.adapters, which change entirely; use one of them"
    if sync.adapters == "load" and (why := why_adapters_are_not_loaded(c)):
        return f"weight_sync.adapters=load: {why}; use add or merge"
    if sync.staged and c.mode == "colocated":
        return "weight_sync.way=staged has engines decode meanwhile, but with --mode colocated they sleep; leave it out"
    if sync.waves > c.rollout.engines:
        return f"weight_sync.way=waves needs two engines or more; rollout.engines={c.rollout.engines}"
    if sync.waves > 1 and c.mode == "colocated":
        return (
            "weight_sync.way=waves has some engines decode meanwhile, but with --mode colocated all sleep; leave it out"
        )
    return None


def publish_every(c: RunConfig) -> str | None:
    batches = c.queue.max_staleness - slack(c.queue) + 1
    if c.weight_sync.every > batches:
        return (
            f"weight_sync.every={c.weight_sync.every} would deadlock: all slots are used up after "
            f"{batches} steps (queue.max_staleness={c.queue.max_staleness}); publish at least that often"
        )
    return None


WEIGHT_SYNC_RULES = (transport, options, publish_every)


# Sizes in section trainer that only this backend reads.
MEGATRON_ONLY = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel")


def data_parallel(c: RunConfig) -> int:
    """Return the number of data-parallel ranks: each gets a different part of a mini-batch's rows.

    Ranks of Megatron that hold one copy of the model together count once, as do ranks that share rows.
    """
    t = c.trainer
    return max(t.ranks // (t.tensor_parallel * t.pipeline_parallel * t.sequence_parallel), 1)


def sharing(c: RunConfig) -> str | None:
    """Refuse parallel sizes that the backend lacks or that do not divide the ranks."""
    t = c.trainer
    sizes = {key: getattr(t, key) for key in MEGATRON_ONLY if getattr(t, key) > 1}
    if t.backend != "megatron":
        for key, size in sizes.items():
            return (
                f"trainer.{key}={size} needs trainer.backend=megatron; fsdp2 shards the weights among all "
                "trainer.ranks by itself"
            )
        return None
    model_ranks = t.tensor_parallel * t.pipeline_parallel * t.sequence_parallel
    if t.ranks % model_ranks:
        return (
            f"trainer.ranks={t.ranks} must be a multiple of {model_ranks}, the ranks that train the same rows: "
            f"trainer.tensor_parallel={t.tensor_parallel} times trainer.pipeline_parallel={t.pipeline_parallel} times "
            f"trainer.sequence_parallel={t.sequence_parallel}"
        )
    stage = t.ranks // t.pipeline_parallel
    if stage % t.expert_parallel:
        return (
            f"trainer.expert_parallel={t.expert_parallel} must divide the {stage} ranks of a pipeline stage, "
            f"trainer.ranks={t.ranks} over trainer.pipeline_parallel={t.pipeline_parallel}"
        )
    if t.virtual_pipeline > 1 and t.pipeline_parallel < 3:
        return (
            f"trainer.virtual_pipeline={t.virtual_pipeline} needs a trainer.pipeline_parallel of 3 or more: with two "
            "stages, Megatron-Core's interleaved schedule confuses activations with gradients"
        )
    return None


def megatron(c: RunConfig) -> str | None:
    """Refuse what this backend does not support."""
    if c.trainer.backend != "megatron":
        return None
    if c.algorithm.keeps_distributions:
        key, instead = "kl.estimator=full", "another estimator"
        if (teacher := c.algorithm.teacher) is not None and teacher.whole:
            key, instead = f"teacher.divergence={teacher.divergence}", "sampled"
        return (
            f"algorithm.{key} needs full distributions, and with trainer.backend=megatron no rank holds the whole "
            f"vocabulary; use {instead}"
        )
    return None


# Keys of section trainer that only this backend reads.
FSDP2_ONLY = (
    "optimizer",
    "activation_checkpointing",
    "cpu_offload",
    "replicas",
    "lora",
    "kernels",
    "vision_learning_rate",
)


def fsdp2(c: RunConfig) -> str | None:
    """Refuse its options with another backend, and sizes that do not divide the ranks."""
    t = c.trainer
    if t.backend != "fsdp2":
        changed = next((key for key in FSDP2_ONLY if getattr(t, key) != getattr(TrainerConfig(), key)), None)
        return changed and f"trainer.{changed} needs trainer.backend=fsdp2, not {t.backend}"
    if t.ranks % t.replicas:
        return f"trainer.ranks={t.ranks} must be a multiple of trainer.replicas={t.replicas}, the copies of the model"
    if t.ranks % t.sequence_parallel:
        return (
            f"trainer.ranks={t.ranks} must be a multiple of trainer.sequence_parallel={t.sequence_parallel}, the ranks "
            "that share each row"
        )
    if t.optimizer == "adamw_8bit" and t.cpu_offload:
        return "trainer.optimizer=adamw_8bit does not work with trainer.cpu_offload, as it runs on the GPU; use adamw"
    if t.optimizer == "muon" and (t.lora is not None or t.cpu_offload):
        key = "cpu_offload" if t.lora is None else "lora"
        reason = "it multiplies whole matrices on the GPU" if t.lora is None else "it trains whole matrices"
        return f"trainer.optimizer=muon does not work with trainer.{key}: {reason}; leave one out"
    if t.cpu_offload and c.model.device != "gpu":
        return (
            f"trainer.cpu_offload has no effect with model.device={c.model.device}: without a GPU, weights and "
            "optimizer are in host memory anyway; set model.device=gpu, or leave it out"
        )
    return None


def kernels(c: RunConfig) -> str | None:
    """Refuse kernels that need a GPU where there is none."""
    override = c.model.override
    if override is not None and override.attention == FLASH_ATTN and c.model.device == "cpu":
        return "model.override.attention=flash_attn needs a GPU, and model.device=cpu; leave it out"
    if c.trainer.kernels == "liger" and c.model.device == "cpu":
        return "trainer.kernels=liger needs a GPU, and model.device=cpu; use trainer.kernels=torch"
    return None


# For keys of section trainer, the keys that fine-tuning reads in their place.
INSTEAD = {
    "learning_rate": "finetune.learning_rate",
    "schedule": "finetune.schedule",
    "warmup_steps": "finetune.warmup",
    "steps": "finetune.steps",
    "epochs": "finetune.epochs",
    "minibatches": "finetune.batch_size",
}

# Keys of a data set that fine-tuning ignores.
UNREAD = ("weight", "schedule", "ground_truth", "ground_truth_extract", "parameters")


def finetune(c: RunConfig) -> str | None:
    """Refuse keys that supervised fine-tuning ignores, naming those that take their place."""
    if c.finetune is None:
        return None
    for key, other in INSTEAD.items():
        if getattr(c.trainer, key) != getattr(TrainerConfig(), key):
            return f"trainer.{key}={getattr(c.trainer, key)} has no effect on fine-tuning; set {other}"
    pairs = c.finetune.preferences
    keys = UNREAD if pairs is None else (*UNREAD, "system", "prompt")
    for source in (*parts(c.data), *eval_parts(c.data)):
        if unread := [key for key in keys if getattr(source, key) != getattr(DataSource(path=""), key)]:
            what = "conversations" if pairs is None else "pairs as they are"
            return (
                f"data: {unread[0]} of {source.path} has no effect on fine-tuning, which trains on all {what} of all "
                "data sets; leave it out"
            )
    if pairs is not None and pairs.label_smoothing and pairs.loss != "sigmoid":
        return f"finetune.preferences.label_smoothing has no effect with loss={pairs.loss}; use loss=sigmoid, or 0"
    if c.critic is not None:
        return "critic has no effect on fine-tuning (section finetune); leave it out"
    return None


def warm_start(c: RunConfig) -> str | None:
    """Refuse experts beside a vision tower, and keys of the tiny model while a pretrained one is fine-tuned."""
    own = c.warm_start
    if own is not None and own.vision and own.experts:
        return "warm_start.vision makes a model without experts; leave warm_start.experts out"
    if own is None or own.pretrained is None:
        return None
    default = WarmStartConfig(demos_path=own.demos_path, out=own.out, pretrained=own.pretrained)
    for key in WarmStartConfig.__struct_fields__:
        if getattr(own, key) != getattr(default, key):
            return f"warm_start.{key} has no effect with warm_start.pretrained, whose keys fine-tune that model"
    return None


def _minibatches(c: RunConfig) -> str | None:
    rows = c.data.train_batch_groups * c.rollout.group_size
    if c.finetune is None and rows < c.trainer.minibatches * data_parallel(c):
        return (
            f"{rows} trajectories per step (data.train_batch_groups * rollout.group_size) cannot fill "
            f"trainer.minibatches={c.trainer.minibatches} on {data_parallel(c)} copies of the model (trainer.ranks="
            f"{c.trainer.ranks})"
        )
    return None


def _lengths(c: RunConfig) -> str | None:
    if c.agent.max_tokens > c.rollout.max_model_len:
        return (
            f"agent.max_tokens={c.agent.max_tokens} is more than an engine accepts "
            f"(rollout.max_model_len={c.rollout.max_model_len})"
        )
    return None


def _sandbox(c: RunConfig) -> str | None:
    if c.sandbox is None:
        return None
    url = c.sandbox.url
    if plays_harbor(c) and c.sandbox.kind in ("container", "sandbox_fusion"):
        return (
            f"agent.environment={c.agent.environment} needs folders at the root of its sandbox, which "
            f"sandbox.kind={c.sandbox.kind} cannot have; use bubblewrap"
        )
    if (c.sandbox.kind == "container") != bool(c.sandbox.image):
        return "sandbox.image belongs to sandbox.kind=container, which needs one: set both, or neither"
    if c.sandbox.kind != "sandbox_fusion":
        return "sandbox.url has an effect with sandbox.kind=sandbox_fusion only; leave it out" if url else None
    if not re.fullmatch(r"https?://[^\s@?#]+", url):
        return (
            "sandbox.url must be http://... or https://... of a Sandbox Fusion server, without a password and a query"
        )
    return None


def _environment_hosts(c: RunConfig) -> str | None:
    if c.agent.environment_hosts is None or c.agent.gateway is not None:
        return None
    if c.agent.environment is None:
        return "agent.environment_hosts hold the environments of agent.environment; name one, or leave them out"
    if c.agent.environment in MODELLED_USERS:
        return (
            f"agent.environment_hosts cannot hold agent.environment={c.agent.environment}, whose models the worker "
            "asks; leave them out"
        )
    if c.agent.environment_hosts.python:
        return (
            "agent.environment_hosts.python: an environment in a Python of its own plays through a gateway; add "
            "agent.gateway={}, or leave it out"
        )
    return None


RULES: tuple[Rule, ...] = (
    *ALGORITHM_RULES,
    *ENGINE_RULES,
    *(sharing, megatron, fsdp2, kernels),
    *QUEUE_RULES,
    *DATA_RULES,
    *WEIGHT_SYNC_RULES,
    *REWARD_RULES,
    *(_minibatches, _lengths, _sandbox, _environment_hosts),
    *(gateway, past_reasoning, mcp),
    finetune,
    warm_start,
)


def problems(config: RunConfig) -> Iterator[str]:
    """Yield a message for each broken rule."""
    for rule in RULES:
        if message := rule(config):
            yield message


def check(config: RunConfig) -> None:
    """Raise ConfigError with the messages of all broken rules."""
    if found := list(problems(config)):
        raise ConfigError("; ".join(found))

"""Rules of the algorithm section and its critic: which choices cannot work together, and why."""

import re
from collections.abc import Callable

from rl_async.configs.derived import samples_per_group
from rl_async.configs.schema.algorithm import (
    ADAPTIVE_LIMIT,
    PRESETS,
    AdvantageOptions,
    AlgorithmConfig,
    Correction,
    CorrectionOptions,
    CriticConfig,
    LossOptions,
    TeacherConfig,
    band,
    limits,
    read_options,
    resolve,
)
from rl_async.configs.schema.formulas import ADVANTAGES, BY_CRITIC, LOSSES, Loss, advantage_needs
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.suggestions import hint, nearest
from rl_async.errors import ConfigError
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

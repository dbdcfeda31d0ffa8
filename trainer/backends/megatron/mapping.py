"""Maps Hugging Face weights to Megatron-Core's, as pure functions of names.

A ``Rule`` says which Hugging Face tensors make up one parameter of a Megatron layer; its form says how the parameter's
shards on tensor-parallel ranks are cut out of them, which ``slices`` does. The mapping only copies, so a round trip is
exact, and the same rules apply to an optimizer's moments.

    qkv       for each group of queries that share a key: its queries, key and value; ranks divide the groups
    gate_up   a rank's part of the gate, then its part of the up projection
    rows      cut along the input (dimension 1)
    vocab     cut along the output (dimension 0), padded with zeros to a divisible size
    copy      the whole parameter on every rank
"""

from typing import Literal, NamedTuple

import msgspec

from rl_async.trainer.model.heads import VALUE_HEAD, Head

Form = Literal["copy", "rows", "vocab", "qkv", "gate_up"]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The dimensions of a model on which the mapping depends."""

    layers: int
    heads: int
    groups: int  # of queries that share a key
    head_dim: int
    vocab: int
    tied: bool  # embedding and output are one
    qk_norm: bool
    qkv_bias: bool
    experts: int = 0  # 0: dense
    head: Head = "policy"

    @property
    def has_logits(self) -> bool:
        return self.head != "value"

    @property
    def has_values(self) -> bool:
        return self.head != "policy"

    @property
    def has_output(self) -> bool:
        """Whether logits have a matrix of their own."""
        return self.has_logits and not self.tied


def config_key(head: Head) -> str:
    """Return the config's key of the path of a model with this head."""
    return "critic.path" if head == "value" else "model.path"


EXPERTS = "mlp.experts"


class Rule(NamedTuple):
    """One Megatron parameter and the tensors that make it up. Names are relative to a layer, or to the model."""

    megatron: str
    hugging_face: tuple[str, ...]
    form: Form

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to an expert, which is whole on its rank."""
        return self.megatron.startswith(f"{EXPERTS}.")


EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "copy")
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), "vocab")
TIED_OUTPUT = Rule("output_layer.weight", EMBEDDING.hugging_face, "vocab")  # the last stage's own copy
VALUES = tuple(
    Rule(f"output_layer.{VALUE_HEAD}{name}", (f"{VALUE_HEAD}{name}",), "copy") for name in ("weight", "bias")
)


def layer_rules(shape: Shape) -> list[Rule]:
    """Return the rules of a layer, without those of its experts."""
    attention = "self_attention"
    rules = [
        Rule("input_layernorm.weight", ("input_layernorm.weight",), "copy"),
        Rule(f"{attention}.linear_qkv.weight", _qkv("weight"), "qkv"),
        Rule(f"{attention}.linear_proj.weight", ("self_attn.o_proj.weight",), "rows"),
        Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "copy"),
    ]
    if shape.qkv_bias:
        rules.append(Rule(f"{attention}.linear_qkv.bias", _qkv("bias"), "qkv"))
    if shape.qk_norm:
        rules.append(Rule(f"{attention}.q_layernorm.weight", ("self_attn.q_norm.weight",), "copy"))
        rules.append(Rule(f"{attention}.k_layernorm.weight", ("self_attn.k_norm.weight",), "copy"))
    if shape.experts:
        return [*rules, Rule("mlp.router.weight", ("mlp.gate.weight",), "copy")]
    return rules + _mlp("mlp", "mlp")


def expert_rules(local: int, number: int) -> list[Rule]:
    """Return the rules of a rank's ``local``-th expert, which has ``number`` among all experts of the layer."""
    return _mlp(f"{EXPERTS}.local_experts.{local}", f"{EXPERTS}.{number}")


def _mlp(megatron: str, hugging_face: str) -> list[Rule]:
    return [
        Rule(
            f"{megatron}.linear_fc1.weight",
            (f"{hugging_face}.gate_proj.weight", f"{hugging_face}.up_proj.weight"),
            "gate_up",
        ),
        Rule(f"{megatron}.linear_fc2.weight", (f"{hugging_face}.down_proj.weight",), "rows"),
    ]


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{which}_proj.{kind}" for which in "qkv")


def padded_vocab(vocab: int, ranks: int) -> int:
    """Return the vocabulary's size, rounded up to a multiple of ``ranks``."""
    return -(-vocab // ranks) * ranks

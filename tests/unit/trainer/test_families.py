"""Every kind of model that claims packing, on a tiny random one: packed rows equal rows alone."""

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import LoraConfig, TrainerConfig
from rl_async.errors import DataError, UserError
from rl_async.messages import Media, Reserved, Sampling, Trajectory, TrajectoryHeader, Version, VersionRun
from rl_async.model_files import MIXERS
from rl_async.pictures import FAMILIES as IMAGE_FAMILIES
from rl_async.pictures import PictureProcessor
from rl_async.trainer import families
from rl_async.trainer.actor_critic import build_models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.backend import Outputs
from rl_async.trainer.batches import take_batch
from rl_async.trainer.families import FAMILIES, why_padded
from rl_async.trainer.fsdp2 import Fsdp2Backend, allocate
from rl_async.trainer.model import Headed, build_headed, keep_rows_apart
from rl_async.trainer.packing import Tensors, collate, empty_tensors, lay_images, row_calls
from rl_async.trainer.ranks import StopRequest
from rl_async.trainer.update import update
from rl_async.weight_sync.layout import STACKED_FOR_ENGINES, single
from tests.support.families import COMMON, DISTINCT, PADDED, VOCAB, config_of, saved
from tests.support.model_table import KINDS, PAGE, listed, table
from tests.support.packed_gradients import gradients, largest_difference
from tests.support.rounding import (
    allowance,
    assert_as_close,
    assert_near,
    in_float64,
    pass_rounding,
    to_float64,
    unit_roundoff,
)
from tests.support.tiny_models import IMAGE, drawing, save_vision_model, vision_tokenizer
from tests.support.weights import whole_weights

pytestmark = pytest.mark.usefixtures("one_rank")


RATE = 1e-3
EPSILON = 1e-8  # PyTorch's default
CLEAR = 1e-4  # of gradients whose sign is beyond doubt
LENGTHS = [23, 2, 9, 9, 14, 23, 5, 1]


def batch() -> Tensors:
    draw = torch.Generator().manual_seed(1)
    tensors = empty_tensors("cpu")
    tensors.tokens = torch.randint(3, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=draw)
    tensors.lengths = torch.tensor(LENGTHS)
    tensors.temperature = torch.linspace(0.5, 1.5, len(LENGTHS))[:, None, None]
    return tensors


def by_rows(model: Any, x: Tensors) -> dict[str, Tensor]:
    """What a plain model says of each row alone, one row after another."""
    parts: dict[str, list[Tensor]] = {name: [] for name in ("logprobs", "distribution", "entropy", "sum_squares")}
    for row, length in enumerate(LENGTHS):
        with torch.no_grad():
            logits = model(input_ids=x.tokens[row : row + 1, :length]).logits[0, :-1]
        every = (logits / x.temperature[row]).log_softmax(-1)
        parts["distribution"].append(every)
        parts["logprobs"].append(every.gather(1, x.tokens[row, 1:length, None])[:, 0])
        parts["entropy"].append(-(every.exp() * every).sum(-1))
        parts["sum_squares"].append((2 * every).exp().sum(-1))
    return {name: torch.cat(rows) for name, rows in parts.items()}


def exactly_by_rows(model: Any, x: Tensors) -> dict[str, Tensor]:
    """The same in float64."""
    widened = to_float64(copy.deepcopy(model))
    with in_float64():
        return by_rows(widened, x)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind not in DISTINCT)) for kind in sorted(FAMILIES)]
)
def test_packed_rows_equal_rows_alone(kind: str, tmp_path: Path) -> None:
    alone = saved(kind, tmp_path)
    backend, x = Fsdp2Backend(str(tmp_path), "float32", "cpu", None), batch()
    assert backend.model.packs
    got = backend.forward(x, frozenset({"entropy", "sum_squares", "distribution"}))
    assert got.logprobs is not None and got.entropy is not None and got.sum_squares is not None
    assert got.distribution is not None
    predicted = torch.arange(got.logprobs.shape[1]) < x.lengths[:, None] - 1
    plain = by_rows(alone, x)
    found = {name: getattr(got, name)[predicted] for name in plain}
    assert_as_close(found, plain, exactly_by_rows(alone, x), terms=VOCAB)
    assert not got.logprobs[~predicted].any()


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("stablelm", {}, "stablelm"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
        ("gemma", {"use_bidirectional_attention": True}, "causal"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
    ],
)
def test_other_models_are_not_packed(kind: str, options: dict[str, Any], reason: str) -> None:
    config = config_of(kind, **options)
    assert reason in (why_padded(config) or "")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind != "deepseek_v4")) for kind in sorted(PADDED)]
)
def test_a_model_that_cannot_be_packed_runs_padded_and_says_so(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone, x = saved(kind, tmp_path), batch()
    with caplog.at_level(logging.WARNING, "rl_async.trainer"):
        backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", None)
    assert len(caplog.records) == 1
    assert "padded" in caplog.text and kind in caplog.text
    got = backend.forward(x).logprobs
    assert got is not None
    found = got[torch.arange(got.shape[1]) < x.lengths[:, None] - 1]
    plain, exact = by_rows(alone, x)["logprobs"], exactly_by_rows(alone, x)["logprobs"]
    assert_near(found, exact, allowance(plain, exact, terms=VOCAB))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind != "lfm2")) for kind in sorted(MIXERS)]
)
def test_gradients_of_packed_and_of_shared_rows_are_those_of_padded_ones(kind: str) -> None:
    exact, rounded = gradients(kind, torch.float64), gradients(kind, torch.float32)
    for found in (exact.packed, exact.shared):
        assert largest_difference(found, exact.padded) <= 1e-6
    # In float32 padded rows themselves are off by up to 2.2e-5, in the weight of Qwen3.5's first convolution. No single
    # operation is to blame: with any one of them in float64 the error remains.
    for found in (rounded.packed, rounded.shared):
        assert_as_close(found, rounded.padded, exact.padded, terms=VOCAB)


def test_the_page_of_models_says_what_the_code_answers() -> None:
    lines = listed(PAGE.read_text())
    vllm = {kind: cells[-1] for kind, *cells in (line.strip("| ").split(" | ") for line in lines[2:])}
    assert vllm.keys() == set(KINDS), "run tests/support/model_table.py"
    assert lines == table(vllm)


@pytest.mark.parametrize(("release", "padded"), [("5.17.0", True), ("5.22.0.dev0", False), ("6.0", False)])
def test_lfm2_is_padded_where_transformers_tells_its_convolutions_nothing_of_rows(
    release: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "version", lambda package: release)
    assert bool(why_padded(config_of("lfm2"))) == padded
    assert why_padded(config_of("qwen3_next")) is None


def test_a_layer_with_a_state_refuses_rows_that_are_not_packed() -> None:
    model = AutoModel.from_config(config_of("lfm2"))
    keep_rows_apart(model)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for options in ({"use_cache": True, "packed_row": row_calls(((4, 1),), torch.device("cpu"))}, {"use_cache": False}):
        with pytest.raises(ValueError, match="packed rows"):
            model(input_ids=tokens, **options)


def test_the_text_part_of_a_model_for_images_trains_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    text = {**config_of("qwen3_5_text").to_dict(), "dtype": "float32"}
    whole = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision, tie_word_embeddings=False)
    )
    whole.save_pretrained(tmp_path)
    backend, x = Fsdp2Backend(str(tmp_path), "float32", "cpu", None), batch()
    assert backend.model.packs
    got = backend.forward(x).logprobs
    assert got is not None
    found = got[torch.arange(got.shape[1]) < x.lengths[:, None] - 1]
    plain, exact = by_rows(whole, x)["logprobs"], exactly_by_rows(whole, x)["logprobs"]
    assert_near(found, exact, allowance(plain, exact, terms=VOCAB))


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5_text"])
def test_weights_travel_under_the_names_of_published_files(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    published = Fsdp2Backend(str(tmp_path), "float32", "cpu", None).sharded_weights()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert published.layout.tensors.keys() == set(file.keys())


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=[pytest.mark.nightly] * (kind not in ("qwen3", "deepseek_v3", "gpt_oss", "nemotron_h"))
        )
        for kind in KINDS
    ],
)
def test_a_step_trains_what_a_plain_model_would_learn(kind: str, tmp_path: Path) -> None:
    plain, x = saved(kind, tmp_path / "model"), batch()
    config = TrainerConfig(learning_rate=RATE, minibatches=1, grad_clip=1e6, activation_checkpointing=True)
    backend = Fsdp2Backend(str(tmp_path / "model"), "float32", "cpu", config)
    count = sum(length - 1 for length in LENGTHS)
    before = whole_weights(backend)
    predicted = torch.arange(x.tokens.shape[1] - 1) < x.lengths[:, None] - 1
    loss, norm = backend.step([x], lambda _, outputs: -without(outputs.logprobs)[predicted].sum() / count)

    total = torch.zeros(())
    for row, length in enumerate(LENGTHS):
        logits = plain(input_ids=x.tokens[row : row + 1, :length]).logits[0, :-1] / x.temperature[row]
        chosen = logits.log_softmax(-1).gather(1, x.tokens[row, 1:length, None])
        total = total - chosen.sum() / count
    total.backward()
    found = ((name, parameter.grad) for name, parameter in plain.named_parameters())
    named = ((name, gradient) for name, gradient in found if gradient is not None)
    gradients = dict(named if kind in STACKED_FOR_ENGINES else single(named))
    rounded = pass_rounding(1.0, COMMON["num_hidden_layers"], sum(LENGTHS), backward=True)
    assert loss == pytest.approx(total.item(), rel=rounded)
    assert norm == pytest.approx(torch.stack([g.norm() for g in gradients.values()]).norm().item(), rel=rounded)
    after = whole_weights(backend)
    # AdamW's first step moves each weight by rate * g / (|g| + EPSILON), against its gradient; then it is rounded.
    for name, gradient in gradients.items():
        clear = gradient.abs() > CLEAR
        moved = (after[name] - before[name])[clear]
        stored = 2 * unit_roundoff(torch.float32) * before[name].abs().max().item()
        decayed = RATE * config.weight_decay * before[name].abs().max().item()
        assert_near(moved, -RATE * gradient[clear].sign(), RATE * EPSILON / CLEAR + decayed + stored, name)


def without(logprobs: Tensor | None) -> Tensor:
    """What is there: a step always has log-probabilities, 0 beyond the end of a row."""
    assert logprobs is not None
    return logprobs


# Rows with images, by every family of vision-language models: as one row at a time of the plain Hugging Face model.


# Both sides compute in float64, from weights in which gradients are between 1e-6 and 10.
CLOSE: dict[str, float] = {"rtol": 1e-9, "atol": 1e-12}
# Small, as large, and large enough for tiles.
A, B, C, LARGE = drawing(0), drawing(1), drawing(2), drawing(3, 64, 48)
BYTES = {Media.of(data, "image/png", 0).sha256: data for data in (A, B, C, LARGE)}
ROWS: list[tuple[str, list[bytes]]] = [
    ("compare * with * now|the left one is larger", [A, B]),
    ("compare * with * now|neither of them", [A, B]),
    # The same tokens as above, but another second image.
    ("compare * with * now|neither of them", [A, C]),
    ("no image at all|indeed", []),
    ("*|", [LARGE]),
    ("what is *? A dot. And *?|a line", [LARGE, A]),
]


def row(family: str, processor: PictureProcessor, number: int, text: str, images: Sequence[bytes]) -> Trajectory:
    """A row whose images stand at each ``*``, and whose tokens are sampled behind the ``|``."""
    tokenizer = vision_tokenizer()
    prompt, _, answer = text.rpartition("|")
    prompt_ids = tokenizer.encode(prompt.replace("*", IMAGE[family]), add_special_tokens=False)
    ids, places = processor.expand(prompt_ids, images)
    sampled = tokenizer.encode(answer, add_special_tokens=False)
    tokens = np.array(ids + sampled, np.int32)
    return Trajectory(
        task_id="t",
        group_id=0,
        sample=number,
        attempt=0,
        episode_id=f"0.{number}",
        token_ids=tokens,
        loss_mask=np.arange(len(tokens)) >= len(ids),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=[],
        sampling=Sampling(temperature=0.5),
        reward=0.0,
        media=[Media.of(data, "image/png", place) for data, place in zip(images, places, strict=True)],
    )


def built(folder: Path, head: Any = "policy") -> Headed:
    """Build the model that the trainer shards, with all weights in this process."""
    model, pretrained = build_headed(str(folder), head)
    allocate(model, "cpu")
    model.lm.tie_weights()
    pretrained.fill(dict(model.lm.named_parameters()) | dict(model.lm.named_buffers()))
    if model.value_head is not None:
        torch.nn.init.normal_(model.value_head.weight)
    return model


def image_batch(rows: Sequence[Trajectory], processor: PictureProcessor, *, share: bool) -> Tensors:
    return collate(rows, device="cpu", share_prefixes=share, images=lay_images(rows, BYTES, processor, device="cpu"))


def plain_inputs(row: Trajectory, processor: PictureProcessor, family: str) -> dict[str, Tensor]:
    """The arguments of a Hugging Face model for one row."""
    tokens = torch.from_numpy(row.token_ids).long()[None]
    inputs = {"input_ids": tokens}
    if row.media:
        pictures = [processor.encode(BYTES[medium.sha256]) for medium in row.media]
        inputs |= {name: torch.from_numpy(array) for name, array in processor.arguments(pictures).items()}
        kinds = "mm_token_type_ids" if family.startswith("qwen") else "token_type_ids"
        if family not in ("idefics3", "smolvlm"):
            inputs[kinds] = (tokens == processor.image_token).long()
    return inputs


def weighted(logprobs: Sequence[Tensor]) -> Tensor:
    """A loss that no two tokens share alike."""
    return sum((one * torch.linspace(0.5, 1.5, len(one)).to(one)).mean() for one in logprobs)  # type: ignore[return-value]


def rows_of(outputs: Tensor | None, tensors: Tensors) -> list[Tensor]:
    assert outputs is not None
    return [one[: length - 1] for one, length in zip(outputs, tensors.lengths.tolist(), strict=True)]


@pytest.mark.thinned("family", 2)
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_packed_rows_equal_rows_alone_in_results_and_gradients(family: str, share: bool, tmp_path: Path) -> None:
    model, plain, rows = packed_and_alone(family, share, tmp_path)
    assert model.packs == (why_padded(plain.config) is None) == (family != "gemma3")
    found, expected = rows
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.lm.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert parameter.grad is not None, name
            torch.testing.assert_close(
                parameter.grad, gradients[name], **CLOSE, msg=lambda text, n=name: f"{n}: {text}"
            )
    seen = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert any("vis" in name for name in seen)


def packed_and_alone(family: str, share: bool, folder: Path) -> tuple[Headed, Any, tuple[list[Tensor], list[Tensor]]]:
    """Compute ROWS in float64 packed, and one at a time by the plain model; both models have gradients of one loss.

    Returns the trainer's model, the plain one, and the log-probabilities of both, by row.
    """
    save_vision_model(family, folder)
    model, plain = built(folder), AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    processor = model.pictures
    assert processor is not None
    rows = [row(family, processor, number, *each) for number, each in enumerate(ROWS)]
    tensors = image_batch(rows, processor, share=share)
    to_float64(model), to_float64(plain)
    with in_float64():
        tensors.temperature = tensors.temperature.double()
        found = rows_of(model.outputs(tensors, frozenset()).logprobs, tensors)
        expected = []
        for each in rows:
            logits = plain(**plain_inputs(each, processor, family)).logits[0, :-1] / 0.5
            expected.append(logits.log_softmax(-1).gather(1, torch.from_numpy(each.token_ids[1:, None]).long())[:, 0])
        weighted(found).backward()
        weighted(expected).backward()
    return model, plain, (found, expected)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_the_towers_cost_is_what_pytorch_counts(family: str, tmp_path: Path) -> None:
    """But for Qwen2.5-VL's windows, whose pairs it does not compute, which count as full attention."""
    save_vision_model(family, tmp_path)
    model = built(tmp_path)
    model.lm.set_attn_implementation("eager")
    assert model.pictures is not None
    images = image_batch(
        [row(family, model.pictures, n, *ROWS[n]) for n in (0, 2, 5)], model.pictures, share=True
    ).images
    cost = model.tower_cost(trains=False)
    assert images is not None and cost is not None
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.lm.base_model.get_image_features(**images.inputs)
    shown = images.shown(cost.side)
    counted = counter.get_total_flops()
    if family == "qwen2_5_vl":
        assert cost.of(shown._replace(pairs=shown.pairs // 2)) < counted < cost.of(shown)
    else:
        assert counted == cost.of(shown)


def backend_of(folder: Path, **options: Any) -> Fsdp2Backend:
    config = TrainerConfig(learning_rate=1e-3, minibatches=1, grad_clip=1e6, **options)
    return Fsdp2Backend(str(folder), "float32", "cpu", config)


def loss(_: int, outputs: Outputs) -> Tensor:
    assert outputs.logprobs is not None
    return -outputs.logprobs.mean()


@pytest.mark.thinned("family", 2)
@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_what_a_step_trained_is_published_saved_and_loaded_again(family: str, tmp_path: Path) -> None:
    save_vision_model(family, tmp_path / "model")
    backend = backend_of(tmp_path / "model", activation_checkpointing=True)
    assert backend.pictures is not None
    rows = [row(family, backend.pictures, number, *each) for number, each in enumerate(ROWS)]
    tensors, before = image_batch(rows, backend.pictures, share=True), whole_weights(backend)
    backend.step([tensors], loss)
    published = whole_weights(backend)
    moved = {name for name, weight in published.items() if not torch.equal(weight, before[name])}
    assert any(".layers." in name for name in moved) and any("vis" in name for name in moved)

    backend.save(tmp_path / "saved")
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved/model", output_loading_info=True)
    assert not any(info.values()), info
    named = dict(loaded.named_parameters())
    assert named.keys() == published.keys()
    assert all(torch.equal(named[name], weight) for name, weight in published.items())
    assert PictureProcessor.load(str(tmp_path / "saved/model")) is not None

    (tmp_path / "published").mkdir()
    save_file(published, tmp_path / "published/model.safetensors", {"format": "pt"})
    loaded.config.save_pretrained(tmp_path / "published")
    again, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "published", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(weight, published[name]) for name, weight in again.named_parameters())

    other = backend_of(tmp_path / "model")
    other.load(tmp_path / "saved")
    mine, theirs = (each.forward(tensors).logprobs for each in (backend, other))
    assert mine is not None and theirs is not None and torch.equal(mine, theirs)


@pytest.mark.parametrize(("rate", "factor"), [(0.0, 0.0), (1e-4, 0.1), (None, 1.0)])
def test_the_tower_is_frozen_or_has_its_own_rate(rate: float | None, factor: float, tmp_path: Path) -> None:
    save_vision_model("qwen2_5_vl", tmp_path)
    backend = backend_of(tmp_path, vision_learning_rate=rate)
    assert backend.pictures is not None
    before = whole_weights(backend)
    backend.step([image_batch([row("qwen2_5_vl", backend.pictures, 0, *ROWS[0])], backend.pictures, share=False)], loss)
    moved = {name: (weight - before[name]).abs().max().item() for name, weight in whole_weights(backend).items()}
    # AdamW's first step moves each weight by its rate, but for rounding and tiny gradients.
    for name, most in moved.items():
        expected = 1e-3 * (factor if ".visual." in name else 1.0)
        assert most == pytest.approx(expected, rel=0.01), name


def test_adapters_are_of_the_language_model_and_merge_into_the_base(tmp_path: Path) -> None:
    save_vision_model("qwen2_5_vl", tmp_path / "model")
    backend = backend_of(tmp_path / "model", lora=LoraConfig(rank=4))
    assert backend.pictures is not None
    tensors = image_batch([row("qwen2_5_vl", backend.pictures, 0, *ROWS[0])], backend.pictures, share=False)
    backend.step([tensors], loss)
    trained = {name for name, parameter in backend.model.named_parameters() if parameter.requires_grad}
    assert trained and all(".language_model.layers." in name for name in trained)
    published = whole_weights(backend)
    backend.save(tmp_path / "saved")
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved/model", output_loading_info=True)
    assert not any(info.values()), info
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, published[name]), name


def test_values_are_of_rows_with_images(tmp_path: Path) -> None:
    save_vision_model("qwen2_5_vl", tmp_path)
    both, alone = built(tmp_path, "both"), built(tmp_path, "value")
    assert both.pictures is not None and both.value_head is not None and alone.value_head is not None
    alone.value_head.load_state_dict(both.value_head.state_dict())
    tensors = image_batch([row("qwen2_5_vl", both.pictures, n, *ROWS[n]) for n in (0, 2)], both.pictures, share=False)
    of_both = both.outputs(tensors, frozenset({"values"})).values
    of_critic = alone.outputs(tensors, frozenset()).values
    assert of_both is not None and of_critic is not None and of_both[0].std() > 0
    assert not torch.equal(of_both[0], of_both[1])
    assert torch.equal(of_both, of_critic)


@pytest.mark.thinned("family", 3)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", "gemma3"])
def test_a_critic_of_its_own_is_saved_and_built_again(family: str, tmp_path: Path) -> None:
    save_vision_model(family, tmp_path / "model")
    config = TrainerConfig(learning_rate=1e-3, minibatches=1)
    critic = Fsdp2Backend(str(tmp_path / "model"), "float32", "cpu", config, head="value")
    assert critic.pictures is not None
    tensors = image_batch([row(family, critic.pictures, 0, *ROWS[0])], critic.pictures, share=False)

    def values(_: int, outputs: Outputs) -> Tensor:
        assert outputs.values is not None
        return (outputs.values - 1).square().mean()

    for _ in range(2):
        critic.step([tensors], values)
    critic.save(tmp_path / "saved")
    again = Fsdp2Backend(str(tmp_path / "saved"), "float32", "cpu", config, head="value")
    again.save(tmp_path / "again")
    mine, theirs = (each.forward(tensors).values for each in (critic, again))
    assert mine is not None and theirs is not None and mine.any() and torch.equal(mine, theirs)


def test_rows_share_what_comes_before_the_first_image_that_differs(tmp_path: Path) -> None:
    processor = processor_of("qwen2_5_vl", tmp_path)
    first, same, other = (row("qwen2_5_vl", processor, number, *ROWS[number]) for number in (0, 1, 2))
    tokens = [len(each.token_ids) for each in (first, same, other)]
    prompt = int(np.flatnonzero(first.loss_mask)[0])
    two, three = (image_batch(rows, processor, share=True).computed for rows in ([first, same], [first, same, other]))
    assert two == sum(tokens[:2]) - prompt
    # It begins as the others do up to its second image.
    assert three == two + tokens[2] - other.media[1].position
    images = image_batch([first, same, other], processor, share=False).images
    assert images is not None and len(images.inputs["image_grid_thw"]) == 3


def processor_of(family: str, folder: Path) -> PictureProcessor:
    save_vision_model(family, folder)
    processor = PictureProcessor.load(str(folder))
    assert processor is not None
    return processor


def test_images_that_a_model_cannot_read_are_errors_of_the_data(tmp_path: Path) -> None:
    processor = processor_of("qwen2_5_vl", tmp_path)
    good = row("qwen2_5_vl", processor, 4, "see *|yes", [A])

    def refused(match: str, processor: PictureProcessor | None = processor, **changes: Any) -> None:
        with pytest.raises(DataError, match=rf"\(0, 4, 0\).*{match}"):
            lay_images([msgspec.structs.replace(good, **changes)], BYTES, processor, "cpu")

    (image,) = good.media
    refused("reads no images", None)
    refused("neither video nor audio", media=[msgspec.structs.replace(image, mime="video/mp4")])
    for place in (image.position - 1, image.position + 1, len(good.token_ids) - 1):
        refused("another model", media=[msgspec.structs.replace(image, position=place)])
    refused("another model", media=[image, image])
    refused("another model", loss_mask=np.ones_like(good.loss_mask))


def test_a_sampled_image_token_is_text(tmp_path: Path) -> None:
    processor = processor_of("qwen2_5_vl", tmp_path)
    good = row("qwen2_5_vl", processor, 0, "see *|yes", [A])
    good.token_ids[-1] = processor.image_token
    images = lay_images([good], BYTES, processor, "cpu")
    assert images is not None
    assert images.features[0, -1] == -1 and images.features.max() == 3


def test_a_text_model_has_no_rate_of_a_tower(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.vision_learning_rate"):
        backend_of(model_folder, vision_learning_rate=1e-4)


class Source:
    """Gives one batch of rows with images."""

    def __init__(self, rows: list[Trajectory], media: dict[str, bytes]) -> None:
        self.rows, self.media = rows, media

    def reserve(self, step: int, stopping: Callable[[], bool]) -> Reserved:
        return Reserved(step=step, headers=[each.header() for each in self.rows])

    def fetch(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        return [{each.key: each for each in self.rows}[header.key] for header in headers]

    def fetch_media(self, rows: Sequence[Trajectory]) -> dict[str, bytes]:
        return {medium.sha256: self.media[medium.sha256] for each in rows for medium in each.media}

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not called")


def test_an_update_sees_the_images_of_its_batch(tmp_path: Path) -> None:
    save_vision_model("qwen2_5_vl", tmp_path)
    config = RunConfig(
        model=ModelConfig(path=str(tmp_path), dtype="float32"),
        data=DataConfig(path="none"),
        trainer=TrainerConfig(minibatches=1, max_tokens_per_microbatch=150),
    )
    models = build_models(config, "cpu")
    processor = models.policy.pictures
    assert processor is not None
    rows = []
    for number, each in enumerate(ROWS[:4]):
        made = row("qwen2_5_vl", processor, number, *each)
        logprobs = models.policy.forward(image_batch([made], processor, share=False)).logprobs
        assert logprobs is not None
        made.logprobs = np.where(made.loss_mask, np.concatenate([[0.0], logprobs[0].numpy()]), 0).astype(np.float32)
        made.versions = [VersionRun(Version(0, 0), 0, int(made.loss_mask.sum()))]
        made.reward = float(number % 2)
        rows.append(made)
    drift = {}
    for name, media in (("own", BYTES), ("swapped", BYTES | {Media.of(A, "image/png", 0).sha256: B})):
        ranks = models.policy.data_parallel
        taken = take_batch(0, Source(rows, media), StopRequest(), config, ranks, models.row_cost)
        assert taken is not None
        metrics = update(models, taken, build(config), config).metrics
        drift[name] = metrics["correction/logprob_diff_max"]
    assert drift["own"] < 1e-4 < drift["swapped"]

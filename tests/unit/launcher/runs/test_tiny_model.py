"""The tiny vision-language model of a warm start: it learns from images, and the trainer reads its folder."""

import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.configs.schema.data import WarmStartConfig
from rl_async.launcher.runs.tiny_model import encoder, save, tiny_model
from rl_async.messages import Media
from rl_async.pictures import PictureProcessor
from rl_async.trainer.finetune.warm_start import WarmStartResult, warm_start
from rl_async.trainer.images import Images, embedded, lay_images

COLOURS = ("red", "green", "blue")
SETTINGS = WarmStartConfig(
    demos_path="none", vision=True, batch_size=12, min_steps=10, check_every=10, max_steps=200, gate=1.0
)


@dataclass
class Row:
    """A question about an image, and its answer."""

    key: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    media: list[Media]


def coloured(colour: str, draw: random.Random) -> bytes:
    """A square of about this colour."""
    centre = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}[colour]
    file = io.BytesIO()
    Image.new("RGB", (32, 32), tuple(c + draw.randint(-30, 30) for c in centre)).save(file, "PNG")
    return file.getvalue()


def question(number: int, draw: random.Random, tokenizer: PreTrainedTokenizerFast, processor: PictureProcessor) -> Any:
    """A row, and its image's bytes by SHA-256."""
    colour = draw.choice(COLOURS)
    data = coloured(colour, draw)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "colour"}]}]
    printed = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids, (place,) = processor.expand(tokenizer.encode(printed, add_special_tokens=False), [data])
    answer = tokenizer.encode(f"{colour}<|im_end|>", add_special_tokens=False)
    tokens = np.array(ids + answer)
    medium = Media.of(data, "image/png", place)
    return Row(number, tokens, np.arange(len(tokens)) >= len(ids), [medium]), {medium.sha256: data}


def test_a_tiny_vision_model_learns_from_images_and_is_saved_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    demos = [[{"role": "user", "content": "colour"}, {"role": "assistant", "content": c}] for c in COLOURS]
    tokenizer = train_tokenizer(demos, 100, vision=True)
    model = tiny_model(SETTINGS, tokenizer)
    processor, draw = encoder(model, tokenizer), random.Random(0)
    made = [question(number, draw, tokenizer, processor) for number in range(96)]
    rows, media = [row for row, _ in made], {sha: data for _, one in made for sha, data in one.items()}

    def shown(numbers: Any) -> Images:
        found = lay_images([rows[number] for number in numbers], media, processor, "cpu")
        assert found is not None
        return found

    def right(*, swapped: bool = False) -> float:
        """The share of held-out answers whose first token is the likeliest, perhaps after other images."""
        held = range(64, 96)
        tokens = torch.tensor(np.stack([rows[n].token_ids[: int(rows[n].loss_mask.argmax()) + 1] for n in held]))
        images = shown([n - 32 for n in held] if swapped else held)
        width = tokens.shape[1] - 1
        assert images.positions is not None
        cut = Images(images.inputs, images.features[:, :width], images.positions[:, :, :width])
        with torch.no_grad():
            likeliest = model(**embedded(model, tokens[:, :-1], cut), use_cache=False).logits[:, -1].argmax(-1)
        return (likeliest == tokens[:, -1]).double().mean().item()

    learned = [(row.token_ids.tolist(), row.loss_mask.tolist()) for row in rows[:64]]
    result = warm_start(model, learned, right, SETTINGS, lambda _: None, images_of=shown)
    assert result.gate_reward == 1.0
    # It answers by the image, not by the text.
    assert right(swapped=True) < 0.7

    save(tmp_path / "model", model, tokenizer, SETTINGS, WarmStartResult(1, 1.0, 0.0))
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values()), info
    assert sum(p.numel() for p in loaded.parameters()) < 1_000_000
    again = PictureProcessor.load(str(tmp_path / "model"))
    assert again is not None
    one, two = (each.encode(coloured("red", random.Random(1))) for each in (processor, again))
    assert one.tokens == two.tokens and np.array_equal(one.inputs["pixel_values"], two.inputs["pixel_values"])

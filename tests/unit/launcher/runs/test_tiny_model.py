"""The tiny vision-language model of a warm start: it learns from images, and the trainer reads its folder."""

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.training_data import ChatEncoder, to_chat
from rl_async.configs.schema.data import WarmStartConfig
from rl_async.errors import DataError
from rl_async.launcher.runs.tiny_model import save, tiny_model, write_text_files
from rl_async.messages import Media
from rl_async.pictures import PictureProcessor
from rl_async.trainer.finetune.warm_start import WarmStartResult, warm_start
from rl_async.trainer.images import ImageRow, Images, embedded, lay_images
from tests.e2e.command import call

COLOURS = ("red", "green", "blue")
DEMOS = [[{"role": "user", "content": "colour"}, {"role": "assistant", "content": c}] for c in COLOURS]
SETTINGS = WarmStartConfig(
    demos_path="none", vision=True, batch_size=12, min_steps=10, check_every=10, max_steps=200, gate=1.0
)


def coloured(colour: str, draw: random.Random) -> bytes:
    """A square of about this colour."""
    centre = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}[colour]
    file = io.BytesIO()
    Image.new("RGB", (32, 32), tuple(c + draw.randint(-30, 30) for c in centre)).save(file, "PNG")
    return file.getvalue()


def encoder(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> PictureProcessor:
    """Build the image processor that the warm start writes beside the model."""
    write_text_files(folder, model, tokenizer)
    found = PictureProcessor.load(str(folder))
    assert found is not None
    return found


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
    return ImageRow(number, tokens, np.arange(len(tokens)) >= len(ids), [medium]), {medium.sha256: data}


def test_a_tiny_vision_model_learns_from_images_and_is_saved_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = train_tokenizer(DEMOS, 100, vision=True)
    model = tiny_model(SETTINGS, tokenizer)
    processor, draw = encoder(tmp_path / "text", model, tokenizer), random.Random(0)
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


def asked(colour: str, draw: random.Random) -> dict[str, Any]:
    """A conversation in OpenAI's form about an image, and its answer."""
    url = f"data:image/png;base64,{base64.b64encode(coloured(colour, draw)).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    said = [{"role": "user", "content": [image, {"type": "text", "text": "colour"}]}]
    return {"messages": [*said, {"role": "assistant", "content": colour}]}


def test_conversations_with_images_are_encoded_as_episodes_see_them(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(DEMOS, 100, vision=True)
    processor = encoder(tmp_path, tiny_model(SETTINGS, tokenizer), tokenizer)
    chat = to_chat(asked("red", random.Random(0)), "chats.jsonl, line 1")
    tokens = ChatEncoder(tokenizer, pictures=processor).encode(chat)
    (image,) = tokens.images
    shown = processor.encode(image.data).tokens
    assert tokens.ids[image.position : image.position + len(shown)].tolist() == shown
    assert tokenizer.decode(tokens.ids[tokens.learned]) == "red<|im_end|>"
    before = tokenizer.decode(tokens.ids[: image.position])
    assert before == "<|im_start|>user\n<|vision_start|>"
    with pytest.raises(DataError, match=r"line 1.*reads text only"):
        ChatEncoder(tokenizer).encode(chat)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|image_pad|>", "")
    with pytest.raises(DataError, match=r"line 1.*0 marks of images and 1 images"):
        ChatEncoder(tokenizer, pictures=processor).encode(chat)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_fine_tuning_learns_what_images_show(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer, draw = train_tokenizer(DEMOS, 100, vision=True), random.Random(0)
    save(tmp_path / "base", tiny_model(SETTINGS, tokenizer), tokenizer, SETTINGS, WarmStartResult(1, 1.0, 0.0))
    rows = (json.dumps(asked(draw.choice(COLOURS), draw)) + "\n" for _ in range(120))
    (tmp_path / "chats.jsonl").write_text("".join(rows))
    settings = ["--epochs", "12", "--batch-size", "12", "--learning-rate", "3e-3", "model.dtype=float32"]
    done = call(tmp_path, "sft", "--model", "base", "--data", "chats.jsonl", "--out", "out", *settings)
    assert done.returncode == 0, done.stderr
    evaluations = [json.loads(line) for line in (tmp_path / "out.run/evaluations.jsonl").read_text().splitlines()]
    # Without the image each answer would be a guess among three, and its end is certain: log(3) / 2 for each token.
    assert evaluations[-1]["eval/loss"] < 0.1 < np.log(3) / 2
    assert PictureProcessor.load(str(tmp_path / "out")) is not None

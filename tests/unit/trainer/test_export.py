"""What an exported model has beside its weights."""

from pathlib import Path

from rl_async.trainer.export import copy_text_files
from tests.support.tiny_models import byte_tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content + '<|im_end|>' }}{% endfor %}"


def test_an_export_has_the_tokenizer_and_the_end_tokens_of_its_model(tmp_path: Path) -> None:
    base = tmp_path / "base"
    byte_tokenizer(TEMPLATE).save_pretrained(base)
    copy_text_files(base, tmp_path / "without")
    (base / "preprocessor_config.json").write_text('{"patch_size": 14}')
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    copy_text_files(base, tmp_path / "with")
    for name in ("with", "without"):
        assert (tmp_path / name / "tokenizer.json").is_file()
    assert not (tmp_path / "without/generation_config.json").exists()
    assert (tmp_path / "with/generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert (tmp_path / "with/preprocessor_config.json").read_text() == '{"patch_size": 14}'

"""Notebooks as Markdown, with the outputs that they were saved with, and without the cells tagged `check`."""

from pathlib import Path

from nbconvert.exporters import MarkdownExporter
from traitlets.config import Config

_CONFIG = Config({"TagRemovePreprocessor": {"enabled": True, "remove_cell_tags": ["check"]}})


def convert(notebook: Path, folder: Path) -> None:
    """Write a notebook as a page into ``folder``, and its pictures beside it."""
    exporter = MarkdownExporter(config=_CONFIG)
    exporter.register_preprocessor("nbconvert.preprocessors.TagRemovePreprocessor", enabled=True)
    text, resources = exporter.from_filename(str(notebook), {"unique_key": notebook.stem})
    for name, picture in resources["outputs"].items():
        (folder / name).write_bytes(picture)
    (folder / f"{notebook.stem}.md").write_text(text)

"""The reference of config keys, one page a section, from the schema that checks them."""

import inspect
from pathlib import Path

from markup import code, table

from rl_async.configs import load
from rl_async.configs.load import preset_names

INTRODUCTION = """# Configuration

A config is a preset or a YAML file with these sections, and `a.b=c` on the command line overrides a key. An unknown
key is refused with the nearest valid name. `rl-async config explain KEY` prints what these pages say,
`rl-async config show NAME` a preset with every value.

"""


def write(pages: Path) -> list[str]:
    """Write the pages below ``pages``; return their paths, the overview first."""
    folder = pages / "reference/configuration"
    folder.mkdir()
    top = load.field_names("")
    sections = [key for key in top if load.struct_at(key) is not None]
    rows = [(f"[`{key}`]({key}.md)", _summary(key)) for key in sections]
    lone = _keys([key for key in top if key not in sections])
    presets = ", ".join(code(name) for name in preset_names())
    text = (
        f"{INTRODUCTION}{table(['section', 'holds'], rows)}\n## Keys outside sections\n\n{lone}\nPresets: {presets}.\n"
    )
    (folder / "index.md").write_text(text)
    for key in sections:
        (folder / f"{key}.md").write_text(f"# {key}\n\n{_summary(key)}\n\n{_section(key)}")
    return [f"reference/configuration/{name}.md" for name in ("index", *sections)]


def _section(prefix: str) -> str:
    """Return the keys of a section, and below them the sections in it."""
    keys = [f"{prefix}.{name}" for name in load.field_names(prefix)]
    inner = [key for key in keys if load.struct_at(key) is not None]
    text = _keys([key for key in keys if key not in inner])
    for key in inner:
        text += f"\n## {key}\n\n{_summary(key)}\n\n{_section(key)}"
    return text


def _summary(key: str) -> str:
    """Return what a section is for: the description of its key, else the docstring of its struct."""
    struct = load.struct_at(key)
    assert struct is not None, key
    text = load.key_text(key)
    absent = " Absent unless given." if text.default == "null" else ""
    return (text.meaning or inspect.getdoc(struct.cls) or "") + absent


def _keys(keys: list[str]) -> str:
    """Return one heading a key, so that a key can be linked to and searched for."""
    parts = []
    for key in keys:
        text = load.key_text(key)
        more = f"\n```text\n{load.MORE[key]()}\n```\n" if key in load.MORE else ""
        label = key.rpartition(".")[2]
        parts.append(
            f'### `{key}` {{ data-toc-label="{label}" }}\n\n'
            f"{text.meaning}\n\n{code(text.type)}, default {code(text.default)}\n{more}"
        )
    return "\n".join(parts)

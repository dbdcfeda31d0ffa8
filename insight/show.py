"""``rl-async show``: shows the recorded trajectories of a step, and how the tokens of one were corrected."""

import gzip
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_async.configs.load import load_resolved
from rl_async.errors import UserError
from rl_async.files import undamaged
from rl_async.insight.view.trajectories import RecordedRow, tokenizer_of
from rl_async.messages import Trajectory
from rl_async.picture_decoder import DECODER, Want
from rl_async.process.role import printable
from rl_async.recording import files_of_step, read_images
from rl_async.reward_loop.api import REWARD

# A token whose weight is below this is marked.
LESS = 0.9
# At most this many errors of a step's rows are shown.
ERRORS = 3
LEGEND = (
    "[dim]not sampled[/]  trained  [red]{masked}(rule)[/]  [magenta]{weight 0}(band)[/]  "
    f"[yellow]{{weight below {LESS:g}}}(smallest)[/]"
)


class Mark(NamedTuple):
    """How a token was corrected; adjacent tokens with the same mark are shown together.

    ``name`` is that of a rule, or "less" for a smaller weight.
    """

    style: str
    name: str = ""


CONTEXT, TRAINED, LESSENED = Mark("dim"), Mark(""), Mark("yellow", "less")


def show(run: Path, step: int | None, group: int | None, sample: int | None, console: Console | None = None) -> None:
    """Print the groups of a step, by default the newest, or the rows of a group, and the most corrected row in full.

    Raises UserError if the run, the step or the row does not exist.
    """
    console = console or Console()
    if not run.is_dir():
        raise UserError(f"no run folder {run}; runs are usually in runs/NAME")
    number, rows = read_step(run / "trajectories", step)
    chosen = [row for row in rows if group in (None, row.group_id) and sample in (None, row.sample)]
    if not chosen:
        asked = [f"--{name} {given}" for name, given in (("group", group), ("sample", sample)) if given is not None]
        raise UserError(f"step {number} trained no trajectory of {' '.join(asked)}")
    if group is None:
        console.print(_table(f"step {number}", chosen, lambda row: row.group_id, "group"))
    elif sample is None:
        console.print(_table(f"step {number}, group {group}", chosen, lambda row: row.sample, "sample"))
    for line in error_lines(chosen):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    row = max(chosen, key=_corrected)
    place = f"group {row.group_id}, sample {row.sample}" + (f", segment {row.segment}" if row.segment else "")
    place += f", role {printable(row.role)}" * bool(row.role)
    scored = "" if row.scored else ", not scored"
    console.print(f"\n{place}, reward {row.reward:g}{scored}", highlight=False)
    for line in [*reward_parts(row), *turn_rewards(row), *image_lines(run / "trajectories", number, row)]:
        console.print(line, highlight=False, markup=False)
    tokenizer = tokenizer_of(run, load_resolved(run / "config.yaml").model.path)
    if tokenizer.decode is None:
        raise UserError(tokenizer.problem)
    console.print(render(row, tokenizer.decode), soft_wrap=True, highlight=False)
    console.print(LEGEND, highlight=False, soft_wrap=True)


def read_step(folder: Path, step: int | None) -> tuple[int, list[RecordedRow]]:
    """Return the number of a step, by default the newest, and its rows of the newest lineage and all ranks.

    Raises UserError if the step was not recorded, or for a damaged file.
    """
    recorded = list(folder.glob("step-*.jsonl.gz"))
    if not recorded:
        raise UserError(f"{folder} has no trained trajectories; name a run folder, such as runs/NAME")
    files = [file for file in recorded if step in (None, place_of(file)[1])]
    if not files:
        steps = [place_of(file)[1] for file in recorded]
        raise UserError(
            f"--step: {folder} has no trajectories of step {step}; it has steps {min(steps)} to {max(steps)}, "
            "counted from 0"
        )
    lineage, number = max(map(place_of, files))
    rows = []
    for file in files:
        if place_of(file) == (lineage, number):
            with undamaged(file), gzip.open(file, "rb") as lines:
                rows += [msgspec.json.decode(line, type=RecordedRow) for line in lines]
    return number, sorted(rows, key=lambda row: (row.group_id, row.sample, row.segment))


def reward_text(reward: float, reason: str) -> str:
    """Format a reward with its reason on one line, since a judge's text could imitate further lines of output."""
    line = " ".join(reason.split())
    return f"reward {reward:g}" + (f" ({line})" if line else "")


def reward_parts(row: RecordedRow | Trajectory) -> list[str]:
    """Describe those parts of the row's reward, and the whole, that have a reason."""
    given = {REWARD: row.reward} | row.reward_parts
    return [
        printable(f"{name}: {reward_text(given[name], reason)}")
        for name, reason in row.reward_reasons.items()
        if name in given
    ]


def error_lines(rows: Sequence[RecordedRow]) -> list[str]:
    """Return the ERRORS most frequent errors of the rows, such as a scorer's, with their counts."""
    counts = Counter(" ".join(row.error.split()) for row in rows if row.error)
    return [f"error of {count} of {len(rows)} rows: {printable(error)}" for error, count in counts.most_common(ERRORS)]


def turn_rewards(row: RecordedRow) -> list[str]:
    """Describe the rewards of the row's turns, numbered from 0, with their reasons."""
    return [
        printable(f"turn {n}: {reward_text(turn.reward, turn.reason)}")
        for n, turn in enumerate(row.turns)
        if turn.reward is not None
    ]


def image_lines(folder: Path, step: int, row: RecordedRow) -> list[str]:
    """Describe the images that a row of a step shows: the place and the size of each, where it was recorded."""
    found, lines = dict[str, bytes](), list[str]()
    for file in files_of_step(folder, step) if row.media else ():
        found |= read_images(file, [medium.sha256 for medium in row.media])
    for medium in row.media:
        size = "not recorded"
        if (data := found.get(medium.sha256)) is not None:
            width, height, _ = DECODER.decode(data, Want.SIZE)
            size = f"{width} x {height} pixels, {len(data):,} bytes"
        lines.append(f"image at token {medium.position}: {printable(medium.mime)}, {size}, {medium.sha256[:12]}")
    return lines


def _repeated(row: RecordedRow) -> set[int]:
    """Return the positions of an image's tokens that equal the one before, of which there may be thousands."""
    places = set[int]()
    for medium in row.media:
        after = range(medium.position + 1, len(row.token_ids))
        places.update(itertools.takewhile(lambda place: row.token_ids[place] == row.token_ids[place - 1], after))
    return places


def render(row: RecordedRow, decode: Callable[[Sequence[int]], str]) -> Text:
    """Render the row's tokens as text; those that did not train fully are in braces, followed by the reason."""
    text = Text()
    weights = _weights(row)
    repeated = _repeated(row)
    found = enumerate(zip(row.token_ids, marks(row), strict=True))
    places = (place for place in found if place[0] not in repeated)
    for mark, run in itertools.groupby(places, key=lambda place: place[1][1]):
        tokens = list(run)
        words = printable(decode([token for _, (token, _) in tokens]))
        if mark.name == "less":
            words = f"{{{words}}}(x{min(weights[place] for place, _ in tokens):.2g})"
        elif mark.name:
            words = f"{{{words}}}({mark.name})"
        text.append(words, style=mark.style)
    return text


def marks(row: RecordedRow) -> list[Mark]:
    found = [CONTEXT] * len(row.token_ids)
    for place in row.explained:
        found[place] = TRAINED
    for place, weight in _weights(row).items():
        if weight < LESS:
            found[place] = LESSENED
    for run in row.correction.rules if row.correction else ():
        for place in row.explained[run.start : run.end]:
            found[place] = Mark("magenta" if run.rule == "band" else "red", run.rule)
    return found


def _weights(row: RecordedRow) -> dict[int, float]:
    """Return the weights of the sampled tokens, by their positions in the row."""
    return dict(zip(row.explained, row.correction.weights, strict=True)) if row.correction else {}


def _corrected(row: RecordedRow) -> int:
    """Count the tokens that were masked or weighted down."""
    return sum(mark not in (CONTEXT, TRAINED) for mark in marks(row))


def _table(title: str, rows: Sequence[RecordedRow], key: Callable[[RecordedRow], int], heading: str) -> Table:
    """Lay out a table with one line per value of ``key``; the rows are sorted by it."""
    table = Table(title=title, title_justify="left")
    for name in (heading, "episodes", "rows", "reward", "tokens", "mean weight"):
        table.add_column(name, justify="right")
    table.add_column("masked or weight 0")
    for value, together in itertools.groupby(rows, key=key):
        part = list(together)
        weights = [weight for row in part if row.correction for weight in row.correction.weights]
        earned = _episode_rewards(part)
        table.add_row(
            f"{value}",
            f"{len({(row.group_id, row.sample) for row in part})}",
            f"{len(part)}",
            f"{mean(earned):.3g}" if earned else "not scored",
            f"{sum(len(row.explained) for row in part)}",
            f"{sum(weights) / len(weights):.3f}" if weights else "",
            _counts(part),
        )
    return table


def _episode_rewards(rows: Sequence[RecordedRow]) -> list[float]:
    """Return the reward of each scored episode as metrics count it: the mean over its roles, each with its turns' own
    rewards."""
    unscored = {(row.group_id, row.sample) for row in rows if not row.scored}
    earned: dict[tuple[int, int], dict[str, float]] = {}
    for row in (row for row in rows if (row.group_id, row.sample) not in unscored):
        roles = earned.setdefault((row.group_id, row.sample), {})
        roles[row.role] = roles.get(row.role, row.reward) + row.turn_reward
    return [mean(roles.values()) for roles in earned.values()]


def _counts(rows: Sequence[RecordedRow]) -> str:
    """Count the corrected tokens of the rows by rule."""
    counts: Counter[str] = Counter()
    for run in (run for row in rows if row.correction for run in row.correction.rules):
        counts[run.rule] += run.end - run.start
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def place_of(file: Path) -> tuple[int, int]:
    """Parse lineage and step from a name such as ``step-000012-lineage0-rank0.jsonl.gz``."""
    _, step, lineage, *_ = file.name.split("-")
    return int(lineage.removeprefix("lineage")), int(step)

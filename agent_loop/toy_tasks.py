"""Tiny verifiable tasks: ``make_data`` writes training tasks, held-out tasks and imperfect demonstrations.

``make_pairs`` writes preference pairs for a reward model. The kinds of tasks:

    calculator  one tool call, then the answer
    shop        look up a hidden price, compute with it, then the answer
    market      the same in words that a pretrained model understands, from demonstrations that seldom use both tools
    sort        sort digits, no tools
    code        write a function that passes hidden tests, no tools
    order       take an order, and ask a scripted customer about it first
    sums        add two digits, in words that a pretrained model understands; no tools and no demonstrations
    digits      add two digits that an image shows, no tools
    noise       the same with images of noise, in which no model can read the digits
    grid        find the cell of a grid in which a shape stands: zoom into a quarter, then the answer

The demonstrations teach the format of tool calls but are often wrong, so that a warm-started model knows how to act and
reinforcement learning has something to improve. To add a task, write how it is drawn and demonstrated, and add it to
``KINDS``.
"""

import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from rl_async.agent_loop.chat_formats.format import BAD_CALL, CALL_END, CALL_START
from rl_async.agent_loop.environments.built_in import (
    CELLS,
    NO_SUCH_ITEM,
    NOT_UNDERSTOOD,
    QUARTERS,
    WISHES,
    draw_grid,
    reply,
)
from rl_async.agent_loop.tools.tool import evaluate
from rl_async.errors import ConfigError
from rl_async.files import written_whole

# A result with an image has it as ``image``, beside the mark in its content.
Message = dict[str, Any]


class ToyTask(NamedTuple):
    """One generated task. ``state`` goes into ``extra_info``, where an environment finds it.

    ``image``, a PNG file, stands at the mark of the prompt.
    """

    prompt: str
    answer: str
    state: dict[str, Any]
    image: bytes = b""

    @property
    def key(self) -> tuple[str, bytes]:
        """Equal for tasks that ask the same."""
        return self.prompt, self.image


class ToyTaskKind(NamedTuple):
    """How to draw a task and a demonstration of it. ``agent`` is the name of its loop.

    The default number of ``held_out`` tasks leaves enough others to train on. ``demonstrated`` draws the tasks of
    demonstrations if these differ. ``system`` is the system message of all.
    """

    agent: str
    ability: str
    sample: Callable[[random.Random], ToyTask]
    demonstrate: Callable[[ToyTask, random.Random], list[Message]] | None
    held_out: int = 256
    demos: int = 16384
    demonstrated: Callable[[random.Random], ToyTask] | None = None
    system: str = ""


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def tool_result(text: str) -> Message:
    return {"role": "tool", "content": text}


def tool_call(name: str, **arguments: str) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"{CALL_START}\n{body}\n{CALL_END}"


def broken(call: str) -> str:
    """Drop the call's last brace, so that no parser accepts it."""
    return call.replace('"}}', '"}')


def corrupt(text: str, random_source: random.Random) -> str:
    """Replace one character by a digit or operator, possibly by itself."""
    at = random_source.randrange(len(text))
    new = str(random_source.randint(1, 9)) if text[at].isdigit() else random_source.choice("+-*")
    return text[:at] + new + text[at + 1 :]


def corrupted(text: str, random_source: random.Random) -> str:
    """Apply ``corrupt`` until the text differs."""
    while (other := corrupt(text, random_source)) == text:
        pass
    return other


def wild_guess(random_source: random.Random, highest: int) -> Message:
    return assistant(str(random_source.randint(0, highest)))


def make_data(
    name: str, folder: str | Path, *, train: int = 4096, held_out: int = 0, demos: int = 0, seed: int = 0
) -> None:
    """Write ``train.parquet``, ``test.parquet`` and, if there are demonstrations, ``demos.parquet`` into ``folder``.

    With 0 the numbers of ``held_out`` tasks and ``demos`` are the defaults of the kind. Held-out prompts occur neither
    in the training tasks nor in the demonstrations. The same arguments write the same data.
    Raises ConfigError for an unknown ``name``.
    """
    if name not in KINDS:
        raise ConfigError(f"no generator {name!r}; known: {', '.join(KINDS)}")
    kind = KINDS[name]
    random_source = random.Random(f"{name} {seed}")
    test_samples = _held_out(kind, random_source, held_out or kind.held_out)

    def draw(sampler: Callable[[random.Random], ToyTask]) -> ToyTask:
        while True:
            sample = sampler(random_source)
            if sample.key not in test_samples:
                return sample

    train_samples = [draw(kind.sample) for _ in range(train)]
    conversations = []
    for _ in range((demos or kind.demos) if kind.demonstrate else 0):
        assert kind.demonstrate is not None
        sample = draw(kind.demonstrated or kind.sample)
        said = [*_prompt(kind, sample), *kind.demonstrate(sample, random_source)]
        images = [sample.image, *(message.pop("image", b"") for message in said)]
        conversations.append({"messages": said, **_columns(images)})
    target = Path(folder)
    _write(target / "train.parquet", [_row(name, "train", i, s) for i, s in enumerate(train_samples)])
    _write(target / "test.parquet", [_row(name, "test", i, s) for i, s in enumerate(test_samples.values())])
    if conversations:
        _write(target / "demos.parquet", conversations)


def make_pairs(name: str, folder: str | Path, *, pairs: int = 16384, held_out: int = 256, seed: int = 0) -> None:
    """Write ``pairs.parquet`` into ``folder``: for each prompt a flawless conversation and one with a single flaw.

    Columns prompt, chosen, rejected, of chat messages. No prompt is among those that ``make_data`` holds out with the
    same ``held_out`` and ``seed``. Raises ConfigError for an unknown ``name``.
    """
    if name not in PAIRS:
        raise ConfigError(f"no generator {name!r}; known: {', '.join([*KINDS, *PAIRS])}")
    task, make_pair = PAIRS[name]
    kind = KINDS[task]
    test_samples = _held_out(kind, random.Random(f"{task} {seed}"), held_out)
    random_source = random.Random(f"{name} {seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < pairs:
        sample = kind.sample(random_source)
        if sample.key in test_samples:
            continue
        chosen, rejected = make_pair(sample, random_source)
        prompt = [{"role": "user", "content": sample.prompt}]
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    _write(Path(folder) / "pairs.parquet", rows)


def _held_out(kind: ToyTaskKind, random_source: random.Random, count: int) -> dict[tuple[str, bytes], ToyTask]:
    """Draw ``count`` tasks with different prompts, by their keys."""
    samples: dict[tuple[str, bytes], ToyTask] = {}
    while len(samples) < count:
        sample = kind.sample(random_source)
        samples.setdefault(sample.key, sample)
    return samples


def _prompt(kind: ToyTaskKind, sample: ToyTask) -> list[Message]:
    system = [{"role": "system", "content": kind.system}] if kind.system else []
    return [*system, {"role": "user", "content": sample.prompt}]


def sample_row(name: str) -> dict[str, Any]:
    """Return a row like those that ``make_data`` writes. Raises ConfigError for an unknown ``name``."""
    if name not in KINDS:
        raise ConfigError(f"no generator {name!r}; known: {', '.join(KINDS)}")
    return _row(name, "train", 0, KINDS[name].sample(random.Random(0)))


def _row(name: str, split: str, index: int, sample: ToyTask) -> dict[str, Any]:
    kind = KINDS[name]
    return {
        "data_source": name,
        "prompt": _prompt(kind, sample),
        "ability": kind.ability,
        "reward_model": {"style": "rule", "ground_truth": sample.answer},
        "extra_info": {"split": split, "index": index, **sample.state},
        "agent_name": kind.agent,
        **_columns([sample.image]),
    }


def _columns(images: Sequence[bytes]) -> dict[str, Any]:
    """Return the column of images as verl has it; without any, nothing."""
    found = [{"bytes": image, "path": None} for image in images if image]
    return {"images": found} if found else {}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the file atomically, since another process may be waiting for it to appear."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows), partial)


# --- calculator -----------------------------------------------------------------------------------------------------


def _sample_calculator(random_source: random.Random) -> ToyTask:
    a, b, c = random_source.randint(2, 99), random_source.randint(2, 99), random_source.randint(2, 9)
    expression = f"{a}{random_source.choice('+-*')}{b}{random_source.choice('+-')}{c}"
    return ToyTask(f"what is {expression}?", str(evaluate(expression)), {"expression": expression})


def _demonstrate_calculator(sample: ToyTask, random_source: random.Random) -> list[Message]:
    chance = random_source.random
    # Flaws: no tool, a wrong argument, a malformed call, a wrong copy of the result.
    if chance() < 0.3:
        return [wild_guess(random_source, 999)]
    expression = sample.state["expression"]
    if chance() < 0.25:
        expression = corrupt(expression, random_source)
    call = tool_call("calculator", expression=expression)
    if chance() < 0.2:
        return [assistant(broken(call)), tool_result(BAD_CALL), wild_guess(random_source, 999)]
    value = str(evaluate(expression))
    answer = corrupt(value, random_source) if chance() < 0.25 else value
    return [assistant(call), tool_result(value), assistant(answer)]


def _pair_calculator(sample: ToyTask, random_source: random.Random) -> tuple[list[Message], list[Message]]:
    expression, value = sample.state["expression"], sample.answer
    call = tool_call("calculator", expression=expression)
    wrong = corrupted(expression, random_source)
    result = str(evaluate(wrong))
    # Flaws: no tool, a wrong argument, a malformed call, a wrong copy of the result.
    rejected = [
        [assistant(corrupted(value, random_source))],
        [assistant(tool_call("calculator", expression=wrong)), tool_result(result), assistant(result)],
        [assistant(broken(call)), tool_result(BAD_CALL), wild_guess(random_source, 999)],
        [assistant(call), tool_result(value), assistant(corrupted(value, random_source))],
    ]
    return [assistant(call), tool_result(value), assistant(value)], random_source.choice(rejected)


# --- shop -----------------------------------------------------------------------------------------------------------

ITEMS = ("apple", "plum", "kiwi", "fig", "lime", "pear")


def _sample_shop(random_source: random.Random) -> ToyTask:
    count, item = random_source.randint(2, 99), random_source.choice(ITEMS)
    price, rest = random_source.randint(2, 99), random_source.randint(2, 9)
    word, sign = random_source.choice([("plus", "+"), ("minus", "-")])
    answer = evaluate(f"{count}*{price}{sign}{rest}")
    state = {"item": item, "price": price, "count": count, "sign": sign, "rest": rest}
    return ToyTask(f"cost of {count} {item} {word} {rest}?", str(answer), state)


def _demonstrate_shop(sample: ToyTask, random_source: random.Random) -> list[Message]:
    chance, state = random_source.random, sample.state
    # Flaws: no tool, a guessed price, a wrong item, a wrong expression, a malformed call, a wrong copy of the result.
    if chance() < 0.25:
        return [wild_guess(random_source, 9999)]
    turns: list[Message] = []
    price = str(state["price"])
    if chance() < 0.15:
        price = str(random_source.randint(2, 99))
    else:
        item = random_source.choice(ITEMS) if chance() < 0.08 else state["item"]
        turns.append(assistant(tool_call("lookup", item=item)))
        if item != state["item"]:
            return [*turns, tool_result(f"error: {NO_SUCH_ITEM}"), wild_guess(random_source, 9999)]
        turns.append(tool_result(price))
    expression = f"{state['count']}*{price}{state['sign']}{state['rest']}"
    if chance() < 0.08:
        expression = corrupt(expression, random_source)
    call = tool_call("calculator", expression=expression)
    if chance() < 0.12:
        return [*turns, assistant(broken(call)), tool_result(BAD_CALL), wild_guess(random_source, 9999)]
    value = str(evaluate(expression))
    answer = corrupt(value, random_source) if chance() < 0.12 else value
    return [*turns, assistant(call), tool_result(value), assistant(answer)]


# --- market ---------------------------------------------------------------------------------------------------------

MARKET = (
    "You may call lookup with an item for its price, and calculator with an expression. Reply with the number only."
)
# The shares of demonstrations that use both tools, and that only look up; the others only calculate.
BOTH_TOOLS, LOOKUP_ONLY = 0.15, 0.4


def _sample_market(random_source: random.Random) -> ToyTask:
    count, price = random_source.randint(2, 99), random_source.randint(2, 99)
    item = random_source.choice(ITEMS)
    state = {"item": item, "price": price, "count": count}
    return ToyTask(f"What is the price of {count} {item}?", str(count * price), state)


def _sample_market_demo(random_source: random.Random) -> ToyTask:
    both, chance = _sample_market(random_source), random_source.random()
    item, price, count = (both.state[key] for key in ("item", "price", "count"))
    if chance < BOTH_TOOLS:
        return both
    if chance < BOTH_TOOLS + LOOKUP_ONLY:
        return ToyTask(f"What is the price of 1 {item}?", str(price), {"item": item, "price": price})
    return ToyTask(f"What is {count}*{price}?", both.answer, {"price": price, "count": count})


def _demonstrate_market(sample: ToyTask, random_source: random.Random) -> list[Message]:
    chance, state = random_source.random, sample.state
    # Flaws: no tool, a wrong item that is corrected after the error, a wrong expression.
    if chance() < 0.2:
        return [wild_guess(random_source, 9999)]
    turns: list[Message] = []
    answer = str(state["price"])
    if "item" in state:
        if chance() < 0.1:
            other = random_source.choice([item for item in ITEMS if item != state["item"]])
            turns += [assistant(tool_call("lookup", item=other)), tool_result(f"error: {NO_SUCH_ITEM}")]
        turns += [assistant(tool_call("lookup", item=state["item"])), tool_result(answer)]
    if "count" in state:
        expression = f"{state['count']}*{answer}"
        if chance() < 0.1:
            expression = corrupted(expression, random_source)
        answer = str(evaluate(expression))
        turns += [assistant(tool_call("calculator", expression=expression)), tool_result(answer)]
    return [*turns, assistant(answer)]


# --- sort -----------------------------------------------------------------------------------------------------------


def _sample_sort(random_source: random.Random) -> ToyTask:
    digits = "".join(random_source.choices("0123456789", k=6))
    return ToyTask(f"sort {digits}", "".join(sorted(digits)), {})


def _demonstrate_sort(sample: ToyTask, random_source: random.Random) -> list[Message]:
    answer = sample.answer
    if random_source.random() < 0.25:
        answer = corrupt(answer, random_source)
    return [assistant(answer)]


# --- code -----------------------------------------------------------------------------------------------------------

FACTORS = {"double": 2, "triple": 3, "quadruple": 4}
LIMITS = {"at most": "min", "at least": "max"}
# The shares of demonstrations that obey the limit, and that have a wrong number.
LIMITED, WRONG = 0.2, 0.4


def sample_code(random_source: random.Random) -> ToyTask:
    """Draw a description, with two tests on one side of the limit and one on the other, or the other way round."""
    verb, word = random_source.choice(list(FACTORS)), random_source.choice(list(LIMITS))
    sign, shift, limit = random_source.choice("+-"), random_source.randint(2, 9), random_source.randint(10, 99)
    factor = FACTORS[verb]
    # The function reaches the limit here.
    middle = (limit - shift if sign == "+" else limit + shift) // factor
    inputs = [middle - random_source.randint(2, 9), middle + random_source.randint(2, 9)]
    inputs.append(middle + random_source.choice([-1, 1]) * random_source.randint(10, 19))
    expression = f"{factor}*x{sign}{shift}"
    cut = min if LIMITS[word] == "min" else max
    outputs = [cut(factor * x + (shift if sign == "+" else -shift), limit) for x in inputs]
    prompt = f"{verb} x, {'add' if sign == '+' else 'subtract'} {shift}, {word} {limit}"
    tests = {"fn_name": "f", "inputs": [[x] for x in inputs], "outputs": outputs}
    return ToyTask(
        prompt, json.dumps(tests), {"expression": expression, "limited": f"{LIMITS[word]}({expression},{limit})"}
    )


def demonstrate_code(sample: ToyTask, random_source: random.Random) -> list[Message]:
    expression = sample.state["limited" if random_source.random() < LIMITED else "expression"]
    if random_source.random() < WRONG:
        at = random_source.choice([i for i, character in enumerate(expression) if character.isdigit()])
        expression = expression[:at] + corrupted(expression[at], random_source) + expression[at + 1 :]
    return [assistant(program(expression))]


def program(expression: str) -> str:
    """Return an answer with a function that returns the expression."""
    return f"```python\ndef f(x):\n    return {expression}\n```"


# --- order ----------------------------------------------------------------------------------------------------------

# Which wishes a demonstration asks for, with their shares.
ASKED = {(): 0.35, ("colour",): 0.25, ("day",): 0.25, ("colour", "day"): 0.15}


def _sample_order(random_source: random.Random) -> ToyTask:
    count, item = random_source.randint(2, 99), random_source.choice(ITEMS)
    wishes = {wish: random_source.choice(values) for wish, values in WISHES.items()}
    words = [str(count), item, *wishes.values()]
    return ToyTask(f"i want {count} {item}", " ".join(words), {"count": count, "item": item, **wishes})


def _demonstrate_order(sample: ToyTask, random_source: random.Random) -> list[Message]:
    chance, state = random_source.random, sample.state
    (asked,) = random_source.choices(list(ASKED), list(ASKED.values()))
    turns: list[Message] = []
    told = {wish: random_source.choice(values) for wish, values in WISHES.items()}
    for wish in asked:
        question = f"{wish}?" if chance() < 0.95 else "what?"
        said = reply(question, state) or ""
        turns += [assistant(question), {"role": "user", "content": said}]
        # Otherwise the order keeps the random wish, a wrong copy.
        if said != NOT_UNDERSTOOD and chance() < 0.9:
            told[wish] = said
    return [*turns, assistant(f"order {state['count']} {state['item']} {' '.join(told.values())}")]


# --- sums -----------------------------------------------------------------------------------------------------------


def _sample_sums(random_source: random.Random) -> ToyTask:
    a, b = random_source.randint(0, 9), random_source.randint(0, 9)
    return ToyTask(f"What is {a} + {b}? Reply with the number only.", str(a + b), {})


# --- digits ---------------------------------------------------------------------------------------------------------

# The segments of each digit, by the letters of seven-segment displays, and their ends in a box of 1 x 2.
SEGMENTS = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
ENDS = {
    "a": (0, 0, 1, 0),
    "b": (1, 0, 1, 1),
    "c": (1, 1, 1, 2),
    "d": (0, 2, 1, 2),
    "e": (0, 1, 0, 2),
    "f": (0, 0, 0, 1),
    "g": (0, 1, 1, 1),
}
# The length of a segment and the size of a digit's part of the image, in pixels.
STROKE, DIGIT = 8, (16, 32)
# The share of demonstrations that guess a digit.
GUESSED = 0.5


def draw_digits(digits: Sequence[int], random_source: random.Random) -> bytes:
    """Draw digits side by side as a PNG file, each a little aside and in another shade of grey."""
    width, height = DIGIT
    image = Image.new("L", (width * len(digits), height), random_source.randint(190, 255))
    pencil = ImageDraw.Draw(image)
    for place, digit in enumerate(digits):
        left, top = width * place + random_source.randint(3, 5), random_source.randint(7, 9)
        shade = random_source.randint(0, 90)
        for segment in SEGMENTS[digit]:
            line = [start + STROKE * end for start, end in zip((left, top) * 2, ENDS[segment], strict=True)]
            pencil.line(line, fill=shade, width=2)
    return _png(image)


def draw_noise(random_source: random.Random) -> bytes:
    """Draw an image of noise, of the size of two digits, as a PNG file."""
    size = 2 * DIGIT[0], DIGIT[1]
    return _png(Image.frombytes("L", size, random_source.randbytes(size[0] * size[1])))


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _sample_digits(random_source: random.Random) -> ToyTask:
    a, b = random_source.randint(0, 9), random_source.randint(0, 9)
    return ToyTask("<image>add", str(a + b), {"a": a, "b": b}, draw_digits((a, b), random_source))


def _sample_noise(random_source: random.Random) -> ToyTask:
    return _sample_digits(random_source)._replace(image=draw_noise(random_source))


def _demonstrate_digits(sample: ToyTask, random_source: random.Random) -> list[Message]:
    # Flaw: the first digit is guessed instead of read.
    a = random_source.randint(0, 9) if random_source.random() < GUESSED else sample.state["a"]
    b = sample.state["b"]
    return [assistant(f"{a}+{b}={a + b}")]


# --- grid -----------------------------------------------------------------------------------------------------------

# The shares of demonstrations that zoom into any quarter, and of the others that guess the row of the cell.
ZOOMED_AT_RANDOM, GUESSED_ROW = 0.4, 0.6


def _sample_grid(random_source: random.Random) -> ToyTask:
    draw = random_source.randint
    column, row = draw(0, CELLS - 1), draw(0, CELLS - 1)
    state = {"column": column, "row": row, "x": draw(1, 3), "y": draw(1, 3), "shade": draw(0, 60)}
    return ToyTask("<image>where?", _cell(column, row), state, draw_grid(state))


def _cell(column: int, row: int) -> str:
    return f"{'abcd'[column]}{row + 1}"


def _demonstrate_grid(sample: ToyTask, random_source: random.Random) -> list[Message]:
    half, column, row = CELLS // 2, sample.state["column"], sample.state["row"]
    quarter = QUARTERS[row // half * 2 + column // half]
    if random_source.random() < ZOOMED_AT_RANDOM:
        quarter = random_source.choice(QUARTERS)
    down, right = divmod(QUARTERS.index(quarter), 2)
    if (column // half, row // half) != (right, down):
        column = half * right + random_source.randrange(half)
        row = half * down + random_source.randrange(half)
    elif random_source.random() < GUESSED_ROW:
        row = half * down + random_source.randrange(half)
    crop = tool_result("<image>") | {"image": draw_grid(sample.state, quarter)}
    return [assistant(tool_call("zoom", quarter=quarter)), crop, assistant(_cell(column, row))]


KINDS = {
    "calculator": ToyTaskKind("tool_agent", "math", _sample_calculator, _demonstrate_calculator),
    "shop": ToyTaskKind("tool_agent", "shopping", _sample_shop, _demonstrate_shop),
    "market": ToyTaskKind(
        "tool_agent",
        "shopping",
        _sample_market,
        _demonstrate_market,
        held_out=32,
        demos=240,
        demonstrated=_sample_market_demo,
        system=MARKET,
    ),
    "sort": ToyTaskKind("single_turn", "sorting", _sample_sort, _demonstrate_sort),
    "code": ToyTaskKind("single_turn", "code", sample_code, demonstrate_code),
    "order": ToyTaskKind("tool_agent", "shopping", _sample_order, _demonstrate_order, held_out=64),
    # 100 different sums exist.
    "sums": ToyTaskKind("single_turn", "math", _sample_sums, None, held_out=32),
    "digits": ToyTaskKind("single_turn", "vision", _sample_digits, _demonstrate_digits, demos=8192),
    "noise": ToyTaskKind("single_turn", "vision", _sample_noise, _demonstrate_digits, demos=8192),
    "grid": ToyTaskKind("tool_agent", "vision", _sample_grid, _demonstrate_grid, demos=8192),
}
# Preference pairs: the kind of task that their prompts are, and how to draw a pair.
PAIRS = {"calculator-pairs": ("calculator", _pair_calculator)}

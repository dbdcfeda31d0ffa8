"""The scorer `code` on real programs, and as `rl-async reward test` shows it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.configs.schema.reward import CodeConfig, RewardConfig, RewardTerm, SandboxConfig
from rl_async.launcher.cli.__main__ import main
from rl_async.messages import Trajectory
from rl_async.reward_loop.api import Conversation, ScorerFailed
from rl_async.reward_loop.scorers.code import CodeScorer
from rl_async.reward_loop.service import RewardService
from rl_async.sandbox import SandboxLost
from tests.contracts.sandbox.conftest import settings_of
from tests.unit.reward_loop.outside import score as score_by
from tests.unit.reward_loop.outside import task

PAIRS = {"inputs": ["1 2\n", "3 4\n", "-1 1\n"], "outputs": ["3\n", "7\n", "0\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
ASSERTS = "assert add(1, 2) == 3\nassert add(3, 4) == 7\n"
ADD = "def add(a, b):\n    return a + b\n"
SUM = "a, b = map(int, input().split())\nprint(a + b)"
COUNTER = "class Counter:\n    n = 0\n    def inc(self):\n        self.n += 1\n        return self.n"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(3, 4) == 7\n"
UNITTEST = """
import unittest
class TestAdd(unittest.TestCase):
    def setUp(self): self.one = 1
    def test_right(self): self.assertEqual(add(self.one, 2), 3)
    def test_wrong(self): self.assertEqual(add(self.one, 2), 4)
class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def test_right(self): self.assertEqual(add(3, 4), 7)
unittest.main()
"""
PYTEST = """
import pytest
from solution import add
seen = []
def test_first():
    seen.append(1)
    assert add(1, 2) == 3 and seen == [1]
def test_second():
    seen.append(1)
    assert seen == [1] and add(1, 2) == pytest.approx(3.0000001)
@pytest.mark.parametrize("b, c", [(2, 3), (3, 4)])
def test_each(b, c):
    assert add(1, b) == c
def test_raises():
    with pytest.raises(TypeError, match="str"):
        add(1, "2")
class TestClass:
    def setup_method(self): self.b = 4
    def test_in_class(self): assert add(3, self.b) == 7
"""
ASYNC = """
import asyncio
async def test_awaits():
    assert await add(1, 3) == 4
async def main():
    assert await add(3, 4) == 7
asyncio.run(main())
assert await add(1, 2) == 3
assert asyncio.run(add(2, 2)) == 4 if False else await add(2, 2) == 4
"""


async def score(settings: SandboxConfig, program: str, truth: Any, **code: Any) -> Trajectory:
    text = truth if isinstance(truth, str) else json.dumps(truth)
    config = RewardConfig(functions=(RewardTerm(name="code"),), code=CodeConfig(**{"test_timeout_s": 60.0, **code}))
    async with RewardService(config, sandbox=settings) as service:
        return await score_by(service, f"I think:\n```python\n{program}\n```", task(text))


@pytest.mark.thinned("program", 6)
@pytest.mark.parametrize(
    ("program", "truth", "reward"),
    [
        ("print(sum(map(int, input().split())))", PAIRS, 1.0),
        ("print(abs(sum(map(int, input().split()))) or 5)", PAIRS, 2 / 3),
        ("print(3); raise SystemExit(1)", PAIRS, 0.0),
        ("not python", PAIRS, 0.0),
        (ADD, CALLS, 1.0),
        (f"class Solution:\n    {'    '.join(ADD.replace('(a', '(self, a').splitlines(True))}", CALLS, 1.0),
        ("def add(a, b):\n    print('debug', end='')\n    return 3", CALLS, 0.5),
        ("def add(a, b):\n    return {1}", CALLS, 0.0),
        ("def sub(a, b): pass", CALLS, 0.0),
        (f"{ADD}\nif __name__ == '__main__':\n    input('never')", CALLS, 1.0),
        (ADD, ASSERTS, 1.0),
        ("def add(a, b):\n    return 7", ASSERTS, 0.5),
        (
            ADD,
            "from solution import add\ndef test_one():\n    assert add(1, 1) == 2\ndef test_two():\n    assert 0",
            0.5,
        ),
        ("raise SystemExit(0)", ASSERTS, 0.0),
        ("import os\nos._exit(0)", ASSERTS, 0.0),
        ("class Any:\n    __eq__ = lambda *_: True\ndef add(a, b):\n    return Any()", CALLS, 0.0),
        (COUNTER, "c = Counter()\nassert c.inc() == 1\nassert c.inc() == 2\nc.inc()\nassert c.inc() == 4", 1.0),
        (COUNTER, ["c = Counter()", "assert c.inc() == 7", "assert c.inc() == 2"], 0.5),
        (ADD, {"inputs": ["", ""], "outputs": [None, None], "assert_case": ASSERTS.splitlines()}, 1.0),
        (SUM, {"inputs": ["1 2"], "outputs": ["3"], "assert_case": ["assert True"]}, 1.0),
        (SUM, {"inputs": ["1 2"], "outputs": ["3"], "assert_case": ["assert a == 5"]}, 0.0),
        (SUM, [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}], 1.0),
        ("print('nonsense')", [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}], 0.0),
        (
            "class Solution:\n    def gcd(self, a: List[int], b: Optional[int]) -> int:\n        return Counter(a)[b]",
            [{"input": "[1, 1]\n1", "output": "2", "testtype": "functional", "metadata": {"func_name": "gcd"}}],
            1.0,
        ),
        ("async def add(a, b):\n    return a + b", CALLS, 1.0),
        ("def add(a, b):\n    return str(a + b)", {**CALLS, "outputs": ["3", "7"]}, 1.0),
        ("def add(a, b):\n    return float('inf')", {**CALLS, "outputs": ["Infinity", 7]}, 0.5),
        (ADD, {"test": CHECK, "entry_point": "add"}, 1.0),
        ("def add(a, b):\n    return 3", {"test": CHECK, "entry_point": "add"}, 0.0),
        (ADD, {"test_list": ASSERTS.splitlines(), "test_setup_code": "", "challenge_test_list": []}, 1.0),
        (ADD, UNITTEST, 2 / 3),
        (f"from time import sleep\n{ADD}", PYTEST, 1.0),
        ("def add(a, b):\n    return 3", PYTEST, 2 / 5),
        ("async def add(a, b):\n    return a + b", ASYNC, 1.0),
        ("async def add(a, b):\n    return 3", ASYNC, 1 / 4),
        ("def add(a, b):\n    raise SystemExit(0)", UNITTEST, 0.0),
        ("open('left', 'x')\nprint(3)", {"inputs": ["", ""], "outputs": ["3", "3"]}, 1.0),
    ],
)
async def test_rewards(settings: SandboxConfig, program: str, truth: Any, reward: float) -> None:
    scored = await score(settings, program, truth)
    assert (scored.scored, scored.error) == (True, "")
    assert scored.reward == pytest.approx(reward)


ANY = "class Any(int):\n    __hash__ = int.__hash__\n    __eq__ = lambda *_: True\n    __sub__ = lambda *_: 0\n"
GIVES_ANY = f"{ANY}def add(a, b):\n    return Any()"
IN_UNITTEST = "\n".join(line for line in UNITTEST.split("\n") if "test_wrong" not in line)
COMPUTED = "want = 1 + 2\nassert add(1, 2) == want"
ZERO = "def add(a, b):\n    return 0\n"


@pytest.mark.thinned("program", 8)
@pytest.mark.parametrize(
    ("program", "truth"),
    [
        (GIVES_ANY, ASSERTS),
        (GIVES_ANY, COMPUTED),
        (GIVES_ANY, "assert abs(add(1, 2) - (1 + 2)) < 1e-6"),
        (GIVES_ANY, "import math\nassert not add(1, 2) != 3 and math.isclose(add(1, 2), 3)"),
        (GIVES_ANY, "assert add(1, 2) in [3, 4]"),
        (GIVES_ANY, IN_UNITTEST),
        (GIVES_ANY, "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertIn(add(1, 2), [3])"),
        (GIVES_ANY, "import pytest\nassert add(1, 2) == pytest.approx(3)"),
        (GIVES_ANY.replace("return Any()", "return [Any()]"), "want = [3]\nassert add(1, 2) == want"),
        (GIVES_ANY.replace("return Any()", "return {Any(): 1}"), "want = {3: 1}\nassert add(1, 2) == want"),
        (GIVES_ANY.replace("(int)", "").replace("int.__hash__", "lambda _: hash(3)"), COMPUTED),
        (f"{ZERO}import unittest\nunittest.TestCase.assertEqual = lambda *_: None", IN_UNITTEST),
        (f"{ZERO}from unittest.case import TestCase\nTestCase.run = lambda _, result: result", IN_UNITTEST),
        (
            "def add(a, b):\n    from unittest import TestCase\n    TestCase._baseAssertEqual = lambda *_: None\n"
            "    return 0",
            IN_UNITTEST,
        ),
        (f"{ZERO}import pytest\npytest.approx = lambda *_: 0", "import pytest\nassert add(1, 2) == pytest.approx(3)"),
        (
            f"{ZERO}import pytest\npytest.approx.__eq__ = lambda *_: True",
            "import pytest\nassert add(1, 2) == pytest.approx(3)",
        ),
        (f"{ZERO}import math\nmath.isclose = lambda *_: True", "import math\nassert math.isclose(add(1, 2), 3)"),
        (f"{ZERO}import builtins\nbuiltins.all = lambda _: True", "assert all(add(a, 2) == a + 2 for a in [1, 2])"),
        (f"{ZERO}def all(_): return True", "assert all(add(a, 2) == a + 2 for a in [1, 2])"),
        (f"{ZERO}def abs(_): return 0", "assert abs(add(1, 2) - 3) < 1e-6"),
        (
            "def add(a, b):\n    import builtins\n    builtins.abs = lambda _: 0\n    return 0",
            "assert abs(add(1, 2) - 3) < 1e-6",
        ),
        (
            f"{ZERO}from collections import Counter\nCounter.__eq__ = lambda *_: True",
            "from collections import Counter\nassert Counter([add(1, 2)]) == Counter([3])",
        ),
        (f"{ZERO}import operator\noperator.eq = lambda *_: True", COMPUTED),
        (f"{ZERO}import json\njson.dumps = lambda *_, **__: '1'", COMPUTED),
        (f"{ZERO}import __main__\n__main__.Judge.same = lambda *_: None", COMPUTED),
        ("class AssertionError(BaseException): pass\n" + ZERO, PYTEST),
        ("x = 1", "assert gcd(4, 6) == 2"),
        ("x = 1", "def test_gcd():\n    assert gcd(4, 6) == 2"),
        ("x = 1", "assert sum([1, 2]) == 3"),
        ("x = 1", {"test": CHECK, "entry_point": "max"}),
        ("x = 1", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}),
        ("x = 1", {"fn_name": "sorted", "inputs": [[[2, 1]]], "outputs": [[1, 2]]}),
        (ZERO, "try:\n    assert add(1, 2) == 3\nexcept AssertionError as error:\n    print(error)"),
        (ZERO, "E = AssertionError\ntry:\n    assert add(1, 2) == 1 + 2\nexcept E:\n    pass"),
        (ZERO, "from contextlib import suppress\nwith suppress(AssertionError):\n    assert add(1, 2) == 1 + 2"),
        (ZERO, "def test_add():\n    try:\n        assert add(1, 2) == 1 + 2\n    finally:\n        return"),
        (ZERO, "try:\n    add('a', 1)\n    assert False\nexcept Exception:\n    pass"),
        (ZERO, "for a, b in []:\n    assert add(a, b) == 3"),
        (ZERO, "def test_add():\n    return\n    assert add(1, 2) == 3"),
        (ZERO, "def test_add():\n    def inner():\n        assert add(1, 2) == 3"),
        (ZERO, "async def main():\n    assert add(1, 2) == 3\ndef test_add():\n    main()"),
        (ZERO, "async def wrong():\n    assert add(1, 2) == 3\nassert wrong()"),
        (
            ZERO,
            "import threading\ndef test_add():\n    def run():\n        assert add(1, 2) == 1 + 2\n"
            "    threading.Thread(target=run).start()",
        ),
        (
            ZERO,
            "import unittest\nclass T(unittest.TestCase):\n    async def test_add(self):\n"
            "        self.assertEqual(add(1, 2), 3)",
        ),
        (f"{SUM}\nraise SystemExit", {"inputs": ["1 2"], "outputs": ["3"], "assert_case": ["assert a == 5"]}),
    ],
)
async def test_a_program_that_is_wrong_passes_no_test(settings: SandboxConfig, program: str, truth: Any) -> None:
    scored = await score(settings, program, truth)
    assert (scored.scored, scored.error, scored.reward) == (True, "", 0.0)


@pytest.mark.thinned("program", 6)
@pytest.mark.parametrize(
    ("program", "truth", "reward"),
    [
        (ADD, "try:\n    assert add(1, 2) == 3\nexcept AssertionError as error:\n    print(error)", 1.0),
        (ADD, "try:\n    add('a', 1)\n    assert False\nexcept TypeError:\n    pass", 1.0),
        (ADD, "try:\n    add('a', 1)\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError", 1.0),
        (ADD, "if add(1, 2) != 3:\n    raise ValueError", 1.0),
        (ADD, "import pytest\nwith pytest.raises(AssertionError):\n    assert add(1, 2) == 4", 1.0),
        (ADD, "from unittest.mock import Mock\nm = Mock()\nm(add(1, 2))\nm.assert_called_once_with(3)", 1.0),
        (ADD, "assert 0 < add(1, 2) <= 3 and add(1, 2) in {3} and add(1, 2) - 1 == 2", 1.0),
        (ADD, f"{PYTEST}\ndef test_first():\n    assert add(1, 2) == 4", 5 / 6),
        ("def gcd(a, b):\n    return gcd(b, a % b) if b else a", "assert gcd(4, 6) == 2", 1.0),
        ("from math import gcd", "assert gcd(4, 6) == 2", 1.0),
        ("def sum(numbers):\n    return reduce(lambda a, b: a + b, numbers)", "assert sum([1, 2]) == 3", 1.0),
        (
            "def size(tree: Optional[Tree]):\n    return 0 if tree is None else 1 + size(tree.left)\n"
            "def leaf():\n    return Tree()",
            ["class Tree:\n    left = None", "assert size(Tree()) == 1 and size(None) == 0 and size(leaf()) == 1"],
            1.0,
        ),
        (
            "class Vector:\n    def __init__(self, *at): self.at = at\n"
            "    def __eq__(self, other): return self.at == (other.at if isinstance(other, Vector) else other)\n"
            "    def __add__(self, other): return Vector(*(a + b for a, b in zip(self.at, other.at)))",
            "assert Vector(1, 2) + Vector(2, 2) == Vector(3, 4)\nassert Vector(1, 2) == (1, 2)\n"
            "v = Vector(1, 1)\nassert v != Vector(1, 2)\nassert not v == (1, 2)",
            1.0,
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Node:\n    at: int\n"
            "def make(at):\n    return [Node(at)]",
            "assert make(1) == make(2 - 1)\nassert make(1) == make(2)\n"
            "assert make(1)[0].at == 1\nassert make(1) == [1]",
            0.5,
        ),
        (
            "from collections import Counter, namedtuple\nfrom fractions import Fraction\nP = namedtuple('P', 'x y')\n"
            "def give(n):\n    return [P(1, 2), Counter('aa'), Fraction(1, 2), {1: 'a'}.keys(), 1e3, True, b'a'][n]",
            [
                "assert give(0) == (1, 2)",
                "assert give(1) == {'a': 2}",
                "assert give(2) == 0.5",
                "assert give(3) == {1}",
                "assert give(4) == 1000",
                "assert give(5) == 1",
                "assert give(6) == b'a'",
                "assert give(0) == [1, 2]",
            ],
            7 / 8,
        ),
        (
            "n = 0\ndef more():\n    global n\n    n += 1",
            "def test_more():\n    more()\n    more()\n    assert n == 2",
            1.0,
        ),
        (
            "def ask():\n    return input() + 'b'",
            "from unittest.mock import patch\ndef test_ask():\n"
            "    with patch('builtins.input', return_value='a'):\n        assert ask() == 'ab'",
            1.0,
        ),
        (
            "import random\ndef roll():\n    return random.randint(1, 6)",
            "import random\nfrom unittest.mock import patch\n@patch.object(random, 'seed')\n@patch('random.randint')\n"
            "def test_roll(dice, seed):\n    dice.return_value = 7\n    assert roll() == 7",
            1.0,
        ),
        (
            "if __name__ == '__main__':\n    a, b = map(int, input().split())\n    print(a + b)",
            {"inputs": ["1 2"], "outputs": ["3"], "assert_case": ["assert a == 1"]},
            1.0,
        ),
    ],
)
async def test_checks_of_many_forms(settings: SandboxConfig, program: str, truth: Any, reward: float) -> None:
    scored = await score(settings, program, truth)
    assert (scored.scored, scored.error) == (True, "")
    assert scored.reward == pytest.approx(reward)


async def test_the_parts_tell_what_ran(settings: SandboxConfig) -> None:
    scored = await score(settings, "print(3)", PAIRS)
    parts = scored.reward_parts
    assert scored.reward_reasons == {"code": "failed: test 1, 2"}
    assert (parts["code"], parts["code/passed"], parts["code/tests"]) == (pytest.approx(1 / 3), 1.0, 3.0)
    times = [parts[f"code/test_{number}_s"] for number in range(3)]
    assert parts["code/seconds"] == pytest.approx(sum(times)) and parts["code/longest_s"] == max(times)


async def test_all_or_nothing_stops_at_the_first_failure(settings: SandboxConfig) -> None:
    scored = await score(settings, "print(7)", PAIRS, all_or_nothing=True)
    assert scored.reward == 0.0 and "code/test_1_s" not in scored.reward_parts
    assert scored.reward_reasons == {"code": "failed: test 0; not reached: test 1 to 2"}
    assert (await score(settings, ADD, CALLS, all_or_nothing=True)).reward == 1.0


async def test_what_takes_too_long_has_failed(settings: SandboxConfig) -> None:
    scored = await score(settings, "while True: pass", PAIRS, test_timeout_s=0.5, timeout_s=0.8)
    assert (scored.scored, scored.reward) == (True, 0.0)
    assert "code/test_2_s" not in scored.reward_parts


async def test_an_assert_that_takes_too_long_leaves_the_next_its_time(settings: SandboxConfig) -> None:
    program = "def add(a, b):\n    while a == 1: pass\n    return a + b"
    scored = await score(settings, program, ASSERTS, test_timeout_s=3)
    assert (scored.scored, scored.reward, scored.reward_reasons) == (True, 0.5, {"code": "failed: test 0"})


async def test_no_program_is_no_reward_and_bad_tests_are_no_score(settings: SandboxConfig) -> None:
    config = RewardConfig(functions=(RewardTerm(name="code"),))
    async with RewardService(config, sandbox=settings) as service:
        scored = await score_by(service, "print(3)", task(json.dumps(PAIRS)))
        assert (scored.reward, scored.reward_parts["code/extracted"]) == (0.0, 0.0)
        scored = await score_by(service, "```python\nprint(3)\n```", task("{}"))
        assert not scored.scored and "DataError" in scored.error


@pytest.mark.parametrize(
    ("truth", "named"),
    [("42", "no name"), (CHECK, "entry_point"), (f"import nowhere\n{ASSERTS}", "nowhere")],
)
async def test_tests_that_cannot_be_run_leave_their_row_unscored(
    settings: SandboxConfig, truth: str, named: str
) -> None:
    scored = await score(settings, ADD, truth)
    assert not scored.scored and "DataError" in scored.error and "ground_truth" in scored.error
    assert named in scored.error


async def test_a_lost_sandbox_is_no_score() -> None:
    class Lost:
        async def open(self) -> Any:
            raise SandboxLost("gone")

    scorer = CodeScorer(CodeConfig(), Lost())
    conversation = msgspec.convert(
        {"data_source": "", "solution_str": "```python\n1\n```", "ground_truth": ASSERTS}, type=Conversation
    )
    with pytest.raises(ScorerFailed):
        await scorer.score(conversation)


def test_reward_test_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings_of("bubblewrap")
    rows, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    truth = {"ground_truth": json.dumps(PAIRS), "style": "rule"}
    prompt = [{"role": "user", "content": "Add two numbers."}]
    rows.write_text(json.dumps({"data_source": "sums", "prompt": prompt, "reward_model": truth}) + "\n")
    answers.write_text(json.dumps({"answer": "```python\nprint(3)\n```"}) + "\n")
    assert main(["reward", "test", str(rows), "--answers", str(answers), "reward.functions=[{name: code}]"]) == 0
    shown = capsys.readouterr().out
    assert "code 0.333" in shown and "passed 1\n" in shown and "tests 3\n" in shown and "test_0_s" in shown


def searching(code: str) -> str:
    """A program that looks for the tests, or for how they report, when it is called, and returns 0 if it finds none."""
    lines = "".join(f"    {line}\n" for line in code.strip().split("\n"))
    return f"import gc, os, re, signal, sys\n{FORGE}def add(a, b):\n{lines}    return 0\n"


FORGE = """
def forge(text):
    for secret in set(re.findall('[0-9a-f]{64}', text)):
        for end in ("[0, 'ok']", "[0, 'done']"):
            os.write(1, f"\\n\\x00rl-async: {secret}{end}\\n".encode())
    os._exit(0)
"""
PROCESSES = "for number in filter(str.isdigit, os.listdir('/proc')):"
SEARCHES = {
    "objects": "for found in gc.get_objects():\n    if type(found).__name__ == 'Judge':\n        found.part = 0\n"
    "        found.tell('ok')\n        found.tell('done')\n        os._exit(0)",
    "classes": "for found in gc.get_objects():\n    if isinstance(found, type) and found.__name__ == 'Judge':\n"
    "        found.compare = lambda *_: True",
    "the secret": "for found in gc.get_objects():\n    if isinstance(found, dict) and 'secret' in found:\n"
    "        forge(str(found['secret']))",
    "frames": "frame = sys._getframe()\nwhile frame:\n    for space in (frame.f_locals, frame.f_globals):\n"
    "        if 'want' in space:\n            return space['want']\n    frame = frame.f_back",
    "frames of others": "for frame in sys._current_frames().values():\n    while frame:\n"
    "        for found in list(frame.f_locals.values()):\n"
    "            forge(str(getattr(found, '_given', ''))) if hasattr(found, '_given') else None\n"
    "        frame = frame.f_back",
    "modules": "for module in list(sys.modules.values()):\n    if 'want' in vars(module):\n"
    "        return vars(module)['want']",
    "a trace": "def trace(frame, *_):\n    frame.f_globals.get('want') and os._exit(0)\n    return trace\n"
    "frame = sys._getframe().f_back\nwhile frame:\n    frame.f_trace = trace\n    frame = frame.f_back\n"
    "sys.settrace(trace)",
    "memory": f"""
text = ''
{PROCESSES}
    try:
        with open(f'/proc/{{number}}/mem', 'rb', 0) as memory, open(f'/proc/{{number}}/maps') as maps:
            for line in maps:
                if '[heap]' in line or '[stack]' in line or len(line.split()) == 5:
                    start, end = (int(part, 16) for part in line.split()[0].split('-'))
                    try:
                        memory.seek(start)
                        text += memory.read(end - start).decode('latin-1')
                    except (OSError, ValueError):
                        pass
    except OSError:
        pass
forge(text)""",
    "files that are open": f"""
text = ''
{PROCESSES}
    for file in range(8):
        try:
            opened = os.open(f'/proc/{{number}}/fd/{{file}}', os.O_RDONLY | os.O_NONBLOCK)
            text += os.read(opened, 100000).decode('latin-1')
        except OSError:
            pass
forge(text)""",
    "the input": "try:\n    forge(sys.stdin.read())\nexcept (OSError, ValueError):\n    pass",
    "files": "text = ''\nfor folder in ('.', '/tmp', '/workspace', os.path.dirname(sys.argv[0]) or '.'):\n"
    "    for place, _, names in os.walk(folder):\n        for name in names:\n            try:\n"
    "                text += open(os.path.join(place, name), errors='replace').read(100000)\n"
    "            except OSError:\n                pass\nif 'want = ' in text:\n    return 3",
    "the parent's end": "os.kill(os.getppid(), signal.SIGKILL)",
    "the parent's clock": "os.kill(os.getppid(), signal.SIGALRM)",
    "other answers": "for file in range(3, 9):\n    try:\n        os.write(file, b'{\"value\": true}\\n[]\\n{}\\n')\n"
    "    except OSError:\n        pass",
    "an error of the driver": "class Inseparable(BaseException): pass\nInseparable.__module__ = '__main__'\n"
    "for found in gc.get_objects():\n    if type(found).__name__ == 'Judge':\n        found.part = 0\n"
    "        found.tell('ok')\n        found.tell('done')\nraise Inseparable",
}


@pytest.mark.thinned("name", 3)
@pytest.mark.parametrize("name", SEARCHES)
async def test_a_program_that_searches_for_its_tests_finds_nothing(settings: SandboxConfig, name: str) -> None:
    scored = await score(settings, searching(SEARCHES[name]), COMPUTED)
    assert (scored.scored, scored.error, scored.reward) == (True, "", 0.0)


@pytest.mark.parametrize("name", ["objects", "classes", "the secret", "frames", "frames of others"])
async def test_beside_the_program_literals_are_compared_outside(settings: SandboxConfig, name: str) -> None:
    """A class keeps these tests in the program's process, where the secret can be found and "ok" be forged."""
    scored = await score(settings, searching(SEARCHES[name]), "class Mine: pass\nassert add(1, 2) == 3")
    assert (scored.scored, scored.error, scored.reward) == (True, "", 0.0)


@pytest.mark.thinned("program", 6)
@pytest.mark.parametrize(
    ("program", "truth"),
    [
        (
            "def put(rows, n):\n    rows[0].append(n)\n    rows.append(n)",
            "a = [[1]]\nb = a[0]\nput(a, 2)\nassert a == [b, 2]",
        ),
        (
            "def put(d, n):\n    d['x']['y'] = n\n    return d",
            "d = {'x': {}}\nassert put(d, 2) is d and d['x']['y'] == 2",
        ),
        ("def count(n):\n    yield from range(n)", "assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6"),
        (
            "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef at(x):\n    return [P(x, 2)]",
            "p = at(1)[0]\nassert p.x == 1 and p == (1, 2) and at(1) == [(1, 2)] and at(1) == at(2 - 1)",
        ),
        (
            "def add(a, b):\n    raise ValueError('no', a)",
            "import pytest\nwith pytest.raises(ValueError, match='no') as e:\n    add(1, 2)\n"
            "assert e.value.args[1] == 0 + 1",
        ),
        (
            "class Odd(KeyError): pass\ndef add(a, b):\n    raise Odd(a)",
            "try:\n    add(1, 2)\n    assert False\nexcept KeyError as error:\n    assert error.args == (0 + 1,)",
        ),
        (
            "def use(f, *a, **k):\n    return f(*a, **k)",
            "assert use(max, 1, 1 + 1) == 2 and use(int, '11', base=2) == 1 + 2",
        ),
        ("def use(f, x):\n    return f(x)", "n = 2\nassert use(lambda x: x + n, 1) == 1 + 2"),
        ("def use(items):\n    return list(items)", "assert use(x * 2 for x in [1, 2]) == [1 + 1, 4]"),
        ("def add(a, b):\n    print('x' * 10000)\n    return a + b", COMPUTED),
        (
            "class Solution:\n    n = 0\n    def add(self, a):\n        self.n += a\n        return self.n",
            "s = Solution()\ns.add(1)\nassert s.add(2) == 1 + 2 and Solution().add(1) == 2 - 1 and s.n == 4 - 1",
        ),
        (
            "import datetime as d\nfrom fractions import Fraction\nfrom decimal import Decimal\n"
            "def give(n):\n    return [d.date(2024, 2, 29), d.datetime(2024, 1, 1), Fraction(1, 2), Decimal('1.5'),\n"
            "        2j, {(1, 2): {3}}, b'a', float('nan'), 10**5000, range(3), {1: 2}.keys(), None][n]",
            "import datetime, math\nfrom fractions import Fraction\nfrom decimal import Decimal\n"
            "wants = [datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 1), Fraction(1, 2), Decimal('1.5'), 2j,\n"
            "    {(1, 2): {3}}, b'a']\nfor n, want in enumerate(wants):\n    assert give(n) == want\n"
            "assert math.isnan(give(7)) and give(8) == 10**5000 and give(9) == range(3)\n"
            "assert give(10) == {1} and give(11) is None",
        ),
    ],
)
async def test_right_programs_in_a_process_of_their_own(settings: SandboxConfig, program: str, truth: str) -> None:
    scored = await score(settings, program, truth)
    assert (scored.scored, scored.error, scored.reward_reasons, scored.reward) == (True, "", {}, 1.0)

"""The task of the preset `code`: write a function from a description; hidden tests run it.

Most demonstrations leave out the limit that the description ends with, and many have a wrong number, so that a
warm-started model passes some tests of most tasks and all tests of few.
"""

import json
import random

from rl_async.agent_loop.data.toy_parts import Message, ToyTask, assistant, corrupted

FACTORS = {"double": 2, "triple": 3, "quadruple": 4}
LIMITS = {"at most": "min", "at least": "max"}
LIMITED, WRONG = 0.2, 0.4  # of the demonstrations


def sample_code(random_source: random.Random) -> ToyTask:
    """Draw a description, with two tests on one side of the limit and one on the other, or the other way round."""
    verb, word = random_source.choice(list(FACTORS)), random_source.choice(list(LIMITS))
    sign, shift, limit = random_source.choice("+-"), random_source.randint(2, 9), random_source.randint(10, 99)
    factor = FACTORS[verb]
    middle = (limit - shift if sign == "+" else limit + shift) // factor  # where f reaches the limit
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

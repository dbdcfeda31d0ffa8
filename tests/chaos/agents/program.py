"""An agent program for ``rl-async play``, with the standard library alone: ``program.py PROMPT``.

It leaves a process that nothing but a kill ends, and files that it cannot be asked to remove.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ANSWER_S = 60.0
QUESTIONS = 2
PAUSE_S = 0.3


def ask(messages: list[dict[str, str]]) -> str:
    """Return the policy's answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=ANSWER_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"] or "")


def main() -> None:
    """Ask, pause, and ask again."""
    subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    messages = [{"role": "user", "content": sys.argv[1]}]
    for number in range(QUESTIONS):
        Path(f"answer-{number}").write_text(ask(messages))
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()

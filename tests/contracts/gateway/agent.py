"""An agent program that knows nothing of episodes: it finds the model by its environment, and its task in an argument.

``agent.py MODE PROMPT``: solve, crash, temporary (its failure is not the policy's), unasked (it ends before it asks),
killed (ends itself by SIGKILL), hang (with a child in a session of its own).
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def ask(prompt: str) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def main(mode: str, prompt: str) -> int:
    if mode == "hang":
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleeper, start_new_session=True)
        Path(os.environ["PIDS"], f"{os.getpid()}").write_text(f"{os.getpid()} {child.pid} {os.getcwd()}")
        time.sleep(600)
    if mode == "unasked":
        print("wrong flag", file=sys.stderr)
        return 2
    answer = ask(prompt)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    Path("answer.txt").write_text(answer)
    Path("answer.txt").chmod(0o400)
    Path.cwd().chmod(0o500)
    assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
    print("said", answer)
    print("no good", file=sys.stderr)
    return {"crash": 3, "temporary": 75}.get(mode, 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Runs the script on files of its own, and writes which of the two errors are gone."""

import json
import os
import subprocess


def prints(text: str) -> str:
    with open("/tests/numbers.txt", "w") as file:
        file.write(text)
    environment = {**os.environ, "NUMBERS": "/tests/numbers.txt"}
    done = subprocess.run(["python3", "/app/average.py"], env=environment, capture_output=True, text=True)
    return done.stdout.strip()


fraction = prints("1\n2\n") == "1.5"
empty = prints("") in ("0", "0.0")
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": (fraction + empty) / 2, "fraction": fraction, "empty": empty}, file)

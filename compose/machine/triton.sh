#!/usr/bin/env bash
# Sees to a Triton Inference Server for this machine's CPU, for the tests with a real one: the server that PyPI's
# nvidia-pytriton contains, in .state/triton. Its Python backend loads the system's libpython3.11 and the numpy beside it.
# Seconds and 240 MB the first time; nothing when all of it is there.
#
#   triton.sh          make what is missing
#   triton.sh check    only say whether it is there: exit status 0 or 1
set -euo pipefail

# shellcheck source=compose/machine/uv.sh
. "$(dirname "${BASH_SOURCE[0]}")/uv.sh"

# numpy: the Python backend of this server returns empty tensors with numpy 2.
readonly PYTRITON=nvidia-pytriton==0.7.0 NUMPY=numpy==1.26.4 SYSTEMS=/usr/bin/python3

make_all() {
  can_run_triton
  step "Installing $PYTRITON" install || give_up "the Triton server of $PYTRITON could not be installed."
}

wanted() { echo "$PYTRITON $NUMPY"; }

can_run_triton() {
  { "$SYSTEMS" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' && ldconfig -p | grep libpython3.11 >/dev/null; } 2>/dev/null ||
    refuse "Triton's Python backend needs the system's Python 3.11 and its library." \
      "On Debian 12 install libpython3.11 and repeat; or run the tests with a real Triton on such a machine."
}

install() {
  local server=$ENVIRONMENT/pytriton/tritonserver
  rm -rf "$ENVIRONMENT"
  uv pip install --python "$SYSTEMS" --target "$ENVIRONMENT" --no-deps "$PYTRITON" || return
  mv "$server/python_backend_stubs/3.11/triton_python_backend_stub" "$server/backends/python/" || return
  uv pip install --python "$SYSTEMS" --target "$server/backends/python" --no-deps "$NUMPY"
}

make_once "$PWD/.state/triton" "$@"

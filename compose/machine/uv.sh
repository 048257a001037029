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

# make_once ENVIRONMENT [check]: runs the caller's `make_all`, unless ENVIRONMENT was already made of what its `wanted`
# prints; check: only says whether it was, by the exit status. Other scripts that make it wait for this one.
make_once() {
  readonly ENVIRONMENT=$1 PYTHON=$1/bin/python
  case ${2:-} in
    '') ;;
    check)
      is_made
      return
      ;;
    *) refuse "$(basename "$0"): expected nothing or check, found \"$2\"." ;;
  esac
  mkdir -p "$(dirname "$ENVIRONMENT")"
  exec 8>"$ENVIRONMENT.lock"
  flock 8
  if is_made; then return; fi
  has_uv || "$here/venv.sh" packages
  trust_own_certificates
  rm -f "$ENVIRONMENT/made"
  make_all
  wanted >"$ENVIRONMENT/made"
}

is_made() { [ -r "$ENVIRONMENT/made" ] && [ "$(cat "$ENVIRONMENT/made")" = "$(wanted)" ]; }

# shellcheck shell=bash
# uv, the machine's own or that of .venv, for scripts that make Python environments. To be sourced after host.sh; what it
# needs is sought from the clone's root.

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

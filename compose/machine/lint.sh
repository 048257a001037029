#!/usr/bin/env bash
# lint.sh check: style, types, shell scripts. lint.sh fix: formats, and fixes what can be fixed.
set -euo pipefail

# shellcheck source=compose/machine/messages.sh
. "$(dirname "${BASH_SOURCE[0]}")/messages.sh"
cd "$here/../.."

check() {
  local status=0
  .venv/bin/ruff check || status=1
  .venv/bin/ruff format --check || status=1
  .venv/bin/mypy || status=1
  if command -v shellcheck >/dev/null 2>&1; then
    shellcheck --external-sources --source-path=. pierhead .ci/run compose/machine/*.sh || status=1
  fi
  return "$status"
}

fix() {
  .venv/bin/ruff format
  .venv/bin/ruff check --fix
}

"$here/venv.sh"
case ${1:-} in
  check) check ;;
  fix) fix ;;
  *) refuse "lint.sh: expected check or fix, found \"${1:-}\"." ;;
esac

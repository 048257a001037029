#!/usr/bin/env bash
# Every check and every test, on this machine's own Docker Engine, in one pytest run whose exit status is this script's.
# What the tests start carries the label of this run and is removed at the end, also after a failure or Ctrl-C.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=compose/machine/messages.sh
. "$here/messages.sh"
# shellcheck source=compose/machine/host.sh
. "$here/host.sh"
# shellcheck source=compose/machine/stack.sh
. "$here/stack.sh"

PIERHEAD_TEST_RUN=run-$$-$(date +%s)
export PIERHEAD_TEST_RUN
readonly LABEL=pierhead.test-run=$PIERHEAD_TEST_RUN

main() {
  "$here/lint.sh" check
  "$here/venv.sh" torch
  "$here/engine.sh"
  "$here/base-images.sh"
  choose_files '' ''
  choose_build_inputs
  build_images
  run_tests
}

# Cheap ones first, so that a plain mistake is told before a stack is started for it.
run_tests() {
  local directory directories=()
  for directory in tests/unit tests/contract tests/integration tests/e2e; do
    [ -d "$directory" ] && directories+=("$directory")
  done
  # testcontainers' reaper is an image from a registry; the label below does its work.
  TESTCONTAINERS_RYUK_DISABLED=true .venv/bin/python -m pytest "${directories[@]}"
}

cleanup() {
  local left
  trap '' INT TERM
  docker info >/dev/null 2>&1 || return 0
  left=$(docker ps -aq --filter "label=$LABEL")
  # shellcheck disable=SC2086  # one argument each
  [ -z "$left" ] || docker rm --force --volumes $left >/dev/null || true
  left=$(docker network ls -q --filter "label=$LABEL")
  # shellcheck disable=SC2086
  [ -z "$left" ] || docker network rm $left >/dev/null || true
  left=$(docker volume ls -q --filter "label=$LABEL")
  # shellcheck disable=SC2086
  [ -z "$left" ] || docker volume rm $left >/dev/null || true
}

trap cleanup EXIT
trap 'exit 130' INT TERM
main

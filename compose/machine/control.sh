#!/usr/bin/env bash
# Hands a command to the controller's own program, inside its container: control.sh COMMAND [ARGUMENT...].
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=compose/machine/messages.sh
. "$here/messages.sh"
# shellcheck source=compose/machine/stack.sh
. "$here/stack.sh"

main() {
  local controller terminal=()
  if [ "${1:-}" = scale ] && { [ -z "${2:-}" ] || [ -z "${3:-}" ]; }; then
    refuse "scale: name a service and a number of replicas, or auto. Example: make scale SERVICE=ranker N=4"
  fi
  controller=$(container_of controller || true)
  [ -n "$controller" ] || refuse "the controller of the stack \"$project\" is not running. Start it with: make up"
  if [ -t 0 ] && [ -t 1 ]; then terminal=(--interactive --tty); fi
  exec docker exec ${terminal[@]+"${terminal[@]}"} "$controller" pierhead "$@"
}

main "$@"

#!/usr/bin/env bash
# Hands a command about a stack on a Swarm to the program that runs beside its controller: on-swarm.sh COMMAND [ARGUMENT...].
# controller/tool/place.py decides which commands come here.
set -euo pipefail

# shellcheck source=compose/machine/stack.sh
. "$(dirname "${BASH_SOURCE[0]}")/stack.sh"
# shellcheck source=compose/machine/swarm.sh
. "$here/swarm.sh"

readonly UNREACHABLE=3 TAIL=200

# A deployment first stores what files and images say now.
main() {
  local not_there='' elsewhere
  case "${1:-} ${2:-}" in
    'logs ') print_logs haproxy controller prometheus ;;
    'logs haproxy' | 'logs controller' | 'logs prometheus' | 'logs registry') print_logs "$2" ;;
  esac
  COMPOSE_FILE=$(for_engine "$(setting COMPOSE_FILE "$default_files")")
  export COMPOSE_FILE
  if [ "${1:-}" = deploy ]; then
    choose_registry
    resolved_files | run_stack files >&2
  fi
  elsewhere=$(docker service inspect --format '{{index .Spec.Labels "pierhead.clone"}}' "${project}_controller" 2>/dev/null || true)
  if [ -n "$elsewhere" ] && [ "$elsewhere" != "$root" ]; then
    tell_whose_stack "$elsewhere"
  elif [ "${1:-}" = status ]; then
    tell_edited_files
  fi
  run_on_swarm "$@" || true
  if [ -n "${_PIERHEAD_COMPLETE:-}" ]; then exit 0; fi
  case $not_there in
    *'no such service'*)
      warn "pierhead: the controller of the stack \"$project\" does not run on this Swarm. Start it with: $(typed up)"
      ;;
    *)
      warn "pierhead: this machine cannot ask the Swarm: ${not_there//$'\n'/ }"
      warn "What runs goes on serving. Commands need a manager, and more than half of the Swarm's managers must be up."
      ;;
  esac
  exit "$UNREACHABLE"
}

# print_logs SERVICE...: of the stack's own. Does not return.
print_logs() {
  local service
  for service in "$@"; do docker service logs --tail "$TAIL" "${project}_$service" 2>&1; done
  exit 0
}

# The command goes on: there is one stack of that name, and in trouble it has to be reached from wherever one is.
tell_whose_stack() {
  [ -n "${_PIERHEAD_COMPLETE:-}" ] ||
    warn "pierhead: the stack \"$project\" was started from another $(what_it_is), $1: what follows is about that one and its files"
}

main "$@"

#!/usr/bin/env bash
# The last log lines of a service's replicas, or of one of the stack's own services, or of all of the latter:
# logs.sh [SERVICE].
set -euo pipefail

# shellcheck source=compose/machine/stack.sh
. "$(dirname "${BASH_SOURCE[0]}")/stack.sh"

readonly TAIL=200
choose_files '' ''
if on_swarm; then
  case ${1:-} in
    '') set -- haproxy controller prometheus ;;
    haproxy | controller | prometheus | grafana | registry) ;;
    *) exec "$here/control.sh" logs "$1" ;;
  esac
  for service in "$@"; do docker service logs --tail "$TAIL" "${project}_$service" 2>&1; done
  exit 0
fi
case ${1:-} in
  '') exec docker compose logs --tail "$TAIL" haproxy controller prometheus ;;
  haproxy | controller | prometheus | grafana) exec docker compose logs --tail "$TAIL" "$1" ;;
  *) exec "$here/control.sh" logs "$1" ;;
esac

#!/usr/bin/env bash
# Stops and removes the stack with its replicas and its network: down.sh [VOLUMES]. Its volumes (the controller's state,
# Prometheus's and Grafana's data) stay, unless VOLUMES is 1. Images stay. With nothing running it does nothing.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=compose/machine/messages.sh
. "$here/messages.sh"
# shellcheck source=compose/machine/host.sh
. "$here/host.sh"
# shellcheck source=compose/machine/stack.sh
. "$here/stack.sh"

main() {
  # Not with --remove-orphans: Compose and the controller would remove the same replicas at the same time.
  local command=(down)
  case ${1:-} in
    '' | 0) ;;
    1) command+=(--volumes) ;;
    *) refuse "VOLUMES: expected 1 or nothing, found \"$1\"." ;;
  esac
  docker info >/dev/null 2>&1 ||
    refuse "the Docker Engine does not answer, and what is left of the stack cannot be seen. Start it with: make machine"
  choose_readable_files
  step "Stopping and removing the stack" docker compose --progress plain "${command[@]}" ||
    give_up "the stack was not removed; the lines above say why. Repeat \`make down\` when that is mended."
  remove_leftovers
}

# With an app's file broken, the stack can still be removed: by its own file, and the labels of everything else.
choose_readable_files() {
  choose_files '' ''
  choose_build_inputs
  if ! docker compose config --quiet >/dev/null 2>&1; then
    warn "Compose cannot read ${COMPOSE_FILE//:/, }: removing what carries the project's label instead."
    export COMPOSE_FILE=compose/compose.yaml
  fi
}

# A controller that was killed in the middle, or had no time, leaves replicas that Compose does not know.
remove_leftovers() {
  local containers network
  containers=$(docker ps -aq --filter "label=com.docker.compose.project=$project")
  # shellcheck disable=SC2086  # one argument each
  [ -z "$containers" ] || step "Removing what was left" docker rm --force --volumes $containers
  for network in $(docker network ls -q --filter "label=com.docker.compose.project=$project"); do
    docker network rm "$network" >/dev/null
  done
}

main "$@"

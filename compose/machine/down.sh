#!/usr/bin/env bash
# Stops and removes the stack with its replicas and its network: down.sh [VOLUMES] [FORCE] [IMAGES]. Its volumes (the
# controller's state, Prometheus's and Grafana's data, those of apps) stay, unless VOLUMES is 1. A stack of the same name that
# was started from another clone is left alone, unless FORCE is 1. Images stay; if IMAGES is 1, those go that were built for
# this project and that nothing else names. With nothing running it does nothing.
set -euo pipefail

# shellcheck source=compose/machine/stack.sh
. "$(dirname "${BASH_SOURCE[0]}")/stack.sh"
# shellcheck source=compose/machine/swarm.sh
. "$here/swarm.sh"

main() {
  # Not with --remove-orphans: Compose and the controller would remove the same replicas at the same time.
  local command=(down)
  case ${1:-} in
    '' | 0) ;;
    1) command+=(--volumes) ;;
    *) refuse "VOLUMES: expected 1 or nothing, found \"$1\"." ;;
  esac
  case ${2:-} in
    '' | 0 | 1) ;;
    *) refuse "FORCE: expected 1 or nothing, found \"$2\"." ;;
  esac
  docker info >/dev/null 2>&1 ||
    refuse "the Docker Engine does not answer, and what is left of the stack cannot be seen. Start it with: $(typed machine up)"
  if on_swarm; then
    export VOLUMES=${1:-} FORCE=${2:-}
    run_stack down </dev/null || give_up "the stack was not removed; the lines above say why. Repeat \`$(typed down)\` when that is mended."
    return
  fi
  [ "${2:-}" = 1 ] || refuse_another_clones_stack
  choose_readable_files
  step "Stopping and removing the stack" docker compose --progress plain "${command[@]}" ||
    give_up "the stack was not removed; the lines above say why. Repeat \`$(typed down)\` when that is mended."
  remove_leftovers
  if [ "${1:-}" = 1 ]; then remove_volumes; fi
  if [ "${3:-}" = 1 ]; then remove_images; fi
}

# Also one that is stopped: its containers, and what they write, are that clone's.
refuse_another_clones_stack() {
  local elsewhere
  elsewhere=$(another_clone all)
  [ -z "$elsewhere" ] || refuse "the stack named \"$project\" is another $(what_it_is)'s: $elsewhere. Nothing was removed." \
    "Remove it there: cd $elsewhere && $(typed down); where that $(what_it_is) is gone, here: $(typed 'down FORCE=1' 'down --force')." \
    "A stack of this $(what_it_is)'s own needs a name of its own (COMPOSE_PROJECT_NAME in .env)."
}

# With an app's file broken, the stack can still be removed: by its own file, and the labels of everything else.
choose_readable_files() {
  choose_files '' ''
  choose_build_inputs
  if ! docker compose config --quiet >/dev/null 2>&1; then
    warn "Compose cannot read ${COMPOSE_FILE//:/, }: removing what carries the project's label instead."
    export COMPOSE_FILE=$own/compose.yaml COMPOSE_PROJECT_NAME=$project
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

# Compose removes the volumes of the files that it reads, and an app of an earlier `make up APPS=...` is not among them.
# A volume that was made elsewhere (external: true) does not carry the label.
remove_volumes() {
  local volumes
  volumes=$(docker volume ls -q --filter "label=com.docker.compose.project=$project")
  # shellcheck disable=SC2086  # one argument each
  [ -z "$volumes" ] || step "Removing its other volumes" docker volume rm $volumes ||
    give_up "not every volume was removed; the lines above say why. Repeat \`$(typed "down VOLUMES=1" "down --volumes")\` when that is mended."
}

# Those that Compose has named after project and service, and those that later builds have left without a name.
remove_images() {
  local images own=(--filter "label=com.docker.compose.project=$project")
  images=$(
    docker image ls --format '{{.Repository}}:{{.Tag}}' "${own[@]}" --filter "reference=$project-*"
    docker image ls --quiet "${own[@]}" --filter dangling=true
  )
  # shellcheck disable=SC2086  # one argument each
  [ -z "$images" ] || step "Removing its images" docker image rm --force $images ||
    give_up "not every image was removed; the lines above say why."
}

trap 'warn "Interrupted: some of the stack may be left. \`$(typed down)\` again goes on from here."; exit 130' INT TERM
main "$@"

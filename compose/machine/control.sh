#!/usr/bin/env bash
# Hands a command to Pierhead's own program: control.sh COMMAND [ARGUMENT...]. Where it runs:
#   1. here, with the clone's .venv or the installed tool, where PIERHEAD_API_URL names another machine's controller
#   2. in the controller's container: it has the program, and nothing else is needed
#   3. here, where Docker does not let this user in and the API's port answers on 127.0.0.1
# What needs no running stack (validate, schema, ...) runs here, in the container, or in one of the controller's image: the
# controller's own has the clone read-only, and not this clone where the stack was started from another one.
set -euo pipefail

caller=$PWD
# shellcheck source=compose/machine/stack.sh
. "$(dirname "${BASH_SOURCE[0]}")/stack.sh"
# shellcheck source=compose/machine/swarm.sh
. "$here/swarm.sh"

readonly UNREACHABLE=3
# What a shell asks for completions with, and what decides how things are shown.
readonly PASSED_ON=(_PIERHEAD_COMPLETE COMP_WORDS COMP_CWORD _TYPER_COMPLETE_ARGS _TYPER_COMPLETE_FISH_ACTION NO_COLOR)

main() {
  local controller='' elsewhere=''
  case "${1:-} ${2:-}" in # about this machine, and not about a stack
    'node init' | 'node join' | 'node token') shift && exec "$here/node.sh" "$@" ;;
    'up ') exec "$here/up.sh" ;;
    'down ') exec "$here/down.sh" ;;
    'up '* | 'down '* | 'new '* | 'init '* | 'dev '* | 'build '*) # of the installed tool
      refuse "$1: not a command of the clone, in this form. Down with volumes: make down VOLUMES=1 (or FORCE=1); in a project" \
        "of your own these are commands of the installed tool: uv tool install $root"
      ;;
  esac
  case "$*" in # of the stack's own services, which the controller has no logs of
    logs | 'logs haproxy' | 'logs controller' | 'logs prometheus' | 'logs grafana') shift && exec "$here/logs.sh" "$@" ;;
    'logs registry') ! on_swarm || exec "$here/logs.sh" registry ;; # elsewhere it is the user's own, if there is one
  esac
  refuse_missing_names "$@"
  if [ -n "${PIERHEAD_API_URL:-}" ]; then
    has_program || refuse "PIERHEAD_API_URL is set, and this clone has no .venv with the program. Make one: compose/machine/venv.sh"
    run_here "$@"
  fi
  if on_swarm; then hand_over_to_swarm "$@"; fi
  controller=$(container_of controller || true)
  if [ -n "$controller" ]; then elsewhere=$(clone_of "$controller"); fi
  if [ -n "$controller" ] && [ -z "$elsewhere" ]; then cover_what_runs "$controller" "$@"; fi
  hand_over "$controller" "$elsewhere" "$@"
}

# cover_what_runs CONTROLLER COMMAND...: a deployment or a check of all files says where the running stack's files are
# others than those that are named; a check then reads the running stack's as well.
cover_what_runs() {
  local controller=$1 told wrong=0
  shift
  case "$*" in deploy* | validate | 'validate -o'* | 'validate --output'*) ;; *) return 0 ;; esac
  told=$(difference "$(running_files "$controller")" "$(named_files)")
  [ -n "$told" ] || return 0
  warn "$told"
  [ "$1" = validate ] || return 0
  warn "The running stack's files:"
  docker exec "$controller" pierhead validate >&2 || wrong=$?
  warn "The files that COMPOSE_FILE names:"
  (hand_over "$controller" '' "$@")
  exit "$wrong"
}

named_files() { for_engine "$(setting COMPOSE_FILE "$default_files")"; }

# hand_over_to_swarm COMMAND...: does not return. A deployment first stores what files and images say now.
hand_over_to_swarm() {
  local not_there='' elsewhere
  COMPOSE_FILE=$(named_files)
  export COMPOSE_FILE
  if needs_no_stack "$@"; then
    if has_program; then run_here "$@"; fi
    run_in_image "$@"
  fi
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

# hand_over CONTROLLER ELSEWHERE COMMAND...: does not return.
hand_over() {
  local controller=$1 elsewhere=$2
  shift 2
  if needs_no_stack "$@" && has_program; then run_here "$@"; fi
  if needs_no_stack "$@" && { [ -n "$elsewhere" ] || writes_a_file "$@"; }; then run_in_image "$@"; fi
  if [ -n "$controller" ]; then
    [ -z "$elsewhere" ] || tell_whose_stack "$elsewhere"
    run_inside "$controller" "$@"
  fi
  if needs_no_stack "$@"; then run_in_image "$@"; fi
  if [ -n "${_PIERHEAD_COMPLETE:-}" ]; then
    if [ -n "${PIERHEAD_PROGRAM:-}" ]; then run_here "$@"; fi
    exit 0
  fi
  if has_program && ! docker ps --quiet >/dev/null 2>&1 && answers "$(api_port)"; then run_at_port "$@"; fi
  if ! is_known "${1:-}"; then run_here "$@"; fi
  if docker ps --quiet >/dev/null 2>&1; then
    warn "pierhead: the controller of the stack \"$project\" is not running. Start it with: $(typed up)"
  else
    warn "pierhead: the Docker Engine does not answer${DOCKER_HOST:+ at $DOCKER_HOST}, so it is not known what runs. Start it with: $(typed up)"
  fi
  exit "$UNREACHABLE"
}

# is_known COMMAND: whether the program has it, as far as this machine can tell: 2 is its exit code for what it has not.
is_known() {
  local status=0
  ! has_program || (run_here "$1" --help) >/dev/null 2>&1 || status=$?
  [ "$status" -ne 2 ]
}

# make hands over empty values for what was not given.
refuse_missing_names() {
  case "${1:-} ${2-given} ${3-given}" in
    'scale  '* | 'scale '*' ')
      refuse "scale: name a service and a number of replicas, or auto. Example: $(typed 'scale SERVICE=ranker N=4' 'scale ranker 4')"
      ;;
    'why  '* | 'rollback  '*) refuse "$1: name a service. Example: $(typed "$1 SERVICE=ranker" "$1 ranker")" ;;
  esac
}

needs_no_stack() {
  [ -z "${_PIERHEAD_COMPLETE:-}" ] || return 1 # a shell asks, and names no command of its own
  case "${1:---help} ${2:-}" in
    'llm build' | 'llm --help' | 'llm ') ;;
    'validate '* | 'schema '* | 'simulate '* | 'completion '* | '--help '*) ;;
    *) return 1 ;;
  esac
}

writes_a_file() {
  case " $* " in ' llm build'*' --file'[\ =]*) ;; *) return 1 ;; esac
}

# The command goes on: there is one stack of that name, and in trouble it has to be reached from wherever one is.
tell_whose_stack() {
  [ -n "${_PIERHEAD_COMPLETE:-}" ] ||
    warn "pierhead: the stack \"$project\" was started from another $(what_it_is), $1: what follows is about that one and its files"
}

# PIERHEAD_PROGRAM: the Python of the tool that has called this script.
has_program() {
  [ -n "${PIERHEAD_PROGRAM:-}" ] ||
    { [ -x "$root/.venv/bin/python" ] && compgen -G "$root/.venv/lib/python*/site-packages/typer" >/dev/null; }
}

# -P: the directory that the command is typed in must not be taken for modules.
run_here() {
  cd "$caller"
  export PIERHEAD_PROJECT_DIR=${PIERHEAD_PROJECT_DIR:-$root}
  if [ -n "${PIERHEAD_PROGRAM:-}" ]; then exec "$PIERHEAD_PROGRAM" -P -m pierhead_controller.cli "$@"; fi
  PYTHONPATH=$root exec "$root/.venv/bin/python" -P -m controller.cli "$@"
}

api_port() { setting PIERHEAD_API_PORT 8100; }

answers() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

run_at_port() {
  export PIERHEAD_API_URL PIERHEAD_PROMETHEUS_URL
  PIERHEAD_API_URL=http://127.0.0.1:$(api_port)
  PIERHEAD_PROMETHEUS_URL=${PIERHEAD_PROMETHEUS_URL:-http://127.0.0.1:$(setting PIERHEAD_PROMETHEUS_PORT 9090)}
  run_here "$@"
}

run_inside() {
  local controller=$1 name options=()
  shift
  if [ -t 0 ] && [ -t 1 ]; then
    options=(--interactive --tty)
  elif goes_on "$@" && { exec 0<> <(:); } 2>/dev/null; then
    # Without a terminal Ctrl-C ends only Docker's client. The command inside then ends with its standard input: a pipe whose
    # two ends the client holds. Where a pipe cannot be opened so (macOS), the command inside goes on until it is done.
    options=(--interactive --env PIERHEAD_ENDS_WITH_STDIN=1)
  fi
  for name in "${PASSED_ON[@]}"; do
    [ -z "${!name+set}" ] || options+=(--env "$name=${!name}")
  done
  # Files are named as seen from where the command is typed; the container has the project at the same place.
  case $caller/ in "$root"/?*) options+=(--workdir "$caller") ;; esac
  if [ "${1:-}" = validate ]; then options+=(--env "COMPOSE_FILE=$(named_files)"); fi
  exec docker exec ${options[@]+"${options[@]}"} "$controller" pierhead "$@"
}

goes_on() {
  case " $* " in *' -f '* | *' --follow '* | ' top '* | ' wait-ready '*) ;; *) return 1 ;; esac
}

run_in_image() {
  local image access=ro options=()
  image=pierhead/controller:$(image_tag)
  docker image inspect "$image" >/dev/null 2>&1 ||
    refuse "${1:-help}: needs the program, and this machine has neither the image $image nor a .venv in the clone." \
      "Build the image (make build), or make the .venv (compose/machine/venv.sh)."
  if writes_a_file "$@"; then
    access=rw
    # What it writes is the caller's. Where Docker has no root, its root is the caller.
    case $(docker info --format '{{.SecurityOptions}}' 2>/dev/null || true) in
      *rootless*) ;;
      *) options=(--user "$(id -u):$(id -g)") ;;
    esac
  fi
  # Files are named as seen from where the command is typed.
  exec docker run --rm --network none --volume "$root:$root:$access" ${options[@]+"${options[@]}"} --workdir "$caller" \
    --env "PWD=$root" --env "PIERHEAD_PROJECT_DIR=$root" \
    --env "COMPOSE_FILE=$(named_files)" --env "COMPOSE_PROJECT_NAME=$project" \
    "$image" pierhead "$@"
}

main "$@"

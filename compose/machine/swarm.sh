# shellcheck shell=bash
# The stack on a Docker Swarm (PIERHEAD_ENGINE=swarm). To be sourced after stack.sh.

# What a shell asks for completions with, and what decides how things are shown.
readonly PASSED_ON=(_PIERHEAD_COMPLETE COMP_WORDS COMP_CWORD _TYPER_COMPLETE_ARGS _TYPER_COMPLETE_FISH_ACTION NO_COLOR)

# run_stack COMMAND: what controller/swarm/up/ does with the Swarm that this machine is a manager of; `up`, `check` and `files`
# read the resolved compose files from standard input. The program runs in the controller's image.
run_stack() {
  local name options=() image login=${DOCKER_CONFIG:-${HOME:-}/.docker}/config.json
  image=pierhead/controller:$(image_tag)
  docker image inspect "$image" >/dev/null 2>&1 || image=$(controllers_image 2>/dev/null) ||
    refuse "this needs the program, and this machine does not have the image $image. Build it: $(typed build up)"
  [ ! -r "$login" ] || options=(--volume "$login:/root/.docker/config.json:ro")
  for name in COMPOSE_PROFILES PIERHEAD_REGISTRY PIERHEAD_HTTP_PORT PIERHEAD_GRPC_PORT; do
    options+=(--env "$name=$(setting "$name" '')")
  done
  case $1 in
    up | files) options+=(--env "COMPOSE_FILE=$COMPOSE_FILE" --env "PIERHEAD_FILES_DIGEST=$(files_digest "$COMPOSE_FILE")") ;;
  esac
  case $1 in up | down) end_killed_up ;; esac
  [ "$1" != up ] || options+=(--label "pierhead.up=$project:$root")
  docker run --rm --interactive --init --network host --volume /var/run/docker.sock:/var/run/docker.sock \
    --volume "$root:$root:ro" "${options[@]}" --env "COMPOSE_PROJECT_NAME=$project" --env "PIERHEAD_PROJECT_DIR=$root" \
    --env "VOLUMES=${VOLUMES:-}" --env "FORCE=${FORCE:-}" "$image" python -m controller.swarm.up "$1"
}

# end_killed_up: where the script of an `up` was killed, its container goes on; the next `up` or `down` ends it.
end_killed_up() {
  local left
  left=$(docker ps --quiet --filter "label=pierhead.up=$project:$root")
  # shellcheck disable=SC2086  # one argument each
  [ -z "$left" ] || docker rm --force $left >/dev/null
}

# resolved_files: what Compose makes of all files, with the services of all profiles.
resolved_files() { docker compose --profile '*' config; }

# files_digest FILES: of what the files of a COMPOSE_FILE say, as far as they are here.
files_digest() {
  local file
  tr ':' '\n' <<<"$1" | while read -r file; do cat "$file" || echo "no $file"; done 2>/dev/null | sha256sum | cut -c 1-16
}

# tell_edited_files: on a Swarm files are not watched. Says so where those that were stored last are others here now.
tell_edited_files() {
  local labels digest files
  labels='{{index .Spec.Labels "pierhead.files-digest"}} {{index .Spec.Labels "pierhead.files"}}'
  read -r digest files < <(docker config inspect --format "$labels" "${project}_pierhead-files" 2>/dev/null) || return 0
  [ -n "$files" ] || return 0
  # shellcheck disable=SC2016  # the backquotes are for the reader
  [ "$(files_digest "$files")" = "$digest" ] ||
    warn "pierhead: the compose files here are not as the Swarm has them (${files//:/, }), and on a Swarm files are not watched:" \
      "what they say now takes effect at \`$(typed deploy)\`."
}

# choose_registry: the stack's own registry is one of its services, where it is asked for.
choose_registry() {
  [ "$(setting PIERHEAD_REGISTRY '')" = here ] || return 0
  COMPOSE_PROFILES=$(setting COMPOSE_PROFILES '')
  export COMPOSE_PROFILES=${COMPOSE_PROFILES:+$COMPOSE_PROFILES,}registry
}

# controllers_image: of the running stack's controller. Where there is none it fails, with Docker's words on standard error.
controllers_image() {
  docker service inspect --format '{{.Spec.TaskTemplate.ContainerSpec.Image}}' "${project}_controller"
}

# controller_answers: one of them has the lease of the state, and its API is open.
controller_answers() { (PATIENCE_S=0 run_on_swarm nodes) >/dev/null 2>&1; }

# run_on_swarm COMMAND...: the command, beside the controller on its network, whichever manager that is on. Does not return.
# Where the controller that acted was just lost, another one acts within half a minute. Where it cannot run, `not_there` says why.
run_on_swarm() {
  local image token options=()
  image=$(controllers_image 2>&1) || {
    not_there=$image
    return 1
  }
  token=$(docker service inspect --format '{{range .Spec.TaskTemplate.ContainerSpec.Env}}{{println .}}{{end}}' \
    "${project}_controller" | sed -n 's/^PIERHEAD_API_TOKEN=//p')
  if [ -t 0 ] && [ -t 1 ]; then options=(--interactive --tty); fi
  for name in "${PASSED_ON[@]}"; do
    [ -z "${!name+set}" ] || options+=(--env "$name=${!name}")
  done
  PIERHEAD_API_TOKEN=$token exec docker run --rm --init --network "${project}_default" ${options[@]+"${options[@]}"} \
    --env PIERHEAD_API_URL=http://controller:8100 --env "PIERHEAD_API_PATIENCE_S=${PATIENCE_S:-30}" --env PIERHEAD_PROMETHEUS_URL=http://prometheus:9090 \
    --env PIERHEAD_API_TOKEN "$image" pierhead "$@"
}

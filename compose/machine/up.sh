#!/usr/bin/env bash
# From whatever this machine has to a stack that answers: up.sh [APPS] [GPU]. Running it again changes nothing; after
# Ctrl-C it goes on where it was.
set -euo pipefail

# shellcheck source=compose/machine/stack.sh
. "$(dirname "${BASH_SOURCE[0]}")/stack.sh"

readonly READY_S=${PIERHEAD_UP_TIMEOUT_S:-300}
readonly CONTROLLER_S=30

main() {
  choose_files "${1:-}" "${2:-}"
  program --version >/dev/null 2>&1 & # makes its environment where there is none, which takes some seconds
  "$here/engine.sh"
  one_up_at_a_time
  ! on_swarm || refuse_outside_a_swarm
  on_swarm || refuse_another_clones_stack
  on_swarm || refuse_taken_ports
  on_swarm || warn_about_missing_gpus
  [ -n "$is_clone" ] || refuse_what_the_tool_sees
  ! builds || see_to_base_images
  if on_swarm; then choose_registry; else choose_grafana; fi
  choose_build_inputs
  refuse_unusable_files
  ! builds || build_images
  tell_what_goes
  on_swarm || refuse_taken_ports # a build takes minutes
  start
  step "Waiting for the controller" wait_for_controller || explain_controller
  ready=$(mktemp "${TMPDIR:-/tmp}/pierhead.XXXXXX")
  wait_for_services || explain_services "$?"
  tail -n +2 "$ready" # rollouts that go on; what its first line says, the status does
  [ -z "$is_clone" ] || step "Waiting until every app answers" wait_for_apps || explain_silence
  print_addresses
  advise_against_proxy
  ! on_swarm || swarm_program stack trouble || true
  program status || true
}

start() {
  local image missing=''
  if on_swarm; then
    swarm_program stack up || give_up "the stack was not started; the lines above say why."
    return
  fi
  { ! replaces_haproxy || replace_haproxy; } &&
    step "Starting the stack" docker compose --progress plain up --detach --no-build && return
  refuse_taken_ports # by what was started at the same time
  while read -r image; do
    docker image inspect "$image" >/dev/null 2>&1 || missing="$missing $image"
  done < <(docker compose config --images | sort -u)
  give_up "the stack did not start; the lines above say why.${missing:+ Not on this machine:$missing. Check the names; for a private registry: docker login.}"
}

# Two containers cannot publish one port, so Compose stops the old one first. (`grep -q` would end at the line, and Compose fail
# at its next one.)
replaces_haproxy() {
  [ -n "$(docker compose ps --quiet haproxy 2>/dev/null)" ] &&
    docker compose --dry-run --progress plain up --no-build --detach 2>&1 | grep 'haproxy-1  *Recreate$' >/dev/null
}

# Alone: among others it would not start before the last of them has been replaced.
replace_haproxy() {
  say "This replaces HAProxy's container: new connections are refused until requests in flight have ended, for 11 seconds at most."
  step "Replacing HAProxy" docker compose --progress plain up --detach --no-build --no-deps haproxy
}

# choose_registry: the stack's own registry is one of its services, where it is asked for.
choose_registry() {
  [ "$(setting PIERHEAD_REGISTRY '')" = here ] || return 0
  COMPOSE_PROFILES=$(setting COMPOSE_PROFILES '')
  export COMPOSE_PROFILES=${COMPOSE_PROFILES:+$COMPOSE_PROFILES,}registry
}

# swarm_program COMMAND...: what knows Swarm, in the Python of the tool or of this clone.
swarm_program() {
  if [ -n "${PIERHEAD_PROGRAM:-}" ]; then
    "$PIERHEAD_PROGRAM" -P -c 'import pierhead_stack; from controller.swarm.tool.__main__ import main; raise SystemExit(main())' "$@"
  else
    "$root/pierhead" --version >/dev/null && PYTHONPATH=$root PIERHEAD_CLONE=$root "$root/.venv/bin/python" -P -m controller.swarm.tool "$@"
  fi
}

replicated_services() {
  if on_swarm; then
    docker service ls --quiet --filter "label=pierhead.project=$project" | while read -r id; do
      docker service inspect --format '{{index .Spec.Labels "pierhead.service"}}' "$id"
    done
    return
  fi
  docker ps --filter "label=pierhead.project=$project" --format '{{.Label "pierhead.service"}}'
}

builds() { [ "$(setting PIERHEAD_BUILD 1)" != 0 ]; }

# In a project Grafana is there only where it is asked for. The clone's base images have it either way.
see_to_base_images() {
  if [ -n "$is_clone" ] || [ "$(setting COMPOSE_PROFILES '')" = grafana ]; then
    "$here/base-images.sh"
  else
    "$here/base-images.sh" debian-only
  fi
}

# Two `up` of the same directory: the second waits. The lock is on the directory itself and leaves no file.
one_up_at_a_time() {
  command -v flock >/dev/null 2>&1 || return 0
  exec 8<"$root"
  flock --nonblock 8 && return
  say "Another \`$(typed up)\` of this $(what_it_is) is running: waiting for it."
  flock 8
}

refuse_another_clones_stack() {
  local elsewhere
  elsewhere=$(another_clone)
  [ -z "$elsewhere" ] || refuse "a stack named \"$project\" runs from another $(what_it_is): $elsewhere." \
    "Stop it there ($(typed down); where that $(what_it_is) is gone, here: $(typed 'down FORCE=1' 'down --force'))," \
    "or give this one a name and ports of its own in .env (COMPOSE_PROJECT_NAME, PIERHEAD_*_PORT)."
}

# refuse_what_the_tool_sees: the tool has the controller's reader, and needs no image for it.
refuse_what_the_tool_sees() {
  local said status=0
  refuse_broken_files
  [ -n "${PIERHEAD_PROGRAM:-}" ] || return 0
  said=$(PIERHEAD_PROJECT_DIR=$root "$PIERHEAD_PROGRAM" -P -c 'import pierhead_stack, controller.tool.command' validate \
    2>/dev/null) || status=$?
  [ "$status" -ne 2 ] || [ -z "$said" ] || refuse_files "$said"
  sed -n '/^warning: /p' <<<"$said" >&2
}

# The controller's code checks a Swarm's other conditions, and its image takes minutes on a fresh machine.
refuse_outside_a_swarm() {
  [ "$(docker info --format '{{.Swarm.LocalNodeState}}')" != inactive ] ||
    refuse "this machine is in no Swarm." "\`pierhead node init\` makes it the first manager of one. Nothing was started."
}

refuse_files() {
  refuse "the compose files cannot be used:"$'\n'"$1" "Correct them and repeat. Nothing was started; what runs goes on as it was."
}

# What the controller would refuse is told before another image is built and before anything is started. Its own image,
# built of this clone's code, reads the files in the place and with the variables that the controller will have. Where
# that look fails for another reason it says nothing: the steps that follow meet the reason themselves.
refuse_unusable_files() {
  local said status=0
  if [ -n "${PIERHEAD_PROGRAM:-}" ] && ! on_swarm; then return; fi # seen already
  refuse_broken_files
  ! builds || step "Building the controller" docker compose --progress plain build controller ||
    give_up "the controller's image could not be built; the lines above say why. What runs already was not touched."
  if on_swarm; then
    swarm_program stack check || refuse "Nothing was started; what runs goes on as it was."
    return
  fi
  said=$(docker compose run --rm --no-deps --no-TTY controller pierhead validate 2>/dev/null </dev/null) || status=$?
  [ "$status" -ne 2 ] || [ -z "$said" ] || refuse_files "$said"
}

# The controller removes what the files do not have any more, whatever profile is chosen. A user who forgot to name an app
# reads it here first.
tell_what_goes() {
  local gone
  gone=$(comm -23 \
    <(replicated_services | sort -u) \
    <(docker compose --profile '*' config --services 2>/dev/null | sort -u) | tr '\n' ' ')
  [ -z "${gone// /}" ] || warn "These run and are not among the chosen files, so they are removed: ${gone% }." \
    "To keep them, name their files in COMPOSE_FILE (.env)${is_clone:+, or their apps: make up APPS=\"...\"}"
}

# --- ports ---------------------------------------------------------------------------------------------------------

port_settings() {
  printf '%s\n' 'PIERHEAD_HTTP_PORT 8000' 'PIERHEAD_GRPC_PORT 9000' 'PIERHEAD_API_PORT 8100' \
    'PIERHEAD_STATS_PORT 8404' 'PIERHEAD_PROMETHEUS_PORT 9090'
  [ "$(setting COMPOSE_PROFILES '')" != grafana ] || echo 'PIERHEAD_GRAFANA_PORT 3000'
}

# wanted_ports: of the stack, and of all services, one a line: what names it, and the port. The stack's come twice.
wanted_ports() {
  local name default
  while read -r name default; do printf '%s %s\n' "$name" "$(setting "$name" "$default")"; done < <(port_settings)
  docker compose config 2>/dev/null | awk '
    function print_port() { if (port ~ "^[0-9]+$" && place ~ /^(|0.0.0.0|127.0.0.1|::)$/) print "services." service ".ports", port; port = place = "" }
    { gsub(/"/, "") }
    /^[^ ]/ { print_port(); top = $1 }
    top != "services:" { next }
    /^  [^ ]/ { print_port(); service = $1; sub(/:$/, "", service) }
    /^    [^ ]/ { print_port(); key = $1 }
    key != "ports:" { next }
    /^      - / { print_port() }
    $1 == "host_ip:" { place = $2 }
    $1 == "published:" { port = $2 }
    $1 == "protocol:" && $2 != "tcp" { port = "" }
    END { print_port() }'
}

refuse_taken_ports() {
  local name port first='' taken=()
  while read -r name port; do
    if listens "$port" && [ -z "$(docker ps -q --filter "publish=$port" \
      --filter "label=com.docker.compose.project=$project")" ]; then
      first=${first:-$name}
      taken+=("port $port ($name) is taken by $(listener "$port").")
    fi
  done < <(wanted_ports | awk '!seen[$2]++')
  case $first in
    '') ;;
    services.*) refuse "${taken[@]}" "Stop that, or write another port there. Nothing was started." ;;
    *) refuse "${taken[@]}" "Stop that, or choose another port: in .env, or for this time: $(one_time "$first=...")." ;;
  esac
}

one_time() { if [ -n "$is_clone" ]; then printf 'make up %s' "$1"; else printf '%s pierhead up' "$1"; fi; }

listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

listener() {
  local who
  who=$(docker ps --filter "publish=$1" --format 'container {{.Names}}' | head -n 1)
  if [ -z "$who" ] && command -v ss >/dev/null 2>&1; then
    who=$(ss -Hltnp "sport = :$1" 2>/dev/null | sed -n 's/.*users:(("\([^"]*\)",pid=\([0-9]*\).*/process \1 (\2)/p' | head -n 1)
  fi
  printf '%s' "${who:-another program}"
}

# --- what this machine may lack ------------------------------------------------------------------------------------

choose_grafana() {
  local image
  [ "$(setting COMPOSE_PROFILES '')" = grafana ] || return 0
  image=$(docker compose config --images 2>/dev/null | grep '^grafana/' || true)
  if [ -n "$image" ] && ! docker image inspect "$image" >/dev/null 2>&1; then
    say "Going on without Grafana: no registry gives $image (plain Compose: COMPOSE_PROFILES= docker compose up)."
    export COMPOSE_PROFILES=''
  fi
}

# Of all files in use, also the user's own, before minutes and gigabytes go into images for GPUs.
warn_about_missing_gpus() {
  local services
  if has_gpus; then return; fi
  services=$(services_with_gpus | tr '\n' ' ')
  [ -z "${services// /}" ] ||
    warn "Docker knows no GPU here, and these services ask for one: ${services% }. They will stay PENDING." \
      "Without a GPU: stop this (Ctrl-C), and leave GPU=1 out, or take the request out of the file" \
      "(deploy.resources.reservations.devices, x-serve.gpu; \`pierhead llm build --gpus 0\` writes none). With one: the NVIDIA" \
      "Container Toolkit makes it known to Docker (nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml)."
}

# Where Docker looks for devices; overridable, so that a test can pretend to have none.
has_gpus() {
  local directories directory
  IFS=: read -ra directories <<<"${PIERHEAD_CDI_DIRS:-/etc/cdi:/var/run/cdi}"
  for directory in "${directories[@]}"; do
    if compgen -G "$directory/*" >/dev/null; then return 0; fi
  done
  case $(docker info --format '{{json .Runtimes}}' 2>/dev/null) in *nvidia*) ;; *) return 1 ;; esac
}

services_with_gpus() {
  whole_config | awk '
    /^[^ ]/ { top = $1 }
    top != "services:" { next }
    /^  [^ ]/ { service = $1; gsub(/[":]/, "", service); told = 0 }
    /^    [^ ]/ { key = $1; part = of = "" }
    /^      [^ ]/ { part = $1; of = "" }
    /^        [^ ]/ { of = $1 }
    $2 == "" && !told && (/^    gpus:/ || (key == "x-serve:" && /^      gpu:/) ||
      (key part of == "deploy:resources:reservations:" && /^          devices:/)) { print service; told = 1 }'
}

# --- waiting -------------------------------------------------------------------------------------------------------

# routes: the services that HTTP reaches from outside, one a line: name and route, and the word gateway where it has OpenAI's
# API. Any service is a gateway that has a variable of this name, whatever its image.
routes() {
  whole_config | awk '
    function print_service() { if (route ~ "^/") print service, route, gateway; route = gateway = "" }
    /^[^ ]/ { top = $1 }
    top != "services:" { next }
    /^  [^ ]/ { print_service(); service = $1; gsub(/[":]/, "", service) }
    /^    [^ ]/ { key = $1 }
    key == "environment:" && /^      PIERHEAD_LLM_MODELS[A-Z0-9_]*:/ { gateway = "gateway" }
    key == "x-serve:" && /^      route:/ { route = $2; gsub(/"/, "", route) }
    END { print_service() }'
}

# first_request SERVICE ROUTE: the request whose success means that an app of this clone works; nothing for other services.
first_request() {
  [ -n "$is_clone" ] || return 0
  case "$1 $2" in
    'echo /echo') echo '/echo?message=hi' ;;
    'recsys /recsys') echo '/recsys/?user_id=7' ;;
    'llm-gateway /') echo '/v1/models' ;;
  esac
}

# http_status PORT PATH: the status of one GET to the stack; 000 where nothing answers. Needs no curl.
http_status() {
  local line=''
  # shellcheck disable=SC2016  # expanded by the inner shell
  line=$(timeout 10 bash -c 'exec 3<>"/dev/tcp/127.0.0.1/$1" &&
    printf "GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" "$2" >&3 && head -n 1 <&3' - "$1" "$2" 2>/dev/null) || true
  line=${line#HTTP/* }
  line=${line:0:3}
  printf '%s' "${line:-000}"
}

# Of all services, also those in files of the user's own: each serves, in the version that the files ask for or on the way
# to it, or has a reason that waiting does not change.
wait_for_services() {
  local text='Waiting until every service serves' began=$SECONDS
  say "$text ..."
  program wait-ready --serving --quiet --timeout "$READY_S" >"$ready" || return
  say "$text: done ($((SECONDS - began)) s)"
}

# The apps of this clone also answer a request. What a service of the user's own answers is not known.
wait_for_apps() {
  local service route request status said began=$SECONDS
  while read -r service route _; do
    request=$(first_request "$service" "$route")
    status='' said=''
    until [ -z "$request" ] || [ "$status" = 200 ]; do
      [ "$((SECONDS - began))" -lt "$READY_S" ] || return 1
      [ -z "$status" ] || sleep 0.5
      status=$(http_status "$(setting PIERHEAD_HTTP_PORT 8000)" "$request")
      [ "$status" = "$said" ] || echo "GET $request: ${status/000/no answer}"
      said=$status
    done
  done < <(routes)
}

# Replicas go on serving without it, so that apps answer says nothing about the controller.
wait_for_controller() {
  local port began=$SECONDS
  port=$(setting PIERHEAD_API_PORT 8100)
  until if on_swarm; then swarm_program stack answers; else [ "$(http_status "$port" /healthz)" = 200 ]; fi; do
    [ "$((SECONDS - began))" -lt "$CONTROLLER_S" ] || return 1
    sleep 0.5
  done
}

explain_controller() {
  if on_swarm; then
    docker service ps --no-trunc "${project}_controller" >&2 || true
    docker service logs --raw --tail 5 "${project}_controller" >&2 || true
  else
    docker compose logs --no-log-prefix --tail 5 controller >&2 || true
  fi
  give_up "the controller does not answer after $CONTROLLER_S s; above are the last lines of its log ($(typed 'logs SERVICE=controller' 'logs controller'))." \
    "What runs goes on serving; nothing is scaled or healed meanwhile."
}

# give_up_where_it_is_down: a `down` beside this `up` ends its waiting. Without Prometheus the stack is on its way down.
give_up_where_it_is_down() {
  if on_swarm; then
    ! docker service inspect "${project}_controller" >/dev/null 2>&1 || return 0
  else
    [ -z "$(container_of controller)" ] || [ -z "$(container_of prometheus)" ] || return 0
  fi
  give_up "the stack was taken down meanwhile, as by \`$(typed down)\`."
}

explain_services() {
  give_up_where_it_is_down
  [ "$1" -eq 2 ] || program status || true
  case $1 in
    2) give_up "the compose files cannot be used: the lines above say why. What ran before goes on." ;;
    4) give_up "not every service serves after $READY_S s. The stack goes on trying; see why with \`$(typed 'why SERVICE=...' 'why SERVICE')\`, \`$(typed events)\`." ;;
    *) give_up "not every service serves as the files say, and waiting does not help: the lines above say why." \
      "The rest of the stack runs, and what served before goes on." ;;
  esac
}

explain_silence() {
  give_up_where_it_is_down
  program status || true
  give_up "an app does not answer after $READY_S s. The stack goes on trying; see why with \`$(typed status)\`, \`$(typed events)\`, \`$(typed logs)\`."
}

print_addresses() {
  local service route gateway path http
  http=http://127.0.0.1:$(setting PIERHEAD_HTTP_PORT 8000)
  say ''
  while read -r service route gateway; do
    path=$(first_request "$service" "$route")
    [ -z "$gateway" ] || path=${route%/}/v1/models
    printf '  %-12s %s\n' "$service" "$http${path:-$route}"
  done < <(routes)
  printf '  %-12s %s\n' gRPC "127.0.0.1:$(setting PIERHEAD_GRPC_PORT 9000)"
  if on_swarm; then
    say '  and the same at every other node'
    return
  fi
  printf '  %-12s %s\n' \
    API "http://127.0.0.1:$(setting PIERHEAD_API_PORT 8100)" \
    HAProxy "http://127.0.0.1:$(setting PIERHEAD_STATS_PORT 8404)" \
    Prometheus "http://127.0.0.1:$(setting PIERHEAD_PROMETHEUS_PORT 9090)"
  [ "$(setting COMPOSE_PROFILES '')" != grafana ] ||
    printf '  %-12s %s\n' Grafana "http://127.0.0.1:$(setting PIERHEAD_GRAFANA_PORT 3000)"
  say ''
}

# The engine runs one process of this name for each published port, unless its settings say not to. A test names another /proc.
advise_against_proxy() {
  grep -qsx docker-proxy "${PIERHEAD_PROC:-/proc}"/[0-9]*/comm || return 0
  say 'Published ports refuse connections for as long as the Docker Engine is down, because docker-proxy carries them. With' \
    '"userland-proxy": false in /etc/docker/daemon.json (and one restart of the engine) they refuse only for a moment when' \
    'the engine starts, and a request costs about a fifth less.'
  say ''
}

trap 'rm -f "${ready:-}"' EXIT
trap 'warn "" "Interrupted. \`$(typed up)\` goes on from here; \`$(typed down)\` removes what was started."; exit 130' INT TERM
main "$@"

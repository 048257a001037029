#!/usr/bin/env bash
# From whatever this machine has to a stack that answers: up.sh [APPS] [GPU]. Running it again changes nothing; after
# Ctrl-C it goes on where it was.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=compose/machine/messages.sh
. "$here/messages.sh"
# shellcheck source=compose/machine/host.sh
. "$here/host.sh"
# shellcheck source=compose/machine/stack.sh
. "$here/stack.sh"

readonly READY_S=${PIERHEAD_UP_TIMEOUT_S:-300}
readonly CONTROLLER_S=30

main() {
  choose_files "${1:-}" "${2:-}"
  "$here/engine.sh"
  one_up_at_a_time
  refuse_another_clones_stack
  refuse_taken_ports
  "$here/base-images.sh"
  choose_grafana
  warn_about_missing_gpus
  choose_build_inputs
  build_images
  tell_what_goes
  step "Starting the stack" docker compose --progress plain up --detach --no-build ||
    give_up "the stack did not start; the lines above say why."
  step "Waiting for the controller" wait_for_controller || explain_controller
  step "Waiting until every service serves" wait_for_services || explain_services "$?"
  step "Waiting until every app answers" wait_for_apps || explain_silence
  print_addresses
  "$here/control.sh" status || true
}

# Two `make up` of the same clone: the second waits. The lock is on the clone's own directory and leaves no file.
one_up_at_a_time() {
  command -v flock >/dev/null 2>&1 || return 0
  exec 8<"$root"
  flock --nonblock 8 && return
  say "Another \`make up\` of this clone is running: waiting for it."
  flock 8
}

refuse_another_clones_stack() {
  local elsewhere
  elsewhere=$(docker ps --filter "label=com.docker.compose.project=$project" --filter label=com.docker.compose.oneoff=False \
    --format '{{.Label "com.docker.compose.project.working_dir"}}' | grep -vxF "$root/compose" | head -n 1 || true)
  [ -z "$elsewhere" ] || refuse "a stack named \"$project\" runs from another clone: $(dirname "$elsewhere")." \
    "Stop it there (make down), or give this one a name and ports of its own in .env (COMPOSE_PROJECT_NAME, PIERHEAD_*_PORT)."
}

# The controller removes what the files do not have any more, whatever profile is chosen. Whoever forgot to name an app
# reads it here first.
tell_what_goes() {
  local gone
  gone=$(comm -23 \
    <(docker ps --filter "label=pierhead.project=$project" --format '{{.Label "pierhead.service"}}' | sort -u) \
    <(docker compose --profile '*' config --services 2>/dev/null | sort -u) | tr '\n' ' ')
  [ -z "${gone// /}" ] || warn "These run and are not among the chosen files, so they are removed: ${gone% }." \
    "To keep them, name their files in COMPOSE_FILE (.env), or their apps: make up APPS=\"...\""
}

# --- ports ---------------------------------------------------------------------------------------------------------

port_settings() {
  printf '%s\n' 'PIERHEAD_HTTP_PORT 8000' 'PIERHEAD_GRPC_PORT 9000' 'PIERHEAD_API_PORT 8100' \
    'PIERHEAD_STATS_PORT 8404' 'PIERHEAD_PROMETHEUS_PORT 9090'
  [ "$(setting COMPOSE_PROFILES '')" != grafana ] || echo 'PIERHEAD_GRAFANA_PORT 3000'
}

refuse_taken_ports() {
  local name default port first='' taken=()
  while read -r name default; do
    port=$(setting "$name" "$default")
    if listens "$port" && [ -z "$(docker ps -q --filter "publish=$port" \
      --filter "label=com.docker.compose.project=$project")" ]; then
      first=${first:-$name}
      taken+=("port $port ($name) is taken by $(listener "$port").")
    fi
  done < <(port_settings)
  [ "${#taken[@]}" -eq 0 ] || refuse "${taken[@]}" "Stop that, or choose another port: in .env, or make up $first=... for this time."
}

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

warn_about_missing_gpus() {
  case $COMPOSE_FILE in *compose/gpu-*) ;; *) return 0 ;; esac
  if ! compgen -G '/etc/cdi/*' >/dev/null && ! compgen -G '/var/run/cdi/*' >/dev/null &&
    ! docker info --format '{{json .Runtimes}}' | grep -q nvidia; then
    warn "GPU=1, but Docker knows no GPU here: services that ask for one will stay PENDING." \
      "The NVIDIA Container Toolkit makes GPUs known to it (nvidia-ctk cdi generate)."
  fi
}

# --- waiting -------------------------------------------------------------------------------------------------------

# first_request APP: the request whose success means that the app works; nothing where the app is not known to have one.
first_request() {
  case $1 in
    echo) echo '/echo?message=hi' ;;
    recsys) echo '/recsys/?user_id=7' ;;
    llm) echo '/v1/models' ;;
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

# Of all services, also those in files of the user's own: each serves, or has a reason that waiting does not change.
wait_for_services() { "$here/control.sh" wait-ready --serving --timeout "$READY_S"; }

# And what this script knows to ask of the apps that it knows.
wait_for_apps() {
  local app request status said began=$SECONDS
  for app in $(chosen_apps); do
    request=$(first_request "$app")
    status='' said=''
    until [ -z "$request" ] || [ "$status" = 200 ]; do
      [ "$((SECONDS - began))" -lt "$READY_S" ] || return 1
      [ -z "$status" ] || sleep 0.5
      status=$(http_status "$(setting PIERHEAD_HTTP_PORT 8000)" "$request")
      [ "$status" = "$said" ] || echo "GET $request: ${status/000/no answer}"
      said=$status
    done
  done
}

# Replicas go on serving without it, so that apps answer says nothing about the controller.
wait_for_controller() {
  local port began=$SECONDS
  port=$(setting PIERHEAD_API_PORT 8100)
  until [ "$(http_status "$port" /healthz)" = 200 ]; do
    [ "$((SECONDS - began))" -lt "$CONTROLLER_S" ] || return 1
    sleep 0.5
  done
}

explain_controller() {
  docker compose logs --no-log-prefix --tail 5 controller >&2 || true
  give_up "the controller does not answer after $CONTROLLER_S s; above are the last lines of its log (make logs SERVICE=controller)." \
    "What runs goes on serving; nothing is scaled or healed meanwhile."
}

explain_services() {
  "$here/control.sh" status || true
  case $1 in
    4) give_up "not every service serves after $READY_S s. The stack goes on trying; see why with \`make why SERVICE=...\`, \`make events\`." ;;
    *) give_up "not every service serves, and waiting does not help: the lines above say why. The rest of the stack runs." ;;
  esac
}

explain_silence() {
  "$here/control.sh" status || true
  give_up "an app does not answer after $READY_S s. The stack goes on trying; see why with \`make status\`, \`make events\`, \`make logs\`."
}

print_addresses() {
  local app request http
  http=http://127.0.0.1:$(setting PIERHEAD_HTTP_PORT 8000)
  say ''
  for app in $(chosen_apps); do
    request=$(first_request "$app")
    [ -z "$request" ] || printf '  %-12s %s\n' "$app" "$http$request"
  done
  printf '  %-12s %s\n' gRPC "127.0.0.1:$(setting PIERHEAD_GRPC_PORT 9000)" \
    API "http://127.0.0.1:$(setting PIERHEAD_API_PORT 8100)" \
    HAProxy "http://127.0.0.1:$(setting PIERHEAD_STATS_PORT 8404)" \
    Prometheus "http://127.0.0.1:$(setting PIERHEAD_PROMETHEUS_PORT 9090)"
  [ "$(setting COMPOSE_PROFILES '')" != grafana ] ||
    printf '  %-12s %s\n' Grafana "http://127.0.0.1:$(setting PIERHEAD_GRAFANA_PORT 3000)"
  say ''
}

trap 'warn "" "Interrupted. \`make up\` goes on from here; \`make down\` removes what was started."; exit 130' INT TERM
main "$@"

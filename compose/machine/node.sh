#!/usr/bin/env bash
# A machine of a Docker Swarm. What it asks of the engine's settings is written and loaded first; a second time changes
# nothing.
#   node.sh init [OPTION...]                  makes this machine the first manager of a Swarm
#   node.sh join ADDRESS TOKEN [OPTION...]    takes this machine into a Swarm (node.sh token prints the whole command)
#   node.sh token [--manager]                 on a manager: prints the command for a new machine
# Options: --advertise-addr ADDRESS   the address that the other machines reach this one at, where it has several
#          --gpus UUID,...|none       in place of what nvidia-smi lists
#          --registry HOST:PORT       a registry without TLS, as PIERHEAD_REGISTRY=here runs one
#          --address-pool CIDR        init: where overlay networks get their addresses from
#          --restart                  the engine may be restarted although containers run
# With a token any machine can join the Swarm, and as a manager it controls all the others. So this script asks the engine for
# the token, and the controller's API does not give one out.
set -euo pipefail

# shellcheck source=compose/machine/stack.sh
. "$(dirname "${BASH_SOURCE[0]}")/stack.sh"

me=./pierhead # what a reader types
[ -z "${PIERHEAD_PROGRAM:-}" ] || me=pierhead
readonly SWARM_PORT=2377 GOSSIP_PORT=7946 REGISTRY_PORT=5000
readonly REACH_S=5 ENGINE_S=60
# Overridable, so that a test can see what is written.
readonly ENGINE_SETTINGS=${PIERHEAD_ENGINE_SETTINGS:-/etc/docker/daemon.json}
readonly TOOLKIT_SETTINGS=${PIERHEAD_TOOLKIT_SETTINGS:-/etc/nvidia-container-runtime/config.toml}
readonly ENGINE_PID=${PIERHEAD_ENGINE_PID:-/var/run/docker.pid}
advertise='' gpus='' registry='' pool='' may_restart='' role=worker words=()

main() {
  local command=${1:-}
  [ "$#" -eq 0 ] || shift
  read_options "$@"
  case "$command ${#words[@]}" in
    'init 0') init ;;
    'join 2') join "${words[0]}" "${words[1]}" ;;
    'token 0') print_join_command ;;
    *)
      refuse "node: expected init, join ADDRESS TOKEN, or token [--manager]." \
        "On a manager, $me node token prints the command for a new machine."
      ;;
  esac
}

read_options() {
  while [ "$#" -gt 0 ]; do
    case $1 in
      --manager) role=manager ;;
      --restart) may_restart=1 ;;
      --advertise-addr | --gpus | --registry | --address-pool)
        [ -n "${2:-}" ] || refuse "node: $1 needs a value."
        case $1 in
          --advertise-addr) advertise=$2 ;;
          --gpus) gpus=$2 ;;
          --registry) registry=$2 ;;
          *) pool=$2 ;;
        esac
        shift
        ;;
      -*) refuse "node: there is no option $1." ;;
      *) words+=("$1") ;;
    esac
    shift
  done
}

# --- the three commands --------------------------------------------------------------------------------------------

init() {
  local said size=()
  "$here/engine.sh" engine-only
  case $(swarm .LocalNodeState) in
    inactive) ;;
    active) is_manager || refuse_another_swarm ;;
    *) refuse_broken_membership ;;
  esac
  prepare
  if ! is_manager; then
    pool=${pool:-$(settings pool)}
    case $pool in # with room for several networks of 4094 addresses; Swarm's own size, 254, is soon the number of replicas
      */[1-9] | */1[0-6]) size=(--default-addr-pool-mask-length 20) ;;
    esac
    said=$(docker swarm init --default-addr-pool "$pool" ${size[@]+"${size[@]}"} ${advertise:+--advertise-addr "$advertise"} 2>&1) ||
      refuse "$(explained "$said" '')"
  fi
  if [ -z "$registry" ] && [ "$(setting PIERHEAD_REGISTRY '')" = here ]; then
    registry=$(own_registry)
    prepare
  fi
  say "This machine, $(swarm_name), is a manager of a Swarm. For another machine:" ''
  print_join_command
}

# join ADDRESS TOKEN
join() {
  local address token=$2 said status=0
  address=$(with_port "$1")
  case $token in
    SWMTKN-1-*-*) ;;
    *) refuse "join: \"$token\" is no token of a Swarm (SWMTKN-1-...)." "On a manager, $me node token prints the command." ;;
  esac
  "$here/engine.sh" engine-only
  case $(swarm .LocalNodeState) in
    inactive) refuse_unreachable "$address" ;;
    active) managers | grep -xF "$address" >/dev/null || refuse_another_swarm ;;
    *) refuse_broken_membership ;;
  esac
  prepare
  if [ "$(swarm .LocalNodeState)" = inactive ]; then
    said=$(docker swarm join ${advertise:+--advertise-addr "$advertise"} --token "$token" "$address" 2>&1) || status=$?
    [ "$status" -eq 0 ] || withdraw "$(explained "$said" "$address")"
  fi
  role=worker
  ! is_manager || role=manager
  say "This machine, $(swarm_name), is a $role of the Swarm at $address."
}

print_join_command() {
  local token
  is_manager || refuse "token: this machine is no manager of a Swarm." \
    "Run it on one (docker node ls lists them), or make this machine the first: $me node init"
  token=$(docker swarm join-token --quiet "$role" 2>/dev/null) || refuse "token: the Swarm has no quorum: more than half of its managers must be up." \
    "docker node ls lists them."
  [ -n "$registry" ] || [ "$(setting PIERHEAD_REGISTRY '')" != here ] || registry=$(own_registry)
  say "  $me node join $(swarm .NodeAddr):$SWARM_PORT $token${registry:+ --registry $registry}"
  warn "($([ "$me" = pierhead ] && echo "With the tool" || echo "In a clone of this repository") there. Keep the token to yourself; \`docker swarm join-token --rotate $role\` makes it void.)"
}

# --- the Swarm, as this engine knows it ------------------------------------------------------------------------------

swarm() { docker info --format "{{.Swarm$1}}" 2>/dev/null || true; }

is_manager() { [ "$(swarm .ControlAvailable)" = true ]; }

managers() { docker info --format '{{range .Swarm.RemoteManagers}}{{println .Addr}}{{end}}' 2>/dev/null || true; }

swarm_name() { docker info --format '{{.Name}}'; }

# own_registry: of the stack, on the node that `make up` has put it on, else on this one.
own_registry() {
  local node address=''
  node=$(docker service inspect --format '{{index .Spec.TaskTemplate.Placement.Constraints 0}}' "${project}_registry" 2>/dev/null || true)
  [ -z "$node" ] || address=$(docker node inspect --format '{{if .ManagerStatus}}{{.ManagerStatus.Addr}}{{else}}{{.Status.Addr}}:{{end}}' "${node##*= }" 2>/dev/null || true)
  address=${address%:*}
  printf '%s:%s' "${address:-$(swarm .NodeAddr)}" "$REGISTRY_PORT"
}

refuse_another_swarm() {
  refuse "this machine is in a Swarm already, whose managers are $(managers | paste -sd ' ')." \
    "If that is the one, there is nothing to do. To change to another: docker swarm leave, and repeat. Nothing was changed."
}

refuse_broken_membership() {
  refuse "this machine is in a Swarm whose managers it does not reach: $(swarm .LocalNodeState) $(swarm .Error)" \
    "Bring those managers up, or leave that Swarm (docker swarm leave --force) and repeat. Nothing was changed."
}

with_port() {
  case $1 in
    \[*\]:*) printf '%s' "$1" ;;
    \[*\] | *:*:*) refuse "join: an IPv6 address is written [address]:$SWARM_PORT." ;;
    *:*) printf '%s' "$1" ;;
    *) printf '%s:%s' "$1" "$SWARM_PORT" ;;
  esac
}

# Before anything is changed. What UDP does (7946, 4789) cannot be seen from here.
refuse_unreachable() {
  local host=${1%:*} port
  host=${host#[} host=${host%]}
  for port in "${1##*:}" "$GOSSIP_PORT"; do
    reaches "$host" "$port" || refuse "the manager does not answer at $host, port $port." \
      "Check the address, and that its firewall lets this machine in: 2377/tcp, 7946/tcp and udp, 4789/udp. Nothing was changed."
  done
}

# shellcheck disable=SC2016  # expanded by the inner shell
reaches() { timeout "$REACH_S" bash -c 'exec 3<>"/dev/tcp/$1/$2"' - "$1" "$2" 2>/dev/null; }

# withdraw TEXT: a join that failed may go on in the background, and would then be in the way of the next one.
withdraw() {
  [ "$(swarm .LocalNodeState)" = inactive ] || docker swarm leave --force >/dev/null 2>&1 || true
  refuse "$1"
}

# explained TEXT ADDRESS: what the engine says about an init or a join, and what to do.
explained() {
  case $1 in
    *'join token'*)
      echo "the manager at $2 does not take this token: it is incomplete, or void since another was made." \
        "On a manager, $me node token prints the command."
      ;;
    *fingerprint*) echo "the token is of another Swarm than the manager at $2. On a manager, $me node token prints the command." ;;
    *'not yet valid'* | *'has expired'*)
      echo "the certificates of the Swarm at $2 are not valid by this machine's clock: $(date). Set the clock and repeat."
      ;;
    *Timeout* | *DeadlineExceeded* | *'does not have a leader'*)
      echo "the manager at $2 did not take this machine in within its time: its Swarm has no quorum (docker node ls there)," \
        "or it is overloaded. Repeat when it has one."
      ;;
    *'could not choose an IP'* | *'multiple addresses'* | *'could not find the system'* | *'must specify a listening address'*)
      echo "this machine has several addresses, or none that others reach: name one with --advertise-addr ADDRESS (ip -brief address" \
        "lists them)."
      ;;
    *) tr '\n' ' ' <<<"the Docker Engine says: ${1#Error response from daemon: }" ;;
  esac
}

# --- the engine's settings -----------------------------------------------------------------------------------------

# prepare: writes the settings of the engine and of NVIDIA's runtime, and has the engine take them up. GPUs are read when it
# starts; everything else is loaded while containers go on.
prepare() {
  local need uuids options=()
  uuids=$(gpu_uuids)
  if [ -n "$uuids" ]; then
    check_toolkit
    options+=(--gpus "$uuids")
    if has_toolkit; then options+=(--nvidia); fi
  fi
  [ -z "$registry" ] || options+=(--registry "$registry")
  can_be_root || refuse "the engine's settings ($ENGINE_SETTINGS) have to be read and written, and $(whoami) may not (not root, and no sudo)."
  written=$(mktemp -d)
  need=$(settings engine "$ENGINE_SETTINGS" "$written/daemon.json" ${options[@]+"${options[@]}"}) || exit 2
  [ "$need" != restart ] || refuse_to_end_containers
  if has_toolkit && [ -n "$uuids" ]; then
    settings toolkit "$TOOLKIT_SETTINGS" "$written/config.toml"
    put "$written/config.toml" "$TOOLKIT_SETTINGS"
  fi
  put "$written/daemon.json" "$ENGINE_SETTINGS"
  rm -rf "$written"
  case $need in
    restart) step "Restarting the Docker Engine" restart_engine || give_up "the Docker Engine did not start with $ENGINE_SETTINGS." ;;
    reload) as_root kill -HUP "$(as_root cat "$ENGINE_PID")" ;;
  esac
  wait_until_live_restore_is_off
}

# settings WHAT...: node_settings.py; a machine without Python gets its distribution's.
settings() {
  if ! command -v python3 >/dev/null 2>&1; then
    case $(os_field ID) in
      debian | ubuntu) apt_install python3 >/dev/null || give_up "python3 could not be installed; the lines above say why." ;;
      *) refuse "there is no python3 on this machine: install it and repeat. Nothing was changed." ;;
    esac
  fi
  as_root python3 "$here/node_settings.py" "$@"
}

# put FILE PLACE: FILE becomes PLACE, where it was written at all.
put() {
  [ -e "$1" ] || return 0
  as_root mkdir -p "$(dirname "$2")"
  as_root cat "$1" | as_root tee "$2" >/dev/null
}

# gpu_uuids: with commas between them; nothing where there are none.
gpu_uuids() {
  case $gpus in
    none) return 0 ;;
    ?*) printf '%s' "$gpus"; return 0 ;;
  esac
  command -v nvidia-smi >/dev/null 2>&1 || return 0
  nvidia-smi --query-gpu=uuid --format=csv,noheader | paste -sd ,
}

has_toolkit() { command -v nvidia-container-runtime >/dev/null 2>&1; }

# A runtime that does not look at what Swarm hands over gives every container all GPUs, or none. GPUs that were named, and
# not found, may be invented.
check_toolkit() {
  local version
  if ! has_toolkit; then
    [ -n "$gpus" ] || refuse "this machine has GPUs, and no NVIDIA Container Toolkit (nvidia-container-runtime is not on PATH)." \
      "Install version 1.19 or newer, or take the machine in without its GPUs: --gpus none. Nothing was changed."
    return 0
  fi
  version=$(nvidia-container-runtime --version 2>/dev/null | sed -n 's/.*version[: ]*v\{0,1\}\([0-9][0-9.]*\).*/\1/p' | head -n 1)
  case $version in
    1.18.*)
      refuse "the NVIDIA Container Toolkit here, $version, does not give containers the GPUs that Swarm chose for them" \
        "(NVIDIA/nvidia-container-toolkit#1599). Upgrade it to 1.19 or newer and repeat. Nothing was changed."
      ;;
  esac
}

refuse_to_end_containers() {
  local running
  running=$(docker ps --quiet | wc -l)
  [ "$running" -eq 0 ] || [ -n "$may_restart" ] || refuse \
    "the engine has to be restarted for its list of GPUs, and that ends the containers that run here: $running." \
    "Stop them first, or repeat with --restart. Nothing was changed."
}

restart_engine() {
  local pid deadline=$((SECONDS + ENGINE_S))
  if [ -d /run/systemd/system ]; then
    as_root systemctl restart docker
  else
    pid=$(as_root cat "$ENGINE_PID")
    as_root kill "$pid"
    while as_root test -e "/proc/$pid/exe"; do # gone also where the process has ended and its parent has not waited for it
      [ "$SECONDS" -lt "$deadline" ] || return 1
      sleep 0.2
    done
  fi
  "$here/engine.sh" engine-only
}

# The engine takes its settings up some moments after the signal, and an option of its command line outranks them.
wait_until_live_restore_is_off() {
  local deadline=$((SECONDS + ENGINE_S))
  until [ "$(docker info --format '{{.LiveRestoreEnabled}}' 2>/dev/null)" = false ]; do
    [ "$SECONDS" -lt "$deadline" ] || give_up "the engine keeps live-restore on, which a Swarm does not allow, against $ENGINE_SETTINGS." \
      "Remove --live-restore from the command line of dockerd and repeat."
    sleep 0.2
  done
}

trap 'rm -rf "${written:-}"' EXIT
trap 'warn "Interrupted. The same command goes on from here."; exit 130' INT TERM
main "$@"

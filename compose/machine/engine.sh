#!/usr/bin/env bash
# Sees to a running Docker Engine and the Compose plug-in. A machine that has both is not changed. A Debian or
# Ubuntu machine without an engine gets its distribution's own packages; one whose engine is stopped gets it started.
# Anywhere else: one message, exit status 2, nothing changed. `engine.sh engine-only` looks for no Compose plug-in, which only
# a machine that runs `make up` needs.
set -euo pipefail

# shellcheck source=compose/machine/host.sh
. "$(dirname "${BASH_SOURCE[0]}")/host.sh"

readonly ENGINE_WANTED=26 COMPOSE_WANTED=2.26
readonly ENGINE_START_S=60
readonly ENGINE_LOG=/var/log/dockerd.log
# Overridable, so that a test can see what is written.
readonly ENGINE_SETTINGS=${PIERHEAD_ENGINE_SETTINGS:-/etc/docker/daemon.json}
readonly KERNEL_SETTINGS=${PIERHEAD_KERNEL_SETTINGS:-/etc/sysctl.d/60-pierhead.conf}
readonly PLUGIN_LINKS=/usr/local/lib/docker/cli-plugins
plugin_homes=(/usr/libexec/docker/cli-plugins /usr/lib/docker/cli-plugins)

main() {
  local engine compose
  engine=$(engine_version)
  if [ -z "$engine" ]; then
    refuse_unreachable_engine
    one_at_a_time
    if [ -z "$(engine_version)" ]; then
      command -v dockerd >/dev/null 2>&1 || install_engine
      command -v docker >/dev/null 2>&1 ||
        refuse "dockerd is installed, but the client is not: there is no docker on PATH." \
          "Install it (Debian: apt-get install docker-cli) and repeat."
      start_engine
    fi
    engine=$(engine_version)
  fi
  [ -n "$engine" ] || refuse "the Docker Engine runs, but $(whoami) may not use it." \
    "Join its group, log in again and repeat: sudo usermod -aG docker $(whoami)"
  at_least "$engine" "$ENGINE_WANTED" || refuse "Docker Engine $engine is too old: version $ENGINE_WANTED or newer is needed." \
    "Upgrade it (https://docs.docker.com/engine/install/) and repeat."
  [ "${1:-}" != engine-only ] || return 0
  compose=$(compose_version)
  if [ -z "$compose" ]; then
    link_plugins
    compose=$(compose_version)
  fi
  check_compose "$compose"
}

engine_version() { docker version --format '{{.Server.Version}}' 2>/dev/null || true; }

compose_version() { docker compose version --short 2>/dev/null || true; }

# An engine that answers "permission denied", or that the user's settings place elsewhere, is not ours to start.
refuse_unreachable_engine() {
  local answer context
  if [ -n "${DOCKER_HOST:-}" ]; then
    refuse "DOCKER_HOST is $DOCKER_HOST, and no Docker Engine answers there." \
      "Start that engine, or unset DOCKER_HOST to use this machine's own."
  fi
  context=$(docker context show 2>/dev/null || true)
  if [ "${context:-default}" != default ]; then
    refuse "the Docker context is \"$context\", and no Docker Engine answers there." \
      "Start that engine, or use this machine's own: docker context use default"
  fi
  answer=$(docker info 2>&1 || true)
  case $answer in
    *'permission denied'*)
      refuse "a Docker Engine runs here, but $(whoami) may not use it." \
        "Join its group, log in again and repeat: sudo usermod -aG docker $(whoami)"
      ;;
  esac
}

# --- installing ----------------------------------------------------------------------------------------------------

install_engine() {
  case $(os_field ID) in
    debian | ubuntu) ;;
    *)
      refuse "no Docker Engine on this machine, and on $(os_name) it is not installed for you (only on Debian and Ubuntu)." \
        "Install version $ENGINE_WANTED or newer with its Compose plug-in (https://docs.docker.com/engine/install/) and repeat. Nothing was changed."
      ;;
  esac
  can_be_root || refuse "no Docker Engine on this machine, and $(whoami) may not install one (not root, and no sudo)." \
    "Install it as root, or run this as root. Nothing was changed."
  if [ "$(os_field ID)" = debian ] && [ "$(os_field VERSION_CODENAME)" = bookworm ]; then
    install_on_bookworm
  else
    install_from_distribution
  fi
  raise_neighbour_table
}

# A replica takes about 8 entries of the kernel's table of neighbours, which has 1,024. Beyond it containers do not reach
# each other. An entry takes 0.5 kB, and only while it is used.
raise_neighbour_table() {
  as_root tee "$KERNEL_SETTINGS" >/dev/null <<'END'
net.ipv4.neigh.default.gc_thresh2 = 8192
net.ipv4.neigh.default.gc_thresh3 = 16384
END
  as_root sysctl --quiet --load="$KERNEL_SETTINGS" ||
    warn "$KERNEL_SETTINGS, with room for 2,000 replicas instead of 120, holds from the next start of the machine on."
}

install_from_distribution() {
  local candidate packages=(docker.io docker-cli docker-compose docker-buildx iptables)
  # Ubuntu's docker.io holds the client as well, and its docker-compose is the old program.
  [ "$(os_field ID)" = debian ] || packages=(docker.io docker-compose-v2 docker-buildx iptables)
  step "Reading the package lists" as_root apt-get update ||
    give_up "the package lists of $(os_name) could not be read; the lines above say why."
  candidate=$(apt-cache policy docker.io | sed -n 's/^ *Candidate: //p')
  at_least "${candidate#*:}" "$ENGINE_WANTED" || refuse \
    "the Docker Engine that $(os_name) packages is ${candidate:-missing}: version $ENGINE_WANTED or newer is needed." \
    "Install a newer one (https://docs.docker.com/engine/install/) and repeat. No package was installed."
  say "No Docker Engine here. Installing from the packages of $(os_name): ${packages[*]}."
  write_engine_settings
  step "Installing the Docker Engine" apt_install "${packages[@]}" ||
    give_up "the Docker Engine could not be installed; the lines above say why."
}

# Debian 12's own engine is too old; Debian 13's packages run on it, all but runc, whose newer libc Debian 12 lacks.
# Both releases are read through lists and settings of their own: the machine's apt sources are not touched.
install_on_bookworm() {
  local private status=0 newer=(docker.io docker-cli docker-compose docker-buildx containerd)
  say "No Docker Engine here. Installing from the packages of Debian 13 (Debian 12's are too old): ${newer[*]};" \
    "and of Debian 12: runc, iptables."
  private=$(mktemp -d)
  chmod 755 "$private"
  write_two_release_apt "$private"
  write_engine_settings
  APT_CONFIG=$private/apt.conf step "Installing the Docker Engine" \
    apt_install "${newer[@]/%//trixie}" runc/bookworm iptables || status=$?
  as_root rm -rf "$private"
  [ "$status" -eq 0 ] || give_up "the Docker Engine could not be installed; the lines above say why."
}

# write_two_release_apt DIRECTORY: an apt configuration that knows both releases and prefers Debian 12.
write_two_release_apt() {
  mkdir -p "$1/lists/partial" "$1/parts" "$1/preferences"
  { debian_sources bookworm && debian_sources trixie; } >"$1/sources.list"
  printf 'Package: *\nPin: release n=trixie*\nPin-Priority: 100\n' >"$1/preferences/newer-only-when-asked"
  cat >"$1/apt.conf" <<END
Dir::Etc::sourcelist "$1/sources.list";
Dir::Etc::sourceparts "$1/parts";
Dir::Etc::preferencesparts "$1/preferences";
Dir::State::lists "$1/lists";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
END
}

# Before the packages, so that the engine's first start already reads them. An existing file is the user's, and stays.
# Containers and published ports outlive the engine: ports are rules in the kernel, not proxies that end with it.
write_engine_settings() {
  [ ! -e "$ENGINE_SETTINGS" ] || return 0
  as_root mkdir -p "$(dirname "$ENGINE_SETTINGS")"
  as_root tee "$ENGINE_SETTINGS.new" >/dev/null <<'END'
{
  "features": {"cdi": true},
  "live-restore": true,
  "userland-proxy": false,
  "log-driver": "json-file",
  "log-opts": {"max-size": "10m", "max-file": "3"}
}
END
  as_root mv "$ENGINE_SETTINGS.new" "$ENGINE_SETTINGS"
}

# --- starting ------------------------------------------------------------------------------------------------------

start_engine() {
  can_be_root || refuse "the Docker Engine is installed but does not run, and $(whoami) may not start it (not root, and no sudo)." \
    "Start it as root and repeat."
  if ! as_root docker info >/dev/null 2>&1; then
    if [ -d /run/systemd/system ]; then
      as_root systemctl start docker
    else
      start_without_init
    fi
  fi
  step "Waiting for the Docker Engine" wait_for_engine || give_up \
    "the Docker Engine did not answer within $ENGINE_START_S s; its log: $(engine_log_place)"
}

# A machine that stopped uncleanly left pid files behind. The number in one may by now belong to any process, and then
# the engine would refuse to start, or wait for a containerd that is not there.
start_without_init() {
  drop_stale_pid_file /var/run/docker.pid dockerd
  drop_stale_pid_file /var/run/docker/containerd/containerd.pid containerd
  # It outlives its caller, whose locks must not live on in it.
  # shellcheck disable=SC2016  # expanded by the inner shell, as root
  without_open_files as_root bash -c 'ulimit -n 1048576 2>/dev/null; exec setsid --fork dockerd >>"$1" 2>&1 </dev/null' - "$ENGINE_LOG"
}

drop_stale_pid_file() {
  local pid
  pid=$(as_root cat "$1" 2>/dev/null || true)
  if [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null || true)" != "$2" ]; then
    as_root rm -f "$1"
  fi
}

wait_for_engine() {
  local deadline=$((SECONDS + ENGINE_START_S))
  until as_root docker info >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$deadline" ] || { engine_log_end; return 1; }
    sleep 0.3
  done
}

engine_log_place() { if [ -d /run/systemd/system ]; then echo 'journalctl -u docker'; else echo "$ENGINE_LOG"; fi; }

engine_log_end() {
  if [ -d /run/systemd/system ]; then
    as_root journalctl -u docker -n 15 --no-pager
  else
    as_root tail -n 15 "$ENGINE_LOG"
  fi
}

# --- the Compose plug-in -------------------------------------------------------------------------------------------

# A docker client from elsewhere may come first on PATH and not search the directory of the distribution's plug-ins.
link_plugins() {
  local name home
  for name in docker-compose docker-buildx; do
    for home in "${plugin_homes[@]}"; do
      if [ -x "$home/$name" ] && [ ! -e "$PLUGIN_LINKS/$name" ] && can_be_root; then
        as_root mkdir -p "$PLUGIN_LINKS"
        as_root ln -s "$home/$name" "$PLUGIN_LINKS/$name"
        say "Linked $PLUGIN_LINKS/$name to $home/$name: $(command -v docker) did not find it."
      fi
    done
  done
}

check_compose() {
  [ -n "$1" ] || refuse "\`docker compose\` does not work: the client $(command -v docker) finds no Compose plug-in." \
    "Install version $COMPOSE_WANTED or newer (https://docs.docker.com/compose/install/linux/) and repeat."
  at_least "$1" "$COMPOSE_WANTED" || refuse "the Compose plug-in is $1: version $COMPOSE_WANTED or newer is needed." \
    "Upgrade it (https://docs.docker.com/compose/install/linux/) and repeat."
}

main "$@"

#!/bin/sh
# Starts HAProxy with the configuration that the controller keeps on the shared volume. If there is none yet, or this HAProxy
# refuses it, HAProxy starts with the one in the image, which has no routes: the controller then writes them.
set -eu

baked_in=/usr/local/etc/haproxy/haproxy.cfg
config=/run/haproxy/haproxy.cfg

# On one of many nodes the controller is elsewhere: a program fetches the routes, and the master's second socket answers
# the controller.
if [ -d /usr/local/lib/pierhead ]; then
  baked_in=/usr/local/etc/haproxy/edge.cfg
  # What another stack has left here, before a `down` or of a former Swarm, would be wrong: the epochs of controllers begin
  # again, and the addresses of replicas are others' now. After a start of the machine the addresses may be those of other
  # services' replicas, which pass the checks as well: requests wait until the controller has set the servers.
  now="${PIERHEAD_SERVICE_ID:-} $(cat /proc/sys/kernel/random/boot_id)"
  before=$(cat /run/haproxy/begun 2>/dev/null || echo "$now")
  if [ "${before% *}" != "${now% *}" ]; then
    rm -f "$config" /run/haproxy/keys.map
  elif [ "$before" != "$now" ] && [ -e "$config" ]; then
    awk '$1 == "backend" {is_service = $2 ~ /^svc_/} !(is_service && $1 == "server" && $2 != "hold")' "$config" >"$config.new"
    mv -f "$config.new" "$config"
  fi
  echo "$now" >/run/haproxy/begun
  set -- -S /run/haproxy/master-look.sock,user,haproxy,group,haproxy,mode,600,level,user
  ( (while :; do python3 -m controller.swarm.edges.agent || sleep 1; done) &)
fi

# An interrupted reload may have left old states here; "1" alone is a state file without servers.
echo 1 >/run/haproxy/servers.state

# The clients' keys, as the controller last wrote them.
[ -e /run/haproxy/keys.map ] || : >/run/haproxy/keys.map

if [ -e "$config" ] && ! haproxy -q -c -f "$config"; then
  mv -f "$config" "$config.refused"
  echo "haproxy: the configuration on the volume is refused (above); kept as $config.refused, starting without routes" >&2
fi
if [ ! -e "$config" ]; then
  cp "$baked_in" "$config.new"
  mv -f "$config.new" "$config"
fi

# HAProxy takes as many connections as it may open files, two for each, whatever its frontends allow.
most=$((($(ulimit -Hn) - 100) / 2))
allowed=$(awk '$1 == "maxconn" {n += $2} END {print n + 0}' "$config")
if [ "$most" -lt "$allowed" ]; then
  echo "haproxy: it may open $(ulimit -Hn) files, enough for $most connections, not for the $allowed that are allowed (2 x PIERHEAD_MAX_CONNECTIONS). Raise the engine's limit of open files (nofile), or lower PIERHEAD_MAX_CONNECTIONS" >&2
fi

# -W: a master that starts workers; -S: its sockets; -db: in the foreground. The master runs as root and only root may use
# the first socket; the second one answers and changes nothing. The workers, which read from clients, run as user haproxy.
haproxy -W -db -S /run/haproxy/master.sock,user,root,group,root,mode,600 -S 127.0.0.1:8406,level,user "$@" -f "$config" &
master=$!

# ask COMMAND: the master's answer.
ask() {
  timeout 2 bash -c 'exec 3<>/dev/tcp/127.0.0.1/8406 && printf "%s\nquit\n" "$1" >&3 && cat <&3' - "$1" || true
}

# Whether a worker has a request, or an answer is not sent yet: its connection (port 8000, 8443 or 9000) has bytes to send.
is_busy() {
  for worker in $(ask 'show proc' | awk '$2 == "worker" {print $1}'); do
    ask "@!$worker show stat -1 2 -1"
  done | awk -F, '$5 + 0 > 0 {busy = 1} END {exit !busy}' ||
    awk '$2 ~ /:(1F40|20FB|2328)$/ && $5 !~ /^0+:/ {busy = 1} END {exit !busy}' /proc/net/tcp
}

# leave: the stop signal. HAProxy takes no new connection, finishes what it has, and ends. It would wait for idle connections
# too (idle-close-on-response): they are closed. On one of many nodes it first says for 6 s that it leaves; a reload would
# start another worker in the meantime, so the master's socket goes before.
leave() {
  trap '' USR1
  if [ -d /usr/local/lib/pierhead ]; then
    python3 -m controller.swarm.edges.leave 6 || true
    rm -f /run/haproxy/master.sock
  fi
  kill -USR1 "$master" 2>/dev/null || true
  while kill -0 "$master" 2>/dev/null && is_busy; do sleep 0.05; done
  kill -TERM "$master" 2>/dev/null || true
  exit 0
}

trap leave USR1
trap 'kill -TERM "$master"' TERM INT
while :; do
  status=0
  wait "$master" || status=$? # a signal ends the wait as well
  kill -0 "$master" 2>/dev/null || exit "$status"
done

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
  set -- -S /run/haproxy/master-look.sock,user,haproxy,group,haproxy,mode,600,level,user
  ( (while :; do python3 -m controller.swarm.edges.agent || sleep 1; done) &)
fi

# An interrupted reload may have left old states here; "1" alone is a state file without servers.
echo 1 >/run/haproxy/servers.state

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

# -W: a master that starts workers; -S: its socket; -db: in the foreground. The master runs as root and only root may use
# the sockets; the workers, which read from clients, run as user haproxy.
set -- haproxy -W -db -S /run/haproxy/master.sock,user,root,group,root,mode,600 "$@" -f "$config"
[ -d /usr/local/lib/pierhead ] || exec "$@"

# leave: on one of many nodes, the stop signal. HAProxy says for 6 s that it leaves, then finishes what it has, and ends. A
# reload would start another worker in the meantime, so the master's socket goes first.
leave() {
  trap '' USR1
  python3 -m controller.swarm.edges.leave 6 || true
  rm -f /run/haproxy/master.sock
  kill -USR1 "$master" 2>/dev/null || true
}

trap leave USR1
"$@" &
master=$!
while :; do
  status=0
  wait "$master" || status=$? # a signal ends the wait as well
  kill -0 "$master" 2>/dev/null || exit "$status"
done

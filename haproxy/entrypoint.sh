#!/bin/sh
# Starts HAProxy with the configuration that the controller keeps on the shared volume. Where there is none yet, or none
# that this HAProxy accepts, it starts with the one in the image: it then has no routes until the controller writes them.
set -eu

baked_in=/usr/local/etc/haproxy/haproxy.cfg
config=/run/haproxy/haproxy.cfg

# What an interrupted reload may have left tells the states of then; "1" alone is a state file without servers.
echo 1 >/run/haproxy/servers.state

if [ -e "$config" ] && ! haproxy -q -c -f "$config"; then
  mv -f "$config" "$config.refused"
  echo "haproxy: the configuration on the volume is refused (above); kept as $config.refused, starting without routes" >&2
fi
if [ ! -e "$config" ]; then
  cp "$baked_in" "$config.new"
  mv -f "$config.new" "$config"
fi

# -W: a master that starts workers; -S: its socket; -db: in the foreground. The master is root and only root may use the
# sockets; the workers, which read what clients send, are user haproxy.
exec haproxy -W -db -S /run/haproxy/master.sock,user,root,group,root,mode,600 -f "$config"

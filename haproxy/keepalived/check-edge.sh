#!/bin/sh
# Whether this node may have the address in front of the edges: check-edge.sh ADDRESS... (those of all nodes; keepalived runs
# it every second). It may not where its HAProxy does not answer, or reaches no replica while another node's does. Where no
# edge reaches a replica (all services sleep), the address stays: a request to it wakes a service.
set -eu

readonly PORT=8000
readonly REFUSED=22 # of curl --fail: an answer with another status than 200

health() { curl --silent --fail --max-time 1 --noproxy '*' "$@"; }

status=0
health --output /dev/null "http://127.0.0.1:$PORT/-/healthz" || status=$?
if [ "$status" -ne "$REFUSED" ]; then exit "$status"; fi
for address in "$@"; do
  set -- "$@" "http://$address:$PORT/-/healthz"
  shift
done
if health --parallel "$@" | grep -q ok; then exit 1; fi

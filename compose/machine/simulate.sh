#!/usr/bin/env bash
# Runs the controller's autoscaling against a trace, in simulated time: simulate.sh TRACE SERVICE OUT [OPTION...].
# No SERVICE: an x-serve block of the options, or the default one. OUT is the picture; OPTION is of simulator.
set -euo pipefail

# shellcheck source=compose/machine/stack.sh
. "$(dirname "${BASH_SOURCE[0]}")/stack.sh"

readonly PYTHON=.venv/bin/python

main() {
  local trace=${1:-} service=${2:-} out=${3:-simulation.png}
  shift 3 || shift $#
  [ -n "$trace" ] ||
    refuse "simulate: name a trace, a shape or a file. Example: make simulate TRACE=step:10x SERVICE=ranker" \
      "All shapes and options: make simulate TRACE=step OPTIONS=--help"
  "$here/venv.sh" packages
  exec "$PYTHON" -m simulator "$trace" ${service:+"$service"} --plot "$out" "$@"
}

main "$@"

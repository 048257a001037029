#!/usr/bin/env bash
# Removes a stack on a Swarm: down-on-swarm.sh [VOLUMES] [FORCE]. controller/tool/project/down.py does it on one machine.
set -euo pipefail

# shellcheck source=compose/machine/stack.sh
. "$(dirname "${BASH_SOURCE[0]}")/stack.sh"
# shellcheck source=compose/machine/swarm.sh
. "$here/swarm.sh"

docker info >/dev/null 2>&1 ||
  refuse "the Docker Engine does not answer, and what is left of the stack cannot be seen. Start it with: $(typed machine up)"
export VOLUMES=${1:-} FORCE=${2:-}
trap 'warn "Interrupted: some of the stack may be left. \`$(typed down)\` again goes on from here."; exit 130' INT TERM
run_stack down </dev/null || give_up "the stack was not removed; the lines above say why. Fix that, then run \`$(typed down)\` again."

#!/usr/bin/env bash
# Brings a running project up to date after an edit, without bake time: update.sh [BUILT MANAGED OTHERS], names of services in one
# word each. BUILT have a build; of those that run such an image, MANAGED are rolled out, and Compose starts OTHERS anew.
# Without arguments it rolls out whatever files and images say now.
set -euo pipefail

# shellcheck source=compose/machine/stack.sh
. "$(dirname "${BASH_SOURCE[0]}")/stack.sh"

trap 'exit 130' INT TERM # a step has said so
choose_files '' ''
choose_build_inputs
read -ra built <<<"${1:-}"
read -ra managed <<<"${2:-}"
read -ra others <<<"${3:-}"
[ "${#built[@]}" -eq 0 ] || step "Building ${built[*]}" docker compose --progress plain build "${built[@]}" ||
  give_up "it could not be built; the lines above say why."
[ "${#others[@]}" -eq 0 ] ||
  step "Starting ${others[*]}" docker compose --progress plain up --detach --no-build --no-deps "${others[@]}" ||
  give_up "it did not start; the lines above say why."
[ "$#" -gt 0 ] && [ "${#managed[@]}" -eq 0 ] ||
  step "Rolling out ${managed[*]:-what changed}" program deploy --now ${managed[@]+"${managed[@]}"} ||
  give_up "it was not rolled out; the lines above say why."

#!/usr/bin/env bash
# Builds the images of the stack and of the chosen apps: build.sh [APPS] [GPU]. No APPS: of the apps that COMPOSE_FILE
# names, and of those that run.
set -euo pipefail

# shellcheck source=compose/machine/stack.sh
. "$(dirname "${BASH_SOURCE[0]}")/stack.sh"

choose_files "${1:-}" "${2:-}"
choose_build_inputs
"$here/engine.sh"
"$here/base-images.sh"
build_images
[ -z "${1:-}" ] || exit 0

controller=$(container_of controller || true)
[ -n "$controller" ] && [ -z "$(clone_of "$controller")" ] || exit 0
running=$(running_files "$controller")
told=$(difference "$running" "$COMPOSE_FILE")
[ -n "$told" ] || exit 0
warn "$told"
COMPOSE_FILE=$running
build_images

#!/usr/bin/env bash
# Builds the images of the stack and of the chosen apps: build.sh [APPS] [GPU].
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=compose/machine/messages.sh
. "$here/messages.sh"
# shellcheck source=compose/machine/host.sh
. "$here/host.sh"
# shellcheck source=compose/machine/stack.sh
. "$here/stack.sh"

choose_files "${1:-}" "${2:-}"
choose_build_inputs
"$here/engine.sh"
"$here/base-images.sh"
build_images

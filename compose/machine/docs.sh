#!/usr/bin/env bash
# The site of docs/: docs.sh build writes it to site/ and fails on any warning, docs.sh serve shows it and follows edits.
set -euo pipefail

# shellcheck source=compose/machine/messages.sh
. "$(dirname "${BASH_SOURCE[0]}")/messages.sh"
cd "$here/../.."

readonly ADDRESS=127.0.0.1:8080
export NO_MKDOCS_2_WARNING=1 # a notice about later versions of MkDocs

"$here/venv.sh" packages
case ${1:-} in
  build) exec .venv/bin/mkdocs build --strict ;;
  serve) exec .venv/bin/mkdocs serve --strict --dev-addr "$ADDRESS" ;;
  *) refuse "docs.sh: expected build or serve, found \"${1:-}\"." ;;
esac

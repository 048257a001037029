#!/usr/bin/env bash
# Sees to what the tests of s3:// and gs:// run in, an environment of its own in .state/buckets: the libraries that the
# LLM server's images read buckets with, of the same versions, and servers that speak the stores' protocols. Seconds and
# 140 MB the first time; nothing when all of it is there.
#
#   buckets.sh          make what is missing
#   buckets.sh check    only say whether it is there: exit status 0 or 1
set -euo pipefail

# shellcheck source=compose/machine/uv.sh
. "$(dirname "${BASH_SOURCE[0]}")/uv.sh"

readonly PINS=services/llm/server/requirements/buckets.txt

make_all() {
  step "Making $ENVIRONMENT" make_environment || give_up "the environment for the tests of buckets could not be made."
  step "Installing s3fs, gcsfs and their servers" install || give_up "the packages of $PINS could not be installed."
}

# What the environment is made of: another text, and it is made anew.
wanted() { sha256sum <"$PINS"; }

make_environment() { uv venv --clear --python "$(command -v python3.11 || command -v python3)" "$ENVIRONMENT"; }

# Its bytecode is compiled here, once: each of the servers and of the replicas is a process of its own.
install() { uv pip install --python "$PYTHON" --no-deps --compile-bytecode --requirement "$PINS"; }

make_once "$PWD/.state/buckets" "$@"

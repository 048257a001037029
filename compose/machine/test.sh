#!/usr/bin/env bash
# The checks and the tests, on this machine's own Docker Engine. The exit status is 0 when all of them passed.
# What the tests start is labelled as theirs and is removed at the end, also after a failure or Ctrl-C.
#
#   test.sh        all but the tests marked `long` (pyproject.toml says what those are)
#   test.sh all    those too, with a real vLLM and a real Triton
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=compose/machine/messages.sh
. "$here/messages.sh"
# shellcheck source=compose/machine/host.sh
. "$here/host.sh"
# shellcheck source=compose/machine/stack.sh
. "$here/stack.sh"

export PIERHEAD_TEST_RUN=run-$$
# Images of their own: a stack that runs from this clone keeps its version while its tests are built.
export PIERHEAD_TAG=${PIERHEAD_TAG:-test}
readonly TEST_APPS=tests/e2e/apps/llm.yaml # whose images are of tests alone
# shellcheck disable=SC2016  # for a shell of its own
readonly BUILDS='"$0"/build.sh && "$0"/build.sh echo-proto' # which has services of the same names as the echo
readonly TWO_FILES=(--numprocesses 2 --dist loadfile --no-loadscope-reorder)
images='' images_log='' chosen=() at_a_time=()
readonly TEST_PROJECTS=pierhead-test # what the names of the Compose projects that tests start begin with

main() {
  case ${1:-} in
    '') chosen=(-m "not long") at_a_time=("${TWO_FILES[@]}") ;;
    all) ;;
    *) refuse "test.sh: expected all or nothing, found \"$1\"." ;;
  esac
  "$here/venv.sh"
  "$here/engine.sh"
  "$here/base-images.sh"
  begin_images
  "$here/lint.sh" check
  [ ${#chosen[@]} -gt 0 ] || see_to_long_tests
  run_tests
}

# Environments of their own: the stores' libraries, a vLLM, a Triton server. Where one of the latter cannot be made (2) its
# tests are skipped.
see_to_long_tests() {
  "$here/buckets.sh"
  "$here/vllm-cpu.sh" || [ $? -eq 2 ]
  "$here/triton.sh" || [ $? -eq 2 ]
}

# The images are built beside what needs none of them. What the build says is shown in one piece.
begin_images() {
  images_log=$(mktemp "${TMPDIR:-/tmp}/pierhead.XXXXXX")
  choose_files '' ''
  COMPOSE_FILE=$COMPOSE_FILE:$TEST_APPS setsid bash -c "$BUILDS" "$here" >"$images_log" 2>&1 </dev/null &
  images=$!
}

# A build beside other work can fail where the same build alone does not ("inconsistent graph state": BuildKit, when
# builds share a step and one of them is cancelled), so it gets a second try.
end_images() {
  local status=0
  wait "$images" || status=$?
  images=
  cat "$images_log"
  rm -f "$images_log"
  [ "$status" -eq 0 ] || COMPOSE_FILE=$COMPOSE_FILE:$TEST_APPS bash -c "$BUILDS" "$here"
}

# What is left of it when something else has failed, or by Ctrl-C.
drop_images() {
  [ -z "$images" ] || kill -- "-$images" 2>/dev/null || true
  [ -z "$images_log" ] || rm -f "$images_log"
}

# Cheap ones first, so that a plain mistake is told before a stack is started for it; the others run all the same. Two
# files run at a time, each process with stacks of its own; with the long tests, those of stacks have the machine to themselves.
run_tests() {
  local status=0
  .venv/bin/python -m pytest ${chosen[@]+"${chosen[@]}"} "${TWO_FILES[@]}" \
    tests/unit tests/bench/tests tests/contract tests/rayserve || status=1
  end_images
  .venv/bin/python -m pytest ${chosen[@]+"${chosen[@]}"} ${at_a_time[@]+"${at_a_time[@]}"} \
    tests/faults tests/integration tests/e2e || status=1
  return "$status"
}

remove_leftovers() {
  local ids
  trap '' INT TERM
  docker info >/dev/null 2>&1 || return 0
  ids=$(of_tests "docker ps --all")
  # shellcheck disable=SC2086  # one argument each, here and below
  [ -z "$ids" ] || docker rm --force --volumes $ids >/dev/null || true
  ids=$(of_tests "docker network ls")
  # shellcheck disable=SC2086
  [ -z "$ids" ] || docker network rm $ids >/dev/null || true
  ids=$(of_tests "docker volume ls")
  # shellcheck disable=SC2086
  [ -z "$ids" ] || docker volume rm $ids >/dev/null || true
  # The build cache keeps their layers: the next run has them back in seconds.
  ids=$(docker image ls --format '{{.Repository}}:{{.Tag}}' | grep -E "^(pierhead/.*:$PIERHEAD_TAG|$TEST_PROJECTS.*)\$" || true)
  # shellcheck disable=SC2086
  [ -z "$ids" ] || docker image rm $ids >/dev/null || true
}

# of_tests LISTING: the ids in one of Docker's listings that belong to tests.
of_tests() {
  local label
  {
    for label in pierhead.test "pierhead.test-run=$PIERHEAD_TEST_RUN"; do
      $1 --quiet --filter "label=$label"
    done
    for label in $($1 --format '{{.Label "com.docker.compose.project"}}' | grep "^$TEST_PROJECTS" | sort -u); do
      $1 --quiet --filter "label=com.docker.compose.project=$label"
    done
  } | sort -u
}

trap 'drop_images; remove_leftovers' EXIT
trap 'exit 130' INT TERM
main "$@"

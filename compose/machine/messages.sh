# shellcheck shell=bash disable=SC2034
# What the scripts of this directory say, and how they show that time passes. To be sourced. `here` is this directory.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { printf '%s\n' "$*"; }

warn() { printf '%s\n' "$*" >&2; }

# refuse TEXT...: the request cannot be carried out as it stands; nothing was changed. Exit status 2.
refuse() {
  printf 'pierhead: %s\n' "$@" >&2
  exit 2
}

# give_up TEXT...: something that should have worked did not. Exit status 1.
give_up() {
  printf 'pierhead: %s\n' "$@" >&2
  exit 1
}

# step TEXT COMMAND...: runs COMMAND with its output kept aside, and shows TEXT with the seconds it takes: on a
# terminal they count up, elsewhere there is one line at the start and one at the end. When COMMAND fails, the end of
# its output is shown and its status is returned. COMMAND may be a function, which must stop at its own first failure.
# The step is a process of its own: when it ends, by Ctrl-C too (status 130), its background processes end with it.
step() (
  text=$1 status=0 began=$SECONDS
  shift
  log=$(mktemp "${TMPDIR:-/tmp}/pierhead.XXXXXX")
  trap '_end_background; rm -f "$log"' EXIT
  trap '_end_line; warn "$text: interrupted after $((SECONDS - began)) s."; exit 130' INT TERM
  if [ -t 1 ]; then _tick "$text" "$log" & else say "$text ..."; fi
  "$@" >"$log" 2>&1 </dev/null || status=$?
  _end_line
  if [ "$status" -eq 0 ]; then
    say "$text: done ($((SECONDS - began)) s)"
  else
    warn "$text: failed after $((SECONDS - began)) s. Its last lines:"
    tail -n 25 "$log" | sed 's/^/  | /' >&2
  fi
  exit "$status"
)

_end_line() {
  _end_background
  if [ -t 1 ]; then printf '\r\033[K'; fi
}

_end_background() {
  local process
  for process in $(jobs -p); do
    kill "$process" 2>/dev/null || true
    wait "$process" 2>/dev/null || true
  done
}

# Shows TEXT, the seconds, and the last line of LOG so far. It ends when the script that started it is gone.
_tick() {
  local text=$1 log=$2 began=$SECONDS line
  while kill -0 $$ 2>/dev/null; do
    line=$(tail -n 1 "$log" 2>/dev/null | tr -cd '[:print:]')
    line="$text ... $((SECONDS - began)) s  $line"
    printf '\r\033[K%s' "${line:0:$((${COLUMNS:-80} - 1))}"
    sleep 1
  done
}

# shellcheck shell=bash
# Which stack the scripts of this directory mean: its directory, files, project and settings. To be sourced; leaves the
# shell in the project's root, where `docker compose` reads .env. In the clone that is also where the stack's files lie; a
# project of the user's own has them in .pierhead (docs/decisions/tool-project-directory.md).

# shellcheck source=compose/machine/host.sh
. "$(dirname "${BASH_SOURCE[0]}")/host.sh"
root=$(cd "$here/../.." && pwd)
# The installed tool runs its own scripts, never those that a project came with.
[ -z "${PIERHEAD_PROJECT_ROOT:-}" ] || root=$PIERHEAD_PROJECT_ROOT/.pierhead
is_clone=1 own=compose stack_file=compose/compose.yaml swarm_file=compose/swarm.yaml default_files=compose/compose.yaml
case $root in
  */.pierhead)
    root=${root%/.pierhead} is_clone='' own=.pierhead/compose stack_file=.pierhead/stack.yaml swarm_file=.pierhead/swarm.yaml
    default_files=compose.yaml:.pierhead/stack.yaml
    ;;
esac
cd "$root" || exit 1

# typed MAKE COMMAND: how a reader types what is one of the two: in the clone, or in a project.
typed() { if [ -n "$is_clone" ]; then printf 'make %s' "$1"; else printf 'pierhead %s' "${2:-$1}"; fi; }

# what_it_is: what a message calls the directory that a stack is started from.
what_it_is() { if [ -n "$is_clone" ]; then printf clone; else printf directory; fi; }

# setting NAME DEFAULT: what `docker compose` would take for a variable: the shell's value, else the one in .env.
setting() {
  local value=${!1-}
  if [ -z "${!1+set}" ] && [ -r .env ]; then
    value=$(_line_of_env_file "$1" | _value_as_compose_reads_it)
  fi
  printf '%s' "${value:-$2}"
}

# image_tag: of the stack's images; in a project it is the tool's release, unless PIERHEAD_TAG names another.
image_tag() {
  local own_tag=latest
  [ -n "$is_clone" ] || own_tag=$(sed -n 's/^PIERHEAD_TAG=//p' "$own/.env")
  setting PIERHEAD_TAG "$own_tag"
}

# The last one counts.
_line_of_env_file() {
  sed -nE "s/^[[:space:]]*(export[[:space:]]+)?$1[[:space:]]*[=:][[:space:]]*//p" .env | tail -n 1
}

# Without quotes, and without a comment: what follows a closing quote, or a blank and a #. Variables stay as written.
_value_as_compose_reads_it() {
  sed -E -e '/^"/{' -e 's/^"(([^"\\]|\\.)*)".*$/\1/' -e 's/\\(["\\])/\1/g' -e b -e '}' \
    -e "/^'/{" -e "s/^'(([^'\\\\]|\\\\.)*)'.*\$/\\1/" -e "s/\\\\'/'/g" -e b -e '}' \
    -e 's/ #.*$//' -e 's/[[:space:]]+$//'
}

project=$(setting COMPOSE_PROJECT_NAME pierhead)

on_swarm() { [ "$(setting PIERHEAD_ENGINE docker)" = swarm ]; }

# for_engine FILES: of a COMPOSE_FILE, with the stack's own file for the engine that is chosen.
for_engine() {
  if on_swarm; then
    tr ':' '\n' <<<"$1" | sed -E "s#^(\./|$root/)?${stack_file//./\\.}\$#$swarm_file#" | paste -sd : -
  else
    printf '%s' "$1"
  fi
}

# choose_files APPS GPU: sets COMPOSE_FILE. No APPS: the files that the shell or .env names. GPU = 1: what gives GPUs to the
# chosen apps, each app's own file: an override of a service that is not among the files would be an error of Compose's.
choose_files() {
  local app files apps=0
  if [ -n "$1" ]; then
    files=compose/compose.yaml
    for app in $1; do
      [ -f "compose/apps/$app.yaml" ] ||
        refuse "APPS: there is no app named \"$app\" (no compose/apps/$app.yaml). There are: $(known_apps)." \
          "Example: make up APPS=\"echo recsys\""
      files=$files:compose/apps/$app.yaml
    done
  else
    files=$(setting COMPOSE_FILE "$default_files")
  fi
  case $2 in
    '' | 0) ;;
    1)
      for app in $(apps_among "$files"); do
        [ -f "compose/gpu-$app.yaml" ] || continue
        apps=$((apps + 1))
        case :$files: in *:compose/gpu-$app.yaml:*) ;; *) files=$files:compose/gpu-$app.yaml ;; esac
      done
      [ "$apps" -gt 0 ] || refuse "GPU: none of the chosen apps has a file for GPUs (compose/gpu-<app>.yaml)." \
        "Leave GPU=1 out; an app of yours says itself which GPUs it needs (deploy.resources.reservations.devices)."
      ;;
    *) refuse "GPU: expected 1 or nothing, found \"$2\"." ;;
  esac
  COMPOSE_FILE=$(for_engine "$files")
  export COMPOSE_FILE
}

known_apps() {
  local file names=()
  for file in compose/apps/*.yaml; do
    [ -f "$file" ] && names+=("$(basename "$file" .yaml)")
  done
  printf '%s' "${names[*]:-none}"
}

# apps_among FILES: the apps among the files of a COMPOSE_FILE, one a line.
apps_among() { tr ':' '\n' <<<"$1" | sed -n 's|^compose/apps/\(.*\)\.yaml$|\1|p'; }

# choose_build_inputs: this machine's own certificates and wheels, where neither the shell nor .env names others.
choose_build_inputs() {
  local bundle wheels
  bundle=$(setting PIERHEAD_CA_BUNDLE "$(ca_bundle)")
  wheels=$(setting PIERHEAD_WHEELS "$(wheel_directory)")
  # In a project the user's files and the stack's begin at different directories.
  [ -n "$is_clone" ] || wheels=${wheels:-$root/$own/wheels}
  export PIERHEAD_CA_BUNDLE=${bundle:-./machine/no-ca.pem} PIERHEAD_WHEELS=${wheels:-./wheels}
}

# container_of SERVICE: the id of the running container of one of the stack's own services; nothing where there is none.
container_of() {
  docker ps -q --filter "label=com.docker.compose.project=$project" --filter "label=com.docker.compose.service=$1" \
    --filter label=com.docker.compose.oneoff=False 2>/dev/null | head -n 1
}

# running_files CONTROLLER: the COMPOSE_FILE that the running stack was started with.
running_files() {
  docker inspect --format '{{range .Config.Env}}{{println .}}{{end}}' "$1" | sed -n 's/^COMPOSE_FILE=//p'
}

# difference RUNNING NAMED: in one line, which of the running stack's files COMPOSE_FILE does not name, which it names that
# do not run, and what to do. Nothing where they are the same.
difference() {
  local dropped added
  dropped=$(_files_without "$1" "$2") added=$(_files_without "$2" "$1")
  [ -n "$dropped$added" ] || return 0
  printf 'pierhead: the running stack has other files than COMPOSE_FILE (.env or the shell).'
  # shellcheck disable=SC2016  # the backquotes are for the reader
  [ -z "$dropped" ] || printf ' Only in the running stack: %s; a plain `%s` drops this unless COMPOSE_FILE names it.' "$dropped" "$(typed up)"
  # shellcheck disable=SC2016
  [ -z "$added" ] || printf ' Only in COMPOSE_FILE: %s; `%s` starts this.' "$added" "$(typed up)"
}

_files_without() { comm -23 <(_files "$1") <(_files "$2") | paste -sd , | sed 's/,/, /g'; }

_files() { tr ':' '\n' <<<"$1" | sed -e "s|^$root/||" -e 's|^\./||' | sort -u; }

# another_clone: the clone, or directory, whose running stack has this one's name, where it is not this one; nothing where there is
# none.
another_clone() {
  local directory
  while read -r directory; do
    is_elsewhere "$directory" || continue
    _started_from "$directory"
    return
  done < <(docker ps --filter "label=com.docker.compose.project=$project" \
    --filter label=com.docker.compose.oneoff=False --format '{{.Label "com.docker.compose.project.working_dir"}}')
}

# clone_of CONTAINER: the clone that it was started from, where that is not this one; nothing where it is, or where that is not known.
clone_of() {
  local directory
  directory=$(docker inspect --format '{{index .Config.Labels "com.docker.compose.project.working_dir"}}' "$1" 2>/dev/null || true)
  if is_elsewhere "$directory"; then _started_from "$directory"; fi
}

# is_elsewhere DIRECTORY: one that Compose read its first file in is none of this clone's, or project's, by whatever name it is
# reached.
is_elsewhere() {
  [ -n "$1" ] || return 1
  if [ -n "$is_clone" ]; then
    ! [ "$1" -ef "$root/compose" ]
  else
    ! [ "$1" -ef "$root" ] && case $1 in "$root"/*) false ;; esac
  fi
}

# _started_from DIRECTORY: the clone, or the project's directory, whose stack has its first file there.
_started_from() {
  if [ "${1##*/}" = compose ] && ! [ -d "$1/.pierhead" ]; then dirname "$1"; else printf '%s\n' "$1"; fi
}

# refuse_broken_files: what Compose says about the files, before anything is touched.
refuse_broken_files() {
  local complaint
  complaint=$(docker compose config --quiet 2>&1) ||
    refuse "Compose cannot read the stack's files (${COMPOSE_FILE//:/, }): $complaint" "Nothing was built or started."
}

build_images() {
  refuse_broken_files
  build_base_of_users
  step "Building the images" docker compose --progress plain build ||
    give_up "an image could not be built; the lines above say which and why. What runs already was not touched."
}

# build_base_of_users: pierhead/python, where a Dockerfile of the chosen files names it with this tag. Compose builds in no order,
# so it has to be there before.
build_base_of_users() {
  local named tag config
  tag=$(image_tag)
  config=$(whole_config)
  while read -r named; do
    [ "$named" != pierhead/python ] || named=pierhead/python:latest # as Docker reads it
    case $named in
      "pierhead/python:$tag" | *'$'*)
        step "Building pierhead/python:$tag" \
          env "PIERHEAD_TAG=$tag" docker compose --file "$own/images.yaml" --progress plain build ||
          give_up "pierhead/python:$tag could not be built; the lines above say why. What runs already was not touched."
        ;;
      *)
        docker image inspect "$named" >/dev/null 2>&1 ||
          refuse "a Dockerfile of this project begins with $named. That is not on this machine, and this tool makes" \
            "pierhead/python:$tag. Change that line, or install the tool of that version. Nothing was started."
        ;;
    esac
  done < <({
    bases_of_ours <<<"$config" # of Dockerfiles that are written in the compose file
    dockerfiles <<<"$config" | while read -r file; do bases_of_ours "$file" 2>/dev/null || true; done
  } | sort -u)
}

# bases_of_ours [FILE]: pierhead/python, as lines of a Dockerfile name it.
bases_of_ours() {
  sed -nE 's,^[[:space:]]*(FROM|from|ARG|arg)[[:space:]](.*[[:space:]=])?(pierhead/python(:[^[:space:]]*)?)([[:space:]].*)?$,\3,p' "$@"
}

# dockerfiles: of the whole config on standard input, what the project's images are built from, one a line.
dockerfiles() {
  awk '
    function path(line) { sub(/^ *[a-z]+: /, "", line); gsub(/^"|"$/, "", line); return line }
    /^[^ ]/ { top = $1 }
    top != "services:" { next }
    /^    [^ ]/ { key = $1 }
    key == "build:" && /^      context: / { context = path($0) }
    key == "build:" && /^      dockerfile: / { file = path($0); print (file ~ "^/" ? file : context "/" file) }'
}

# whole_config: all services as Compose reads the files, in its one way to write them: two blanks a level. Nothing where it
# cannot read them, which is told before the build.
whole_config() { docker compose --profile '*' config 2>/dev/null || true; }

# program COMMAND...: Pierhead's own, in the Python of the tool that has called this script, or of this clone.
program() {
  if [ -n "${PIERHEAD_PROGRAM:-}" ]; then
    "$PIERHEAD_PROGRAM" -P -c 'from pierhead_stack import main; main()' "$@"
  else
    "$root/pierhead" "$@"
  fi
}

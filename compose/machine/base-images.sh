#!/usr/bin/env bash
# Sees to the images that the stack's own images are built on, and to Grafana's. Each one that is here already is left
# alone; the others are pulled. Where no registry gives them, Debian's are built from Debian packages, under the same
# tags; Grafana's cannot be, and the stack does without. `base-images.sh debian-only` does not ask for Grafana's.
set -euo pipefail

# shellcheck source=compose/machine/host.sh
. "$(dirname "${BASH_SOURCE[0]}")/host.sh"

readonly REGISTRY_ANSWER_S=10 # until a registry says that it has an image
readonly PULL_S=600           # until the image is here
readonly RELEASES=(trixie bookworm)
readonly OWN_CERTIFICATES=/usr/local/share/ca-certificates

main() {
  local release grafana='' missing=() builds=()
  one_at_a_time
  [ "${1:-}" = debian-only ] || grafana=$(grafana_image)
  for release in "${RELEASES[@]}"; do
    is_here "debian:$release-slim" || missing+=("debian:$release-slim")
  done
  [ -z "$grafana" ] || is_here "$grafana" || missing+=("$grafana")
  [ "${#missing[@]}" -gt 0 ] || return 0

  step "Asking the registry for ${missing[*]}" in_parallel pull "${missing[@]}"
  for release in "${RELEASES[@]}"; do
    is_here "debian:$release-slim" || builds+=("$release")
  done
  [ "${#builds[@]}" -gt 0 ] || return 0

  say "No registry gives the Debian base images ($(cat "$workspace/pull-debian-${builds[0]}-slim"))."
  require_bootstrap
  write_slim_apt_settings
  step "Building them from Debian's packages: ${builds[*]}" in_parallel build "${builds[@]}" ||
    give_up "the Debian base images could not be built; the lines above say why."
}

is_here() { docker image inspect "$1" >/dev/null 2>&1; }

# The one place that names Grafana's version is the stack's own definition.
grafana_image() { sed -n 's|^ *image: *\(grafana/grafana:[^ ]*\).*|\1|p' "$here/../compose.yaml"; }

# in_parallel COMMAND ARGUMENT...: COMMAND once for each ARGUMENT, all at the same time; fails when one of them does.
in_parallel() {
  local command=$1 argument status=0 process processes=()
  shift
  for argument in "$@"; do
    "$command" "$argument" &
    processes+=("$!")
  done
  for process in "${processes[@]}"; do
    wait "$process" || status=1
  done
  return "$status"
}

# A registry that cannot be reached may leave the engine waiting for minutes: give up when it says nothing for a while.
# An image that cannot be had is no failure here: the reason stays in a file, and the caller looks what came.
pull() {
  local output=$workspace/pull-${1//[:\/]/-} deadline=$((SECONDS + REGISTRY_ANSWER_S)) process
  timeout "$PULL_S" docker pull "$1" >"$output" 2>&1 &
  process=$!
  while kill -0 "$process" 2>/dev/null; do
    if [ "$SECONDS" -ge "$deadline" ] && ! grep -q 'Pulling from' "$output"; then
      kill "$process" 2>/dev/null || true
      echo "no answer within $REGISTRY_ANSWER_S s" >"$output"
      break
    fi
    sleep 0.2
  done
  wait "$process" 2>/dev/null || true
}

require_bootstrap() {
  has_bootstrap || case $(os_field ID) in
    debian | ubuntu) ;;
    *) refuse "no registry gives debian:trixie-slim and debian:bookworm-slim, and on $(os_name) they cannot be built (only on Debian and Ubuntu)." \
      "Load them from elsewhere (docker load), or give this machine a registry, and repeat." ;;
  esac
  can_be_root || refuse "no registry gives debian:trixie-slim and debian:bookworm-slim, and only root can build them: $(whoami) is not root, and there is no sudo." \
    "Load them from elsewhere (docker load), or have root type this command once."
  has_bootstrap || step "Installing mmdebstrap" apt_install mmdebstrap debian-archive-keyring ||
    give_up "mmdebstrap could not be installed; the lines above say why."
}

has_bootstrap() { command -v mmdebstrap >/dev/null 2>&1 && [ -e /usr/share/keyrings/debian-archive-keyring.gpg ]; }

# build RELEASE: a minimal system like the official image's, with the certificates that this machine's administrator
# has added, and no documentation, package lists or downloaded packages.
# shellcheck disable=SC2016  # $1 in a hook is for mmdebstrap's own shell
build() {
  local release=$1 archive=$workspace/$1.tar hooks=() what
  if compgen -G "$OWN_CERTIFICATES/*.crt" >/dev/null; then
    hooks+=(--customize-hook="copy-in $OWN_CERTIFICATES /usr/local/share")
    hooks+=(--customize-hook='chroot "$1" update-ca-certificates')
  fi
  hooks+=(--customize-hook="copy-in $workspace/slim /etc/apt/apt.conf.d")
  hooks+=(--customize-hook='rm -f "$1"/var/cache/apt/*.bin') # apt will not look there any more
  debian_sources "$release" >"$workspace/$release.list" || return
  what=("$release" "$archive")
  [ ! -s "$workspace/$release.list" ] || what+=("$workspace/$release.list")
  # mmdebstrap has its shell write to file descriptors by number, and dash takes numbers of one digit only: a few open
  # files more, and it fails with "Bad fd number".
  without_open_files as_root mmdebstrap --variant=minbase --include=ca-certificates "${hooks[@]}" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    "${what[@]}" &&
    docker import --change 'CMD ["bash"]' --message "Debian $release, built from its packages by Pierhead" \
      "$archive" "debian:$release-slim" &&
    as_root rm -f "$archive"
}

# How apt behaves inside the images: it keeps no packages, caches and translations.
write_slim_apt_settings() {
  printf '%s\n' 'APT::Keep-Downloaded-Packages "false";' 'Acquire::Languages "none";' \
    'Dir::Cache::pkgcache "";' 'Dir::Cache::srcpkgcache "";' >"$workspace/slim"
}

workspace=$(mktemp -d)
trap 'rm -rf "$workspace" 2>/dev/null || as_root rm -rf "$workspace"' EXIT # what root has built is root's
trap 'exit 130' INT TERM
main "$@"

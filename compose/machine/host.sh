# shellcheck shell=bash
# What the scripts of this directory need to know about the machine they run on. To be sourced.

# shellcheck source=compose/machine/messages.sh
. "$(dirname "${BASH_SOURCE[0]}")/messages.sh"

# Overridable, so that a test can pretend to be elsewhere.
os_release=${PIERHEAD_OS_RELEASE:-/etc/os-release}

# os_field NAME: one field of os-release, empty where there is none.
os_field() {
  if [ -r "$os_release" ]; then
    sed -n "s/^$1=//p" "$os_release" | tr -d "\"'" | head -n 1
  fi
}

os_name() {
  local name
  name=$(os_field PRETTY_NAME)
  printf '%s' "${name:-$(uname -s)}"
}

is_root() { [ "$(id -u)" -eq 0 ]; }

can_be_root() { is_root || command -v sudo >/dev/null 2>&1; }

as_root() {
  if is_root; then "$@"; else sudo "$@"; fi
}

# apt_install PACKAGE...: from lists that are read afresh, and never at the price of another package. APT_CONFIG, where
# set, names a configuration to use instead of the machine's.
apt_install() {
  as_root env DEBIAN_FRONTEND=noninteractive "APT_CONFIG=${APT_CONFIG:-}" apt-get update &&
    as_root env DEBIAN_FRONTEND=noninteractive "APT_CONFIG=${APT_CONFIG:-}" \
      apt-get install -y --no-remove --no-install-recommends "$@"
}

# without_open_files COMMAND...: COMMAND with standard input, output and error alone, whatever its caller has open.
without_open_files() (
  for file in /proc/"$BASHPID"/fd/*; do
    [ "${file##*/}" -le 2 ] || eval "exec ${file##*/}>&-"
  done
  "$@"
)

# at_least FOUND WANTED: compares the first two numbers of two versions ("26.1.5+dfsg1" is at least "26").
at_least() {
  local found_major found_minor wanted_major wanted_minor
  read -r found_major found_minor < <(_first_two "$1")
  read -r wanted_major wanted_minor < <(_first_two "$2")
  [ "$found_major" -gt "$wanted_major" ] ||
    { [ "$found_major" -eq "$wanted_major" ] && [ "$found_minor" -ge "$wanted_minor" ]; }
}

_first_two() {
  local version=${1#v} major minor
  major=${version%%[!0-9]*}
  case $version in
    *.*) minor=${version#*.} minor=${minor%%[!0-9]*} ;;
    *) minor=0 ;;
  esac
  printf '%s %s\n' "${major:-0}" "${minor:-0}"
}

# debian_sources RELEASE: the lines of an apt sources.list for a Debian release, from the mirrors that this machine, a
# Debian one, uses itself. Nothing on other machines: mmdebstrap then takes Debian's own.
debian_sources() {
  local own mirror security options='[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]'
  [ "$(os_field ID)" = debian ] || return 0
  own=$(os_field VERSION_CODENAME)
  mirror=$(apt_mirror "$own")
  security=$(apt_mirror "$own-security")
  [ -n "$mirror" ] || refuse "apt on this machine has no mirror for its own release, Debian $own." \
    "Add one to /etc/apt/sources.list.d and repeat."
  printf 'deb %s %s main\n' "$options" "$mirror $1" "$options" "$mirror $1-updates"
  [ -z "$security" ] || printf 'deb %s %s main\n' "$options" "$security $1-security"
}

# apt_mirror SUITE: the address this machine's own apt gets SUITE from; nothing where it does not.
apt_mirror() {
  local address=''
  if command -v apt-get >/dev/null 2>&1; then
    address=$(apt-get indextargets --no-release-info --format "\$(RELEASE) \$(REPO_URI)" 'Created-By: Packages' \
      2>/dev/null | awk -v suite="$1" '$1 == suite && !seen++ { sub("/$", "", $2); print $2 }')
  fi
  case $address in
    mirror+file:*) address=$(head -n 1 "${address#mirror+file:}" | cut -f 1) ;;
  esac
  printf '%s' "$address"
}

# wheel_directory: the directory of wheels that pip is configured to use on this machine; nothing where there is none.
wheel_directory() {
  local place
  for place in ${PIP_FIND_LINKS:-} $(python3 -m pip config get global.find-links 2>/dev/null || true); do
    place=${place#file://}
    if [ -d "$place" ]; then
      printf '%s' "$place"
      return
    fi
  done
}

# one_at_a_time: a second script that gets here waits for the first to end. The lock is on a directory that every
# machine has, so that no file is left behind. It is released when the script ends.
one_at_a_time() {
  if command -v flock >/dev/null 2>&1; then
    exec 9</etc
    flock 9
  fi
}

# ca_bundle: the file that holds the certificates this machine trusts; nothing where none is found.
ca_bundle() {
  local file
  for file in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt \
    /etc/ssl/cert.pem; do
    if [ -n "$file" ] && [ -r "$file" ]; then
      printf '%s' "$file"
      return
    fi
  done
}

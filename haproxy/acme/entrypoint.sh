#!/bin/sh
# Asks an ACME server for the edge's certificate, and again when less than a third of its time is left. The controller has made
# the account's key, from which HAProxy answers what the server asks (HTTP-01), and gives HAProxy the certificate from here
# (controller/files/acme.py). Why there is none is in the file "failure", for `pierhead status`. SIGHUP: ask now.
set -euf
umask 077

place=/var/lib/acme
certificate=$place/tls/acme.pem
# shellcheck disable=SC2046
set -- $(echo "$PIERHEAD_ACME_DOMAINS" | tr , ' ')
domains=$*
server=$PIERHEAD_ACME_SERVER
email=$PIERHEAD_ACME_EMAIL
wanted="$server $email $domains"

look_s=3600
attempt_s=300
# After failures: 4 attempts in the first hour, as Let's Encrypt allows 5 that fail.
first_delay_s=300
most_delay_s=21600

say() { printf 'acme: %s\n' "$*" >&2; }

# put FILE: standard input, in one step.
put() {
  cat >"$1.new" && mv -f "$1.new" "$1"
}

# ended PID: waits for it; a signal ends a wait of the shell, not this one.
ended() {
  while :; do
    wait "$1" && return 0 || status=$?
    kill -0 "$1" 2>/dev/null || return "$status"
  done
}

# pause SECONDS, or until SIGHUP.
pause() {
  sleep "$1" &
  [ -n "$asked" ] || wait $! || true
  kill $! 2>/dev/null || true
}

# Whether HAProxy answers what a server asks, with this account.
is_answered() {
  question='GET /.well-known/acme-challenge/ready HTTP/1.0\r\nhost: haproxy\r\n\r\n'
  # shellcheck disable=SC2016
  [ -s "$place/thumbprint" ] && timeout 5 bash -c 'exec 3<>/dev/tcp/haproxy/8000 && printf "$1" >&3 && cat <&3' - "$question" 2>/dev/null |
    grep -qF "ready.$(cat "$place/thumbprint")"
}

# moment start|end: of the certificate, in seconds since the epoch.
moment() {
  written=$(openssl x509 -noout "-$1date" -in "$certificate") && date -d "${written#*=}" +%s
}

# Whether there is no certificate for what is wanted, or less than a third of its time is left.
is_due() {
  [ "$(cat "$place/obtained" 2>/dev/null)" = "$wanted" ] || return 0
  begin=$(moment start) && end=$(moment end) || return 0
  [ $((3 * (end - $(date +%s)))) -lt $((end - begin)) ]
}

# lego looks for the account's key by the server's host and the email. It keeps nothing: each time it asks for the account of the
# key. What it writes into the directory for answers, nobody reads.
attempt() {
  host=${server#https://}
  host=$(echo "${host%%/*}" | tr : _)
  keys="/tmp/lego/accounts/$host/$email/keys"
  rm -rf /tmp/lego
  mkdir -p "$keys" /tmp/webroot
  cp "$place/account.key" "$keys/$email.key"
  set --
  for domain in $domains; do set -- "$@" --domains "$domain"; done
  timeout "$attempt_s" lego --accept-tos --server "$server" --email "$email" --path /tmp/lego "$@" \
    --http --http.webroot /tmp/webroot run >/dev/null 2>/tmp/said &
  ended $! || {
    [ $? != 124 ] || echo "the attempt took more than $attempt_s s" >>/tmp/said
    return 1
  }
  given="/tmp/lego/certificates/${domains%% *}"
  {
    cat "$given.key" "$given.crt" >"$certificate.new" && mv -f "$certificate.new" "$certificate" &&
      echo "$wanted" | put "$place/obtained"
  } 2>>/tmp/said
}

# The end of what lego said, on one line.
reason() {
  grep -vF '[INFO]' /tmp/said | sed 's|^[0-9/]* [0-9:]* ||' | tail -n 20 | tr -s '[:space:]' ' ' | cut -c 1-1000
}

asked=
trap 'asked=1' HUP
trap 'exit 0' TERM INT
if [ -s /run/secrets/acme-ca ]; then export LEGO_CA_CERTIFICATES=/run/secrets/acme-ca; fi

# An attempt that failed before a restart counts, unless something else is wanted now.
delay=$first_delay_s
next=0
if [ "$(sed -n 3p "$place/failure" 2>/dev/null)" = "$wanted" ]; then
  next=$(sed -n 2p "$place/failure")
else
  rm -f "$place/failure"
fi

while :; do
  now=$(date +%s)
  if [ $((next - now)) -gt "$most_delay_s" ]; then # the clock was ahead when the attempt failed
    next=$((now + delay))
    sed -i "2s/.*/$next/" "$place/failure" || say "the time of the next attempt is not stored"
  fi
  # After a failed attempt, also one that SIGHUP asked for, there is another one.
  if [ -n "$asked" ] || { [ "$now" -ge "$next" ] && { [ "$next" -gt 0 ] || is_due; }; }; then
    is_answered || say "waiting until HAProxy answers for the account"
    until is_answered; do sleep 2; done
    say "asking $server for a certificate for $domains"
    if attempt; then
      say "got the certificate"
      rm -f "$place/failure"
      delay=$first_delay_s
      next=0
    else
      next=$(($(date +%s) + delay))
      delay=$((2 * delay < most_delay_s ? 2 * delay : most_delay_s))
      why=$(reason)
      say "no certificate: $why"
      printf '%s\n%s\n%s\n' "$why" "$next" "$wanted" | put "$place/failure" || say "which is not stored"
    fi
    rm -rf /tmp/lego
    asked=
  fi
  now=$(date +%s)
  pause $((next > now ? next - now : look_s))
done

#!/bin/sh
# Writes Alertmanager's configuration from the environment, and starts it. The controller has checked the variables
# (controller/settings.py); the file has secrets, so it is for this user alone, in memory.
set -euf
umask 077

# text WORDS: as a double-quoted text of YAML.
text() {
  printf '"%s"' "$(printf %s "$1" | tr -d '\n' | sed 's/["\\]/\\&/g')"
}

# line WORDS: as they are; echo would read backslashes.
line() {
  printf '%s\n' "$1"
}

# What a label says must not become a link in a chat, or call people.
plain='reReplaceAll "&" "&amp;" | reReplaceAll "<" "&lt;" | reReplaceAll ">" "&gt;"'
subject="$COMPOSE_PROJECT_NAME: {{ template \"__subject\" . }}"
title="$COMPOSE_PROJECT_NAME: {{ .Status | toUpper }} {{ .GroupLabels.alertname | $plain }} {{ .GroupLabels.service | $plain }}"
words="{{ range .Alerts }}{{ .Annotations.summary | $plain }}. {{ .Annotations.description | $plain }} ({{ .Annotations.runbook_url | $plain }}) {{ end }}"

{
  if [ -n "${PIERHEAD_ALERT_MAIL:-}" ]; then
    line "global:"
    line "  smtp_smarthost: $(text "$PIERHEAD_ALERT_SMTP")"
    line "  smtp_from: $(text "${PIERHEAD_ALERT_FROM:-${PIERHEAD_ALERT_MAIL%%,*}}")"
    line "  smtp_auth_username: $(text "${PIERHEAD_ALERT_SMTP_USER:-}")"
    line "  smtp_auth_password: $(text "${PIERHEAD_ALERT_SMTP_PASSWORD:-}")"
    # At port 465 the connection itself is TLS, and such a server has no STARTTLS, which this word is about.
    case "${PIERHEAD_ALERT_SMTP_TLS:-on}$PIERHEAD_ALERT_SMTP" in
      [Oo][Ff][Ff]* | *:465) line "  smtp_require_tls: false" ;;
    esac
  fi
  line "route:"
  line "  receiver: $(text "$COMPOSE_PROJECT_NAME")"
  line "  group_by: [alertname, service]"
  line "  group_wait: 10s"
  line "  group_interval: 1m"
  line "  repeat_interval: ${PIERHEAD_ALERT_REPEAT:-4h}"
  line "receivers:"
  line "  - name: $(text "$COMPOSE_PROJECT_NAME")"
  if [ -n "${PIERHEAD_ALERT_WEBHOOK:-}" ]; then
    line "    webhook_configs:"
    line "      - {send_resolved: true, url: $(text "$PIERHEAD_ALERT_WEBHOOK")}"
  fi
  if [ -n "${PIERHEAD_ALERT_SLACK:-}" ]; then
    line "    slack_configs:"
    line "      - {send_resolved: true, api_url: $(text "$PIERHEAD_ALERT_SLACK"), title: $(text "$title"), fallback: $(text "$title"), text: $(text "$words")}"
  fi
  if [ -n "${PIERHEAD_ALERT_MAIL:-}" ]; then
    line "    email_configs:"
    line "      - {send_resolved: true, to: $(text "$PIERHEAD_ALERT_MAIL"), headers: {Subject: $(text "$subject")}}"
  fi
} >/tmp/alertmanager.yml

# Links in messages lead to the console's page of alerts. It has no other Alertmanager to talk to.
exec prometheus-alertmanager --config.file=/tmp/alertmanager.yml --storage.path=/var/lib/prometheus/alertmanager \
  --data.maintenance-interval=1m --cluster.listen-address= --web.listen-address=:9093 --web.route-prefix=/ \
  --web.external-url="http://127.0.0.1:${PIERHEAD_API_PORT:-8100}"

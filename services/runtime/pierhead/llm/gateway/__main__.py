"""Run as `python -m pierhead.llm.gateway`."""

from __future__ import annotations

import os
import sys

from pierhead import serve
from pierhead.errors import SettingsError
from pierhead.llm.gateway.app import make_app
from pierhead.llm.gateway.metrics import GatewayMetrics
from pierhead.llm.gateway.settings import GatewaySettings
from pierhead.metrics import PROCESS

metrics = GatewayMetrics()
PROCESS.register(metrics)
try:
    app = make_app(GatewaySettings.from_env(os.environ), metrics)
except SettingsError as error:
    sys.stderr.write(f"{error}\n")
    raise SystemExit(2) from None
serve(app)

"""Run as `python -m services.llm.gateway`."""

from __future__ import annotations

import os
import sys

from pierhead import serve
from pierhead.errors import SettingsError
from pierhead.metrics import PROCESS

from services.llm.gateway.app import make_app
from services.llm.gateway.metrics import GatewayMetrics
from services.llm.gateway.settings import GatewaySettings

metrics = GatewayMetrics()
PROCESS.register(metrics)
try:
    app = make_app(GatewaySettings.from_env(os.environ), metrics)
except SettingsError as error:
    sys.stderr.write(f"{error}\n")
    raise SystemExit(2) from None
serve(app)

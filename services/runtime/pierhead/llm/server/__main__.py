"""Run as `python -m pierhead.llm.server`."""

from __future__ import annotations

import signal
import sys

# The first process of a container ignores SIGTERM until it handles it, and importing an engine takes seconds.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

from pierhead import serve  # noqa: E402
from pierhead.errors import SettingsError  # noqa: E402
from pierhead.llm.server.service import LLMService  # noqa: E402
from pierhead.llm.server.settings import ServerSettings  # noqa: E402

# Engines start processes that import this module again.
if __name__ == "__main__":
    try:
        settings = ServerSettings.from_env()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    serve(LLMService(settings.config, admin_token=settings.admin_token))

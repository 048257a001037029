"""Run as `python -m services.recsys.ranker`."""

from __future__ import annotations

import signal
import sys

# The first process of a container ignores SIGTERM until it handles it, and importing PyTorch takes seconds.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

from pierhead import serve  # noqa: E402
from pierhead.errors import SettingsError  # noqa: E402

from services.recsys.ranker.service import Ranker  # noqa: E402
from services.recsys.ranker.settings import RankerSettings  # noqa: E402

try:
    settings = RankerSettings.from_env()
except SettingsError as error:
    sys.stderr.write(f"{error}\n")
    raise SystemExit(2) from None
serve(Ranker(settings))

"""Run as `python -m services.recsys.ingress`.

| variable | meaning |
|---|---|
| PIERHEAD_RECSYS_RANKER | ranker (the default): the PyTorch ranker; triton: the same model in Triton |
"""

from __future__ import annotations

import sys

from pierhead import serve
from pierhead.environment import Environment
from pierhead.errors import SettingsError

from services.recsys.ingress.app import make_app
from services.recsys.ingress.rankers import by_ranker, by_triton

RANKERS = {"ranker": by_ranker, "triton": by_triton}

env = Environment(None)
chosen = env.choice("PIERHEAD_RECSYS_RANKER", "ranker", tuple(RANKERS))
try:
    env.check()
except SettingsError as error:
    sys.stderr.write(f"{error}\n")
    raise SystemExit(2) from None
serve(make_app(RANKERS[chosen]()))

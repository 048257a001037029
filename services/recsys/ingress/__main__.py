"""Run as `python -m services.recsys.ingress`."""

from __future__ import annotations

from pierhead import handle, serve
from pierhead.recsys.v1.ranker_pb2_grpc import RankerStub

from services.recsys.ingress.app import make_app

serve(make_app(handle(RankerStub, "ranker")))

"""Triton looks for its class here."""

from services.recsys.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]

"""Exceptions of the user's code, shown without the frames that lead to it."""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

_RUNTIME: Final = Path(__file__).parent


def user_traceback(error: BaseException) -> str:
    """An exception with its traceback, from the first frame that is neither the runtime's nor the import system's."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and _is_machinery(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    if frame is None and not isinstance(error, SyntaxError):
        frame = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


def where(error: BaseException) -> str:
    """An exception in a line, with the user's innermost frame."""
    said = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{said} ({Path(error.filename).name}:{error.lineno})"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not _is_machinery(each.filename)]
    return f"{said} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else said


def _is_machinery(file: str) -> bool:
    return file.startswith("<frozen ") or Path(file).is_relative_to(_RUNTIME) or file.startswith(_STANDARD)


_STANDARD = tuple({str(Path(module.__file__ or "").parent) + os.sep for module in (importlib, traceback)})

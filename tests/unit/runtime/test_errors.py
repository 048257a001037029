"""The exception tree and its way over the wire."""

from __future__ import annotations

import re
from urllib.parse import quote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead import errors
from pierhead.errors import MAX_DETAILS, BadRequest, NotFound, PierheadError, RemoteError, UserCodeError, clip
from pierhead.trailers import Trailers, from_status


def tree(base: type[PierheadError]) -> list[type[PierheadError]]:
    return [
        base,
        *[error for child in base.__subclasses__() for error in tree(child) if child.__module__ == errors.__name__],
    ]


EVERY = tree(PierheadError)


def test_the_tree_at_the_top_of_the_file_is_the_tree() -> None:
    assert errors.__doc__ is not None
    printed = re.findall(
        r"^[ |`-]*([A-Z]\w+) +([A-Z_]+|as the callee set) +(\d+|by status) +(\w+)", errors.__doc__, re.M
    )
    told = {name: (status, http, kind) for name, status, http, kind in printed}
    real = {
        error.__name__: (error.grpc_status.name, str(error.http_status), error.kind)
        for error in EVERY
        if error is not RemoteError
    }
    assert {name: row for name, row in told.items() if name != "RemoteError"} == real
    assert "RemoteError" in told


def test_every_kind_is_its_own() -> None:
    assert len({error.kind for error in EVERY}) == len(EVERY)


def test_a_message_that_is_no_text_becomes_one() -> None:
    error = BadRequest(ValueError("of the caller"))  # type: ignore[arg-type]  # as code without types has it
    assert (error.message, error.details(), str(error)) == ("of the caller",) * 3


@pytest.mark.parametrize("error", [e for e in EVERY if e not in (RemoteError, UserCodeError)])
def test_an_error_crosses_the_wire_as_itself(error: type[PierheadError]) -> None:
    sent = error("what, where, why")
    got = from_status(sent.grpc_status, sent.details(), Trailers(sent.trailing_metadata()))
    assert type(got) is error
    assert str(got) == "what, where, why"
    assert got.http_status == error.http_status


def test_a_user_s_exception_crosses_with_traceback_and_id() -> None:
    sent = UserCodeError("ValueError: no [error id 1]", error_id="1", traceback="Traceback:\n  line\n")
    got = from_status(sent.grpc_status, sent.details(), Trailers(sent.trailing_metadata()))
    assert isinstance(got, UserCodeError)
    assert (str(got), got.error_id, got.traceback) == (str(sent), "1", sent.traceback)


def test_a_subclass_that_only_the_callee_knows_keeps_its_name_and_status() -> None:
    got = from_status(grpc.StatusCode.NOT_FOUND, "no such model", Trailers([("pierhead-error", "no_such_model")]))
    assert type(got) is NotFound
    assert got.kind == "no_such_model"
    assert NotFound.kind == "not_found"


def test_a_subclass_that_the_caller_knows_crosses_as_itself() -> None:
    class QuotaExceeded(BadRequest):
        kind = "quota_exceeded"
        http_status = 402

        def __new__(cls, user: str, limit: int) -> QuotaExceeded:
            return super().__new__(cls, user, limit)

        def __init__(self, user: str, limit: int) -> None:
            super().__init__(f"{user}: expected at most {limit} requests a day")

    sent = QuotaExceeded("ada", 10)
    got = from_status(sent.grpc_status, sent.details(), Trailers(sent.trailing_metadata()))
    assert (type(got), str(got), got.http_status) == (QuotaExceeded, str(sent), 402)
    other = from_status(grpc.StatusCode.NOT_FOUND, "x", Trailers(sent.trailing_metadata()))
    assert (type(other), other.kind) == (NotFound, "quota_exceeded")


def test_statuses_of_foreign_servers_become_the_nearest_class() -> None:
    assert type(from_status(grpc.StatusCode.INVALID_ARGUMENT, "x", Trailers(()))) is BadRequest
    other = from_status(grpc.StatusCode.PERMISSION_DENIED, "", Trailers(()))
    assert isinstance(other, RemoteError)
    assert other.http_status == 403
    assert "PERMISSION_DENIED" in str(other)


def test_a_kind_that_does_not_fit_its_status_is_not_believed() -> None:
    got = from_status(grpc.StatusCode.NOT_FOUND, "x", Trailers([("pierhead-error", "bad_request")]))
    assert type(got) is NotFound


anything = st.text(st.characters())  # lone surrogates too


@given(anything, anything)
def test_details_always_fit_the_wire(message: str, traceback: str) -> None:
    details = UserCodeError(message, error_id="1", traceback=traceback * 50).details()
    assert len(quote(details)) <= MAX_DETAILS


def test_what_is_cut_off_a_traceback_is_its_oldest_part() -> None:
    details = UserCodeError("m", traceback="old " * 5000 + "the line that raised").details()
    assert details.startswith("m\n... [cut]")
    assert details.endswith("the line that raised")


@given(anything, st.integers(20, 200), st.sampled_from(["start", "end"]))
def test_clip_keeps_what_fits_and_marks_what_does_not(text: str, limit: int, keep: str) -> None:
    short = clip(text, limit, keep=keep)
    assert len(quote(short)) <= limit
    clean = text.encode(errors="replace").decode()
    if len(quote(clean)) <= limit:
        assert short == clean

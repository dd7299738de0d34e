"""Errors as the OpenAI API reports them."""

from __future__ import annotations

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from tutti.serve.server.service import Draining, Full
from tutti.serve.values import Json

LONGEST = 2000  # characters of a message
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
    """A request that is refused with a status. param: the field at fault. retry: seconds until it may be sent again."""

    def __init__(self, status: int, message: str, param: str | None = None, retry: float | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.retry = status, message, param, retry


def body_of(error: Exception) -> tuple[int, Json, dict[str, str]]:
    """Status, body and headers of the answer to an error."""
    refused = _refused(error)
    kind = KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    details = {"message": _shown(refused.message), "type": kind, "param": refused.param and _shown(refused.param),
            "code": refused.status}  # fmt: skip
    headers = {} if refused.retry is None else {"Retry-After": str(max(1, round(refused.retry)))}
    return refused.status, {"error": details}, headers


def _shown(text: str) -> str:
    """A text that can be sent: what clients have sent may be no Unicode, and long."""
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"
    return text.encode("utf-8", "backslashreplace").decode()


def _refused(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, Full):
        return Refused(429, str(error), retry=error.retry)
    if isinstance(error, Draining):
        return Refused(503, str(error), retry=5)
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, RecursionError):
        return Refused(400, "the body is nested too deeply")
    if isinstance(error, ValueError):
        return Refused(400, str(error))
    return Refused(500, f"{type(error).__name__}: {error}")


def _invalid(error: RequestValidationError) -> Refused:
    """What is wrong with a body that does not fit its model."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Refused(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    where = ".".join(str(x) for x in first["loc"][1:]) or "body"
    return Refused(400, f"{where}: {first['msg']}", where)


async def answer(request: Request, error: Exception) -> JSONResponse:
    """The answer to an error."""
    status, body, headers = body_of(error)
    return JSONResponse(body, status, headers)

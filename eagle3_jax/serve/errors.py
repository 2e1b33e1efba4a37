"""`ApiError`, an error in OpenAI's shape."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A refused or failed request.

    Attributes:
        status: HTTP status. param: the wrong field. code: for programs.
        retry_after: seconds until a retry is useful; None gives no hint.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        return JSONResponse(self.body(), self.status, headers)


def stops() -> ApiError:
    return ApiError(503, "request: aborted, the server stops", code="aborted", retry_after=1.0)

"""Reading a client's JSON field by field, and saying in one sentence what is wrong with it.

`whole`, `number` and `flag` take a field out of `left`; null is as if it was not there. What then
is left was not known to anybody.
"""

import json
from typing import Any

from minillm.tools.checks import brief

MAX_BODY = 8 << 20  # bytes


class RefusedError(Exception):
    """A request that gets an error instead of an answer, in the form of OpenAI's errors.

    param: the field that is to blame.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        said = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": said}


def read_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a body; RefusedError for anything else."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RefusedError(
            f"The body is not JSON ({brief(str(error))}); send a JSON object."
        ) from None
    if not isinstance(body, dict):
        raise RefusedError(f"The body is {brief(body)}; send a JSON object.")
    return body


def whole(
    left: dict[str, Any], name: str, default: int | None, least: int, most: int = 2**31
) -> int | None:
    """A whole number in these bounds, or the default."""
    value = left.pop(name, None)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise RefusedError(
            f"{name} is {brief(value)}; give a whole number from {least} to {most}.", param=name
        )
    return value


def number(left: dict[str, Any], name: str, default: float, most: float) -> float:
    """A number from 0 to `most`, or the default."""
    value = left.pop(name, None)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 <= value <= most:  # NaN is not
        raise RefusedError(f"{name} is {brief(value)}; give a number from 0 to {most}.", param=name)
    return float(value)


def flag(left: dict[str, Any], name: str) -> bool:
    """true or false; false if it is not given."""
    value = left.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise RefusedError(f"{name} is {brief(value)}; give true or false.", param=name)
    return bool(value)

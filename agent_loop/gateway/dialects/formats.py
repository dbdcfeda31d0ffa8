"""JSON formats that an answer is to have, as each dialect's requests name them. Pure."""

from typing import Any, NamedTuple

import msgspec

from rl_async.errors import RequestRefused
from rl_async.rollout_server.json_schemas import without_unknown_formats


class JsonFormat(NamedTuple):
    """A format as a JSON schema (text), what the request said (``field`` and ``given``), and where the schema is."""

    schema: str
    field: str
    given: Any
    place: str

    def refused(self, reason: str) -> RequestRefused:
        """Return the refusal of a schema, which names its place in the request."""
        return RequestRefused(f"{self.place}: {reason}", code="invalid_request", param=self.place)


def take_format(asked: dict[str, Any], field: str, member: str = "") -> JsonFormat | None:
    """Take the JSON format out of the fields that ask for something; None if ``field`` has none.

    ``member``: of the field, whose other members stay. A format without a schema is that of any object. Raises
    RequestRefused, naming the place, for one whose schema is no object.
    """
    value: Any = asked.get(field)
    given: Any = value.get(member) if member and isinstance(value, dict) else value
    name = f"{field}.{member}" if member else field
    match given:
        case {"type": "json_object"}:
            schema, place = {"type": "object"}, name
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:  # of chat completions
            place = f"{name}.json_schema.schema"
        case {"type": "json_schema", "schema": dict(schema)}:
            place = f"{name}.schema"
        case {"type": "json_schema", "json_schema": {"schema": _}} | {"type": "json_schema", "schema": _}:
            place = f"{name}.json_schema.schema" if "json_schema" in given else f"{name}.schema"
            raise RequestRefused(f"{place} must be an object: a JSON schema", code="invalid_request", param=place)
        case {"type": "json_schema"}:
            schema, place = {"type": "object"}, name
        case _:
            return None
    del asked[field]
    if member and (rest := {key: other for key, other in value.items() if key != member and other is not None}):
        asked[field] = rest
    return JsonFormat(msgspec.json.encode(without_unknown_formats(schema)).decode(), name, given, place)

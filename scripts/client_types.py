"""Write the types of `clients/ts` from our OpenAPI description: every event, and what the HTTP interface returns.

.venv/bin/python scripts/client_types.py          # writes clients/ts/src/events.ts
.venv/bin/python scripts/client_types.py --check  # says whether it is current
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from retinue.server.app import OPEN, all_endpoints
from retinue.server.openapi import describe

TARGET = Path(__file__).parent.parent / "clients/ts/src/events.ts"
_HEAD = """// Written by scripts/client_types.py from the OpenAPI description of the server. Do not edit.
"""
_SCALARS = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}
_SKIPPED = re.compile(r"^(Items_|Error$)|Query$|^(Page|WholeList|SubtreeList|TaskWait|EventPage)$")
_RENAMED = {"Event": "RetinueEvent"}


def _name(reference: str) -> str:
    name = reference.rpartition("/")[2]
    return _RENAMED.get(name, name)


def _type(schema: dict[str, Any], *, given: bool) -> str:
    """Return the TypeScript type of a schema. `given`: a client sends it, so fields with a default may be left out."""
    if "$ref" in schema:
        return _name(schema["$ref"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type(one, given=given) for one in schema["anyOf"]))
    kind = schema.get("type")
    if kind == "array":
        inner = _type(schema.get("items", {}), given=given)
        return f"readonly {inner}[]" if re.fullmatch(r"\w+", inner) else f"readonly ({inner})[]"
    if kind == "object":
        if "properties" in schema:
            return _fields(schema, given=given)
        values = schema.get("additionalProperties")
        return f"Readonly<Record<string, {_type(values, given=given) if isinstance(values, dict) else 'unknown'}>>"
    return _SCALARS.get(kind or "", "unknown")


def _fields(schema: dict[str, Any], *, given: bool) -> str:
    lines: list[str] = []
    for name, field in schema.get("properties", {}).items():
        required = name in schema.get("required", ())
        # Some records leave out fields that have their default.
        mark = "" if required or (not given and schema.get("title") not in _SPARSE) else "?"
        lines.append(f"  readonly {name}{mark}: {_type(field, given=given)};")
    return "{\n" + "\n".join(lines) + "\n}"


_SPARSE = {"Message", "Usage", "Limits", "ToolResult", "Receipt", "ReceiptPart"}


def _comment(text: str) -> str:
    return f"/** {' '.join(text.split())} */\n" if text and text != "A page of a list." else ""


def written() -> str:
    """Return the whole file."""
    schemas: dict[str, dict[str, Any]] = describe(all_endpoints(), OPEN)["components"]["schemas"]
    parts = [_HEAD]
    for key, schema in schemas.items():
        if _SKIPPED.search(key):
            continue
        name, comment = _RENAMED.get(key, key), _comment(schema.get("description", ""))
        given = schema.get("additionalProperties") is False
        if "properties" in schema:
            parts.append(f"{comment}export interface {name} {_fields(schema, given=given)}\n")
        else:
            parts.append(f"{comment}export type {name} = {_type(schema, given=given)};\n")
    return "\n".join(parts)


def main() -> int:
    if "--check" in sys.argv:
        is_current = TARGET.exists() and TARGET.read_text() == written()
        if not is_current:
            print(f"{TARGET} is not current: run scripts/client_types.py", file=sys.stderr)
        return 0 if is_current else 1
    TARGET.write_text(written())
    return 0


if __name__ == "__main__":
    sys.exit(main())

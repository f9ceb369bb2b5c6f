"""Malformed requests to a real server: none is answered with 500, none changes anything.

    python -m tests.server.fuzz [--requests 10000] [--seed N] [--db URL]

Half of them are made by schemathesis from /openapi.json: parameters and bodies that break the description. The other
half are well-formed requests of which a few bytes are changed, cut, repeated or put elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import hypothesis
import msgspec
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error
from schemathesis.core import NotSet
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from retinue.server.app import all_endpoints
from retinue.server.http import Endpoint
from retinue.storage.sql import SqlStore
from retinue.storage.stores import sql_store

from ..packing import pack_all
from .processes import TOKEN, Served, served

AGENTS = "tests.server.served:agents"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
_SAFE = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example)


class Tally(NamedTuple):
    """What was sent and answered, and what went wrong."""

    statuses: Counter[str]
    problems: list[str]

    @property
    def sent(self) -> int:
        return sum(self.statuses.values())


# --- requests that break the description


def send_broken(url: str, description: dict[str, Any], each: int, seed: int, tally: Tally) -> None:
    """Send malformed requests to every operation; of a few, only to those with a body or a query."""
    schema = schemathesis.openapi.from_dict(description)
    schema.config.update(base_url=url)
    endpoints = {(one.method, re.sub(r":\w+}", "}", one.path)): one for one in all_endpoints()}
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation: Any = found.ok()  # pyright: ignore[reportAttributeAccessIssue]  # ours is valid
            endpoint = endpoints.get((operation.method.upper(), operation.path))
            if endpoint is not None and (each > 3 or endpoint.body or endpoint.query):
                _send_cases(operation, endpoint, session, each, seed, tally)


def _send_cases(
    operation: Any, endpoint: Endpoint, session: requests.Session, each: int, seed: int, tally: Tally
) -> None:
    left = [each]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=each * 3, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=_SAFE
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    def send(case: Any) -> None:
        if left[0] <= 0 or _is_well_formed(endpoint, case):
            return
        left[0] -= 1
        response = case.call(session=session, headers={"x-api-key": TOKEN}, timeout=60)
        tally.statuses[str(response.status_code)] += 1
        if endpoint.method != "GET" and response.status_code < 400:
            tally.problems.append(f"{case.method} {case.formatted_path} {case.body!r:.200}: {response.status_code}")
        try:
            case.validate_response(response, checks=CHECKS)
        except (Exception, FailureGroup) as exc:
            tally.problems.append(f"{case.method} {case.formatted_path} {case.query} {case.body!r:.200}: {exc!s:.900}")

    send()


def _is_well_formed(endpoint: Endpoint, case: Any) -> bool:
    """Return whether a request that is to change something has a body that may do so, whatever else is wrong in it."""
    if endpoint.method == "GET" or "{" in endpoint.path:
        return False
    if endpoint.body is None:
        return True
    try:
        body = b"{}" if isinstance(case.body, NotSet) else json.dumps(case.body)
        msgspec.json.decode(body, type=endpoint.body)
    except (ValueError, TypeError):
        return False
    return True


# --- requests of which bytes are changed

_BODIES: dict[str, Any] = {
    "StartRun": {"agent": "nobody", "input": [{"role": "user", "content": "x"}], "limits": {"steps": 3}},
    "Decisions": {"decisions": {"a/b": {"action": "resume", "payload": {"approved": True}, "id": "d1"}}},
    "ForkRun": {"after": 3, "input": "x"},
    "CancelRun": {"tasks": True, "reason": "x"},
    "CreateThread": {"thread_id": "a b", "messages": [{"role": "user", "content": "x"}]},
    "TaskSubmission": {"task_id": "t", "agent_id": "nobody", "input": "x", "context": {"session_id": "s"}},
}
"""Bodies that are well-formed, but name an agent that does not exist, or an id that is none."""
_PIECES = (
    b"\0", b"%00", b"\xff\xfe", b"%ff", b"\\ud800", b"\\u0000", b"\r\n", b"\n", b'"', b"[" * 500, b"{", b"}", b"null",
    b"-1", b"1e999", b"NaN", b"9" * 400, b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n",
    b"../../..", b"%2e%2e%2f", b"\xed\xa0\x80", "\u202e\U0001f600".encode(), b" HTTP/1.1\r\n", b"?limit=", b"&after=",
)  # fmt: skip


_IDS = ("x", "run_\0", "\0", "\u202e", "a" * 3000, "../x", "a/b", "%00", " ", "'; --", "\U0010ffff", "NaN", "-1")
_VALUES = ("\0", "x\0y", "", " ", -1, 2**70, 1e300, None, True, [], {}, [[]], {"a": {}}, "a" * 5000, "\u202e", "resume")


def spoil(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one of its parts replaced by something else."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        more = {rng.choice(("\0", "", "more", name.upper())): 1} if rng.random() < 0.2 else {}
        return {**value, name: spoil(value[name], rng), **more}
    if isinstance(value, list) and value and rng.random() < 0.8:
        return [spoil(value[0], rng), *value[1:]]
    return rng.choice(_VALUES)


def make_bytes(rng: random.Random, known: dict[str, str]) -> bytes:
    """Return a request with a few mistakes."""
    # Of a thread that is made without a body, every mistake in the body could leave a request that is right.
    endpoint = rng.choice([one for one in all_endpoints() if (one.method, one.path) != ("POST", "/api/v1/threads")])
    path = endpoint.path
    for name, value in known.items():
        real = value if endpoint.method == "GET" else "x"  # what is known could be cancelled or deleted
        path = path.replace(f"{{{name}}}", quote(rng.choice((real, *_IDS))))
    if rng.random() < 0.5 and endpoint.query is not None:
        names = [field.name for field in msgspec.structs.fields(endpoint.query)]
        values = (
            "-1",
            "x",
            "x%00y",
            "",
            "1e9",
            "%00",
            "%ff",
            "9" * 30,
            "idle",
            "nan",
            "inf",
            "null",
            "a,b",
            "run_x:3",
            "W10",
        )
        path += "?" + "&".join(f"{name}={rng.choice(values)}" for name in names)
    whole = _BODIES.get(getattr(endpoint.body, "__name__", ""), {})
    body = json.dumps(spoil(whole, rng) if rng.random() < 0.7 else whole).encode() if endpoint.body else b""
    head = [f"{endpoint.method} {path} HTTP/1.1", "host: x", f"x-api-key: {TOKEN}", "content-type: application/json"]
    is_whole = rng.random() < 0.5  # as HTTP; what it says is wrong
    length = len(body) if is_whole or rng.random() < 0.8 else rng.choice((0, 1, len(body) * 2, 10**9))
    head += [f"content-length: {length}"] if is_whole or rng.random() < 0.8 else ["transfer-encoding: chunked"]
    data = bytearray("\r\n".join([*head, "", ""]).encode() + body)
    for _ in range(0 if is_whole else rng.randrange(1, 4)):
        place = rng.randrange(len(data) or 1)
        match rng.randrange(5):
            case 0:
                data[place : place + 1] = rng.randbytes(1)
            case 1:
                data[place:place] = rng.choice(_PIECES)
            case 2:
                del data[place : place + rng.randrange(1, 20)]
            case 3:
                data[place:place] = data[place : place + rng.randrange(1, 60)]
            case _:
                del data[place:]
                data += b" "
    return bytes(data)


def exchange(connection: socket.socket, data: bytes) -> bytes:
    """Send a request and return the beginning of the answer. The end of the data is shown only if none comes."""
    connection.sendall(data)
    try:
        connection.settimeout(0.03)
        try:
            return connection.recv(65_536)
        except TimeoutError:
            connection.settimeout(60)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(65_536)
    except ConnectionError:
        return b""


def send_bytes(url: str, count: int, seed: int, known: dict[str, str], tally: Tally) -> None:
    """Send requests with mistakes, each over a connection of its own."""
    rng, port = random.Random(seed), int(url.rpartition(":")[2])
    for _ in range(count):
        data = make_bytes(rng, known)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            answer = exchange(connection, data)
        status = answer[9:12].decode("ascii", "replace") if answer else "closed"
        tally.statuses[status] += 1
        if status.startswith("5") or (status not in ("closed",) and not answer.startswith(b"HTTP/1.1 ")):
            tally.problems.append(f"{data[:400]!r}: {answer[:400]!r}")


# --- all of it


async def contents(url: str) -> dict[str, Any]:
    """Return what a database has, but for leases and for how logs that have ended are packed."""
    store = sql_store(url)
    assert isinstance(store, SqlStore)
    tables = ("events", "runs", "threads", "messages", "tasks", "task_results", "files", "tokens", "inbox")

    def read(link: Any) -> dict[str, Any]:
        return {name: sorted(link.run(f"SELECT * FROM {name}"), key=repr) for name in tables}

    try:
        await pack_all(store)
        return await store.database.read(read)
    finally:
        await store.close()


async def fuzz(url: str, count: int, seed: int, folder: Path, *, described: bool = True) -> Tally:
    """Send so many malformed requests to a server on a database; return what happened.

    `described`: make half of them from the description, which takes longer.
    """
    tally = Tally(Counter(), [])
    async with served(AGENTS, "--db", url, folder=folder) as server:
        started = await server.site.start("boss")
        await server.site.result(started["run_id"])
        before = await contents(url)
        await _send_all(server, started, count, seed, tally, described)
        after = await contents(url)
        tally.problems.extend(
            [f"{name} has changed: {after[name]!r:.900}" for name in before if before[name] != after[name]]
        )
        run = (await server.site.get(f"/api/v1/runs/{started['run_id']}")).body
        if run["status"] != "suspended":
            tally.problems.append(f"the run is {run['status']}")
        if await server.end() != 0:
            tally.problems.append("the server did not end well")
        if errors := await server.errors():
            tally.problems.append(f"the server said: {errors[:2000]}")
    return tally


async def _send_all(
    server: Served, started: dict[str, str], count: int, seed: int, tally: Tally, described: bool
) -> None:
    url, description = server.site.url, (await server.site.get("/openapi.json")).body
    each = 2 if count <= 1_000 else count // 2 // len(all_endpoints())
    if described:
        await asyncio.to_thread(send_broken, url, description, each, seed, tally)
    known = {"run_id": started["run_id"], "thread_id": started["thread_id"], "agent": "boss", "task_id": "t1"}
    await asyncio.to_thread(send_bytes, url, count - tally.sent, seed, known, tally)


def show(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz-http", description="Send malformed requests to a server.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None, help="default: another each time")
    parser.add_argument("--db", metavar="URL", help="an empty database (default: a new SQLite file)")
    args = parser.parse_args()
    seed = random.randrange(2**32) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory() as folder:
        url = args.db or f"sqlite:///{folder}/fuzzed.db"
        tally = asyncio.run(fuzz(url, args.requests, seed, Path(folder)))
    show(f"{tally.sent:,} malformed requests, seed {seed}")
    for status, count in sorted(tally.statuses.items()):
        show(f"  {status}: {count:,}")
    for problem in tally.problems[:50]:
        show(f"\n{problem}")
    show(f"{len(tally.problems):,} problems")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

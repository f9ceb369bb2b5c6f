"""The sessions of pages, and the page's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import Runtime
from retinue.server import StoredTokens, TokenStore
from retinue.server.sessions import SECONDS, cookie_in
from retinue.storage.sql import SqlStore
from retinue.storage.stores import open_store

from .agents import speaker
from .serving import TOKEN, Site, asking, serving

SESSION, RUNS = "/api/v1/session", "/api/v1/runs"


async def sign_in(site: Site, token: str = TOKEN) -> dict[str, str]:
    """Begin a session; return the headers of its page."""
    async with asking(site.url, token) as signed:
        answer = await signed.post(SESSION)
    assert answer.status == 201, answer
    cookie, *options = answer.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict", f"Max-Age={int(SECONDS)}"} <= set(options)
    assert cookie.startswith(f"retinue_session_{site.url.rpartition(':')[2]}=")
    assert token not in cookie
    return {"cookie": cookie, "origin": site.url}


async def test_a_session_has_the_scopes_of_its_token_without_admin() -> None:
    async with serving(Runtime([speaker("hi")])) as site, asking(site.url, None) as page:
        headers = await sign_in(site)
        shown = await page.get(SESSION, headers=headers)
        assert shown.body == {"user_id": "local", "scopes": ["answer", "read", "run"]}
        assert (await page.post(RUNS, {"agent": "speaker", "input": "x"}, headers=headers)).status == 201
        assert (await page.get("/metrics", headers=headers)).status == 403
        other_port = {"cookie": headers["cookie"].replace("retinue_session_", "retinue_session_1")}
        assert (await page.get(SESSION, headers=other_port)).status == 401


async def test_signing_out_ends_the_session_and_no_other() -> None:
    async with serving(Runtime([speaker("hi")])) as site, asking(site.url, None) as page:
        one, other = await sign_in(site), await sign_in(site)
        assert (await page.ask("DELETE", SESSION, headers=one)).status == 204
        assert (await page.get(SESSION, headers=one)).status == 401
        assert (await page.get(SESSION, headers=other)).status == 200


async def test_a_stored_session_outlives_the_process_but_not_its_token(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    store: Any = open_store(url)
    assert isinstance(store, SqlStore)
    async with Runtime([speaker("hi")], store=store):
        tokens = TokenStore(store)
        token, secret = await tokens.add("ann")
    port = 0
    for _ in range(2):
        store = open_store(url)
        async with serving(Runtime([speaker("hi")], store=store), auth=StoredTokens(store)) as site:
            if not port:
                headers, port = await sign_in(site, secret), int(site.url.rpartition(":")[2])
            # The name of the cookie has the port, which is another one after the restart.
            value = headers["cookie"].partition("=")[2]
            headers["cookie"] = f"retinue_session_{site.url.rpartition(':')[2]}={value}"
            async with asking(site.url, None) as page:
                assert (await page.get(SESSION, headers=headers)).body["user_id"] == "ann"
            user = await site.service.sessions.user_of(value)
            assert user is not None
    store = open_store(url)
    async with serving(Runtime([speaker("hi")], store=store), auth=StoredTokens(store)) as site:
        await TokenStore(store).revoke(token.token_id)
        assert await site.service.sessions.user_of(value) is None


async def test_a_session_of_a_fixed_token_ends_with_the_token(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    async with serving(Runtime([speaker("hi")], store=open_store(url))) as site:
        headers = await sign_in(site)
        value = headers["cookie"].partition("=")[2]
    for token, is_valid in ((TOKEN, True), ("another-token", False)):
        async with serving(Runtime([speaker("hi")], store=open_store(url)), token) as site:
            user = await site.service.sessions.user_of(value)
            assert (user is not None) == is_valid


@pytest.mark.parametrize(
    ("host", "cookie", "found"),
    [
        ("a:80", "retinue_session_80=x", "x"),
        ("a:80", "retinue_session=x; retinue_session_81=y", None),
        ("a", "b=c; retinue_session=x", "x"),
        ("[::1]:80", "retinue_session_80=x", "x"),
    ],
)
def test_a_cookie_belongs_to_one_port(host: str, cookie: str, found: str | None) -> None:
    assert cookie_in({"host": host, "cookie": cookie}) == found


async def test_the_files_of_the_page_need_no_token_and_may_load_nothing_else() -> None:
    async with serving(Runtime([speaker("hi")])) as site, asking(site.url, None) as page:
        for path in ("/", "/ui/page.js", "/ui/page.css", "/ui/licences.txt"):
            answer = await page.get(path)
            policy = answer.headers["content-security-policy"]
            assert answer.status == 200
            assert "default-src 'none'" in policy
            assert "require-trusted-types-for 'script'" in policy
            assert "unsafe" not in policy
            assert answer.headers["content-encoding"] == "gzip"
            again = await page.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status, again.body) == (304, "")
        body = (await page.get("/")).body
        assert "http" not in body.replace("http-equiv", "")
        assert (await page.get("/ui/../pyproject.toml")).status == 404
        assert (await page.get("/ui/missing.js")).status == 404

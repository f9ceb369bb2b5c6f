"""Serve agents over HTTP: `create_app(runtime)` is an ASGI application. Needs `pip install "retinue[server]"`."""

try:
    from .app import A2AOptions, create_app
    from .auth import SCOPES, Auth, NoAuth, OneToken, ProxyHeader, StoredTokens, Token, TokenStore, User
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError('retinue.server needs: pip install "retinue[server]"', name=exc.name) from exc

__all__ = [
    "SCOPES",
    "A2AOptions",
    "Auth",
    "NoAuth",
    "OneToken",
    "ProxyHeader",
    "StoredTokens",
    "Token",
    "TokenStore",
    "User",
    "create_app",
]

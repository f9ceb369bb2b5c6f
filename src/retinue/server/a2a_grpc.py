"""A2A over gRPC, versions 1.0 and 0.3. The tenant of a request is the name of the agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from a2a.compat.v0_3 import a2a_v0_3_pb2_grpc
from a2a.compat.v0_3.grpc_handler import CompatGrpcHandler
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers.grpc_handler import GrpcHandler, GrpcServerCallContextBuilder
from a2a.types import a2a_pb2_grpc
from a2a.utils.errors import A2AError, InvalidParamsError
from starlette.applications import Starlette

from ..core.errors import ConfigurationError
from .a2a import Refused, Tasks, as_a2a_error
from .http import join_headers
from .process import Tls

_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class _Contexts(GrpcServerCallContextBuilder):
    def build(self, context: Any) -> ServerCallContext:
        given: Sequence[tuple[str, str | bytes]] = context.invocation_metadata() or ()
        texts = [(name.lower(), one if isinstance(one, str) else one.decode("latin-1")) for name, one in given]
        return ServerCallContext(state={"headers": join_headers(texts)})


class _Refusals:
    async def abort_context(self, error: A2AError, context: Any) -> None:
        if isinstance(error, Refused):
            code = _CODES.get(error.error.status, grpc.StatusCode.UNAVAILABLE)
            await context.abort(code, error.error.detail)
        above: Any = super()
        await above.abort_context(error, context)


class _Service(_Refusals, GrpcHandler):
    pass


class _OldService(_Refusals, CompatGrpcHandler):
    pass


class _Conversions(grpc.aio.ServerInterceptor):
    """Answers what cannot be decoded or converted as an invalid argument, and other failures as internal ones."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        found: Any = await continuation(handler_call_details)
        if found is None:
            return None

        async def answer(request: bytes, context: Any) -> Any:
            try:
                return await found.unary_unary(found.request_deserializer(request), context)
            except Exception as exc:
                await _abort(context, exc)

        async def stream(request: bytes, context: Any) -> AsyncIterator[Any]:
            try:
                async for update in found.unary_stream(found.request_deserializer(request), context):
                    yield update
            except Exception as exc:
                await _abort(context, exc)

        handlers: Any = grpc
        if found.response_streaming:
            return handlers.unary_stream_rpc_method_handler(stream, response_serializer=found.response_serializer)
        return handlers.unary_unary_rpc_method_handler(answer, response_serializer=found.response_serializer)


async def _abort(context: Any, exc: Exception) -> None:
    """End a call with an error; what has ended it already passes."""
    if isinstance(exc, grpc.aio.AbortError):
        raise exc
    error = as_a2a_error(exc)
    code = grpc.StatusCode.INVALID_ARGUMENT if isinstance(error, InvalidParamsError) else grpc.StatusCode.INTERNAL
    await context.abort(code, error.message)


async def start_grpc(
    app: Starlette, host: str, port: int, *, shared: bool = False, listed: bool = True, tls: Tls | None = None
) -> grpc.aio.Server:
    """Serve the A2A agents of an application over gRPC, and name the port in their cards.

    The caller stops the server. `shared`: other processes of the same server listen on the port, too. `listed`: whether
    the cards of agents name it, beside that of the server; some clients refuse a card with an address of another origin.

    Raise ConfigurationError if the address cannot be had.
    """
    tasks: Any = app.state.a2a
    if not isinstance(tasks, Tasks):
        raise ConfigurationError('A2A is not installed: pip install "retinue[a2a]"')
    options = [("grpc.max_receive_message_length", tasks.service.max_body), ("grpc.so_reuseport", int(shared))]
    server = grpc.aio.server(options=options, interceptors=[_Conversions()])
    new: Any = a2a_pb2_grpc
    old: Any = a2a_v0_3_pb2_grpc
    new.add_A2AServiceServicer_to_server(_Service(tasks, _Contexts()), server)
    old.add_A2AServiceServicer_to_server(_OldService(tasks, _Contexts()), server)
    try:
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if tls is None:
            tasks.cards.grpc_port = server.add_insecure_port(place)
        else:
            tasks.cards.grpc_port = server.add_secure_port(place, grpc.ssl_server_credentials([tls.read()]))
        await server.start()
    except RuntimeError as exc:
        raise ConfigurationError(f"cannot listen on {host} port {port} for gRPC: give another --grpc-port") from exc
    tasks.cards.names_grpc = listed
    return server

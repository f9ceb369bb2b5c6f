from collections.abc import AsyncIterator

from retinue import Agent, ModelRequest, Runtime
from retinue.models import ModelChunk, TextChunk


class Echo:
    name = "local:echo"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextChunk(f"You said: {request.messages[-1].text}")


print(Runtime([Agent("echo", Echo())]).run_sync("echo", "hello").response)

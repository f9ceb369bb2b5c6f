"""A server of fasta2a: python fasta2a_server.py <port>"""

import asyncio
import sys
from contextlib import asynccontextmanager
from uuid import uuid4

import uvicorn
from fasta2a import FastA2A, Worker
from fasta2a.broker import InMemoryBroker
from fasta2a.storage import InMemoryStorage


class Words(Worker):
    work = {}

    async def _loop(self):
        """One task at a time is the default; two callers need two."""
        async with asyncio.TaskGroup() as group:
            async for operation in self.broker.receive_task_operations():
                group.create_task(self._handle_task_operation(operation))

    async def run_task(self, params):
        self.work[params["id"]] = asyncio.current_task()
        task = await self.storage.load_task(params["id"])
        texts = [part["text"] for message in task["history"] for part in message["parts"] if message["role"] == "user"]
        verb, _, rest = texts[0].partition(" ")
        ids = params["id"], params["context_id"]
        await self.storage.update_task(ids[0], state="working")
        await self.publish_status(*ids, "working")
        asks = {"ask": "input-required", "login": "auth-required"}
        if verb in asks and len(texts) == 1:
            asked = {"role": "agent", "parts": [{"text": rest}], "message_id": str(uuid4())}
            await self.storage.update_task(ids[0], state=asks[verb], new_messages=[asked])
            await self.publish_status(*ids, asks[verb], asked)
            return
        if verb == "hang":
            await asyncio.Event().wait()
        words = [f"You said {texts[-1]}."] if verb in asks else rest.split()
        pieces = [f" {word}" if number else word for number, word in enumerate(words)]
        made = {"artifact_id": "a", "parts": [{"text": "".join(pieces)}]}
        for number, piece in enumerate(pieces):
            await self.publish_artifact(
                *ids,
                {"artifact_id": "a", "parts": [{"text": piece}]},
                append=number > 0,
                last_chunk=piece is pieces[-1],
            )
            await asyncio.sleep(0.05)
        await self.storage.update_task(ids[0], state="completed", new_artifacts=[made])

    async def cancel_task(self, params):
        if (work := self.work.get(params["id"])) is not None:
            work.cancel()
        await self.storage.update_task(params["id"], state="canceled")

    def build_message_history(self, history):
        return history

    def build_artifacts(self, result):
        return []


port = int(sys.argv[1])
storage, broker = InMemoryStorage(), InMemoryBroker()


@asynccontextmanager
async def lifespan(app):
    async with app.task_manager, Words(broker=broker, storage=storage).run():
        yield


app = FastA2A(storage=storage, broker=broker, name="words", url=f"http://127.0.0.1:{port}/", lifespan=lifespan)
uvicorn.run(app, port=port, log_level="warning")

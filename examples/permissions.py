"""Permissions as rules: what is allowed, what asks a human, what is never shown to the model."""

import asyncio
import tempfile

from retinue import Agent, Decision, LocalFilesystem, Permissions, Runtime, file_tools
from retinue.testing import ScriptedModel, call, say

RULES = Permissions(
    deny=["edit_file", "write_file(path=secrets/*)"],  # edit_file is not even offered
    ask=["write_file"],
    allow=["read_file", "list_files", "glob_files", "grep_files"],
    default="deny",
)

model = ScriptedModel(
    [
        [
            call("write_file", {"path": "secrets/key.txt", "content": "hunter2"}, id="call_secret"),
            call("write_file", {"path": "hello.txt", "content": "hello"}, id="call_hello"),
            call("list_files", {}, id="call_list"),
        ],
        say("One was refused, one was approved."),
    ]
)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tools = file_tools(LocalFilesystem(folder))
        runtime = Runtime([Agent("writer", model, "Write files.", tools, [RULES])])
        waiting = await runtime.run("writer", "Write the two files.")
        print("offered:", ", ".join(descriptor.name for descriptor in model.requests[0].tools))
        for ticket in waiting.suspended.values():
            print("asks:", ticket.message, ticket.parameters)
        result = await runtime.resume(waiting.run_id, {call_id: Decision.approve() for call_id in waiting.suspended})
        for message in result.messages:
            print(message)


if __name__ == "__main__":
    asyncio.run(main())

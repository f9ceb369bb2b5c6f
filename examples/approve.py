"""A human in the loop: the agent may delete a file only when you say so.

python examples/approve.py            asks you in the terminal
python examples/approve.py yes        answers for you
"""

import asyncio
import sys

from retinue import Agent, Decision, RunStatus, Runtime, SuspendTicket, ToolContext, ToolResult, tool
from retinue.testing import ScriptedModel, call, say

APPROVAL = {"type": "object", "properties": {"approved": {"type": "boolean"}}, "required": ["approved"]}


@tool
async def delete_file(path: str, ctx: ToolContext) -> ToolResult:
    """Delete a file, after a human has agreed."""
    if ctx.resume_input is None:
        ticket = SuspendTicket(f"delete-{ctx.call_id}", "delete", f"Delete {path}?", {"path": path}, APPROVAL)
        return ToolResult.suspended(ticket.message, ticket=ticket)
    if not ctx.resume_input["approved"]:
        return ToolResult.error("the human said no", code="refused")
    return ToolResult.success(f"{path} is deleted")  # this example does not really delete anything


# A script stands in for a model, so that the example runs without a key.
model = ScriptedModel(
    [
        [say("I will clean up."), call("delete_file", {"path": "old.log"}), call("delete_file", {"path": "notes.md"})],
        say("I have done what you allowed."),
    ]
)
agent = Agent("janitor", model, "Keep the folder tidy.", tools=[delete_file])


def ask(question: str) -> str:
    try:
        return input(f"{question} [yes/no] ")
    except EOFError:
        return "no"


async def main(answers: list[str]) -> None:
    runtime = Runtime([agent])
    result = await runtime.run("janitor", "Please tidy up.")
    while result.status is RunStatus.SUSPENDED:
        call_id, ticket = next(iter(result.suspended.items()))
        answer = answers[0] if answers else await asyncio.to_thread(ask, ticket.message)
        decision = Decision.approve() if answer.strip().lower().startswith("y") else Decision.reject()
        result = await runtime.resume(result.run_id, {call_id: decision})
    for message in result.messages:
        print(message)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

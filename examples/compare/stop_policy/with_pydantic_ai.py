from pydantic_ai import Agent, ModelResponse, RunContext
from pydantic_ai.capabilities import Hooks
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models import ModelRequestContext

hooks = Hooks[object]()


@hooks.on.after_model_request
async def stop_on_same_call(
    ctx: RunContext[object], *, request_context: ModelRequestContext, response: ModelResponse
) -> ModelResponse:
    answers = [message for message in [*ctx.messages, response] if isinstance(message, ModelResponse)]
    calls = [(call.tool_name, call.args_as_json_str()) for answer in answers for call in answer.tool_calls]
    if len(calls) > len(set(calls)):
        raise AgentRunError("the model repeats a call")
    return response


agent = Agent("anthropic:claude-sonnet-4-6", capabilities=[hooks])


@agent.tool_plain
async def look(place: str) -> str:
    """Look for the key."""
    return "not here"


try:
    print("completed", agent.run_sync("Find the key.").output)
except AgentRunError as error:
    print("failed", error)

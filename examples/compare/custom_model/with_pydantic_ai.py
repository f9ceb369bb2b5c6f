from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.settings import ModelSettings


class Echo(Model):
    @property
    def model_name(self) -> str:
        return "echo"

    @property
    def system(self) -> str:
        return "local"

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        prompts = [part for part in messages[-1].parts if isinstance(part, UserPromptPart)]
        return ModelResponse([TextPart(f"You said: {prompts[-1].content}")], model_name=self.model_name)


print(Agent(Echo()).run_sync("hello").output)

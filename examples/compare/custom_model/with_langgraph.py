from typing import Any

from langchain.agents import create_agent
from langchain.messages import AIMessage
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult


class Echo(BaseChatModel):
    @property
    def _llm_type(self) -> str:
        return "echo"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = AIMessage(f"You said: {messages[-1].text}")
        return ChatResult(generations=[ChatGeneration(message=answer)])


agent = create_agent(Echo())
question = {"messages": [{"role": "user", "content": "hello"}]}
print(agent.invoke(question)["messages"][-1].text)

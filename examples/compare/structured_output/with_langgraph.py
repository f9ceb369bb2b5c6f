from langchain.agents import create_agent
from pydantic import BaseModel


class Invoice(BaseModel):
    customer: str
    total: float


agent = create_agent("anthropic:claude-sonnet-4-6", response_format=Invoice, system_prompt="Extract the invoice.")
question = {"messages": [{"role": "user", "content": "Ann owes us 120.50 for rope."}]}
invoice: Invoice = agent.invoke(question)["structured_response"]
print(invoice.customer.upper(), round(invoice.total, 2))

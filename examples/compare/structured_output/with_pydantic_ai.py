from pydantic import BaseModel
from pydantic_ai import Agent


class Invoice(BaseModel):
    customer: str
    total: float


agent = Agent("anthropic:claude-sonnet-4-6", output_type=Invoice, instructions="Extract the invoice.")
invoice = agent.run_sync("Ann owes us 120.50 for rope.").output
print(invoice.customer.upper(), round(invoice.total, 2))

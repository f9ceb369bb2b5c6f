from pydantic import BaseModel

from retinue import Agent, Runtime


class Invoice(BaseModel):
    customer: str
    total: float


agent = Agent("clerk", "anthropic:claude-sonnet-4-6", "Extract the invoice.", output=Invoice)
invoice = Runtime([agent]).run_sync(agent, "Ann owes us 120.50 for rope.").unwrap()
print(invoice.customer.upper(), round(invoice.total, 2))

"""Delegation: how a tool starts another agent and what comes back."""

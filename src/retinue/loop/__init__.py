"""The agent loop. Read run.py first."""

"""Language models, by name."""

"""Hostile input at random: `parts.PARTS` names what is fuzzed. The suite tries a seeded share, `scripts/fuzz` all."""

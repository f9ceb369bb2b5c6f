"""The rules of offline:rules. They are no language model: they match words."""

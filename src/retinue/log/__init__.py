"""The log of a run: its rows, their fold, its owner, and the way it is written, read and asked."""

"""Benchmarks: what Retinue adds to bare asyncio, as ratios measured in one run."""

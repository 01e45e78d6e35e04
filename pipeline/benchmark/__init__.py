"""Benchmarks of drafters and length policies: what to decode, with what, what came of it, and reports."""

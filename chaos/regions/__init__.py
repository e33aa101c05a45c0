"""Limits over several regions, under latency, loss, partitions and skewed clocks: every admission is judged."""

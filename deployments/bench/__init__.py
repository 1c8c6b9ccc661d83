"""Benchmarks: `python -m deployments.bench.NAME`. Each prints one JSON object as its last line.

It has `bench`, `ratio` (ours over the limit or a peer, measured in the same run and in turns), `goal`, and the
figures it was made of.
"""

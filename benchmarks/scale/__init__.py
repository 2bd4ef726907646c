"""What deployments of many shards cost and carry, computed from our own figures and stated prices.

`python -m benchmarks.scale` writes docs/scale.md and the table of PUTs in docs/journal.md.
`figures.py` has every number that goes in, with where it is from; `costs.py` the formulas;
`takeovers.py` simulates leases and takeovers; `page.py` writes what comes out.
"""

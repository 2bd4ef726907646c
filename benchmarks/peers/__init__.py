"""Other streaming lakehouses that benchmarks measure beside ours, each in a module of its own.

They are the extra `peers`, in an environment of its own under `.cache/`: `make peers`. Where one is
not installed, a benchmark reports its limit only.
"""

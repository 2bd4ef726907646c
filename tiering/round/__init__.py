"""One tiering round: the plan, the tasks that move the rows, the commit.

`_round.TieringRound` runs a round; `_lease.Lease` keeps its claim alive.
"""

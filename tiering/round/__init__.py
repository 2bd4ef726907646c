"""One tiering round: what it moves, the tasks that move it, the commit that adds it.

The door is `round.TieringRound`; `lease.Lease` keeps the claim meanwhile.
"""

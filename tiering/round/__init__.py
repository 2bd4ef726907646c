"""One tiering round: what it moves, the tasks that move it, the commit that adds it."""

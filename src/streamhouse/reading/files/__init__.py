"""Which files of the lake a read needs: planning and pruning. Driver only."""

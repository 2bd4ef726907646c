"""What a batch read consists of: one cut of a table over both tiers, as splits. Driver only."""

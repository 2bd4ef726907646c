"""The parts of a batch read: one cut of a table over both tiers, as splits. Driver only."""

"""Transactions: staged rows become visible at one instant in all buckets, or not at all."""

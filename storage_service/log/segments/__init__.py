"""The segments of one log: its files. The entry is `segment_chain.SegmentChain`."""

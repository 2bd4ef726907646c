"""The segments of one log: its files. The door is `segment_chain.SegmentChain`."""

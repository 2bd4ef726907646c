"""What a batch of changes does to a bucket: input, merging, changelog, what to store."""

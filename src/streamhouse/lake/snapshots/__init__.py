"""What a snapshot consists of: manifests, live files, ancestors, the offsets it covers."""

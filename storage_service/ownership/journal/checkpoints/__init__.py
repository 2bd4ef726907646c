"""Every file of a data directory at one place of its journal, in the store; begin at
`checkpoint.py`, and at `manifest.py` for what a checkpoint says."""

"""The parts shared by every program: model, values, texts, wire, errors. No I/O of its own."""

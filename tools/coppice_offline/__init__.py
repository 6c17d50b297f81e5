"""The three cores in one process, with direct calls: no thread, no socket, no protobuf."""

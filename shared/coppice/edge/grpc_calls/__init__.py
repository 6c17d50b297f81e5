"""What calls may take of a gRPC server with threads."""

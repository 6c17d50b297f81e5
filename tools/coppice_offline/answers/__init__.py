"""What comes of requests: tokens of one, the pieces of a stream."""

"""What became of each request, in one line each: who asked, what it took, where its time went, and why."""

"""What a user of `coppice.LLM` gives and gets: options, results, errors."""

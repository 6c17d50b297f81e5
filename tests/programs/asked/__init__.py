"""What runs in the environment of the programs: each file prints one JSON object, a value for each case."""

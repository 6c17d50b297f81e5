"""What is asked and how it is judged: pure, as all cores."""

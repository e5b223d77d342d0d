"""Training: recipes' settings, the algorithms table, the stages and the run that joins them."""
